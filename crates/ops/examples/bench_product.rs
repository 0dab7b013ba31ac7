//! Matrix products of a training step against the same products by the `gemm` crate, in turns.
//!
//! `cargo run --release -p candle-ops --example bench_product` prints GFLOP/s of both and their ratio; f32, all cores.

use candle_core::{Device, Result, Tensor};
use candle_ops::{linear_forward, linear_input_grad, linear_weight_grad_into};
use std::hint::black_box;
use std::time::Instant;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc; // as the programs have

const TURNS: usize = 15;

/// Tokens, `in` and `out` of the linear layers of `bench_train`'s default model.
const LAYERS: [(&str, usize, usize, usize); 5] = [
    ("k_proj", 1024, 512, 256),
    ("q_proj", 1024, 512, 512),
    ("up_proj", 1024, 512, 1376),
    ("down_proj", 1024, 1376, 512),
    ("lm_head", 512, 512, 8192),
];

fn main() -> Result<()> {
    println!("| product | GFLOP/s | gemm | ratio |\n|---|---|---|---|");
    let mut totals = [0.0; 2];
    for (name, tokens, num_in, num_out) in LAYERS {
        let random = |dims: (usize, usize)| Tensor::randn(0f32, 1.0, dims, &Device::Cpu);
        let (x, w) = (random((tokens, num_in))?, random((num_out, num_in))?);
        let dy = random((tokens, num_out))?;
        let (xs, ws, dys) = (floats(&x)?, floats(&w)?, floats(&dy)?);
        let mut y = vec![0f32; tokens * num_out];
        let mut dx = vec![0f32; tokens * num_in];
        let mut dw = vec![0f32; num_out * num_in];
        let flops = 2.0 * (tokens * num_in * num_out) as f64;
        let mut report = |what: &str, secs: [f64; 2]| {
            let speed = secs.map(|secs| flops / secs / 1e9);
            let ratio = secs[1] / secs[0];
            println!(
                "| {name} {what} | {:.0} | {:.0} | {ratio:.2} |",
                speed[0], speed[1]
            );
            totals
                .iter_mut()
                .zip(secs)
                .for_each(|(total, secs)| *total += secs);
        };
        let ours = || linear_forward(&x, &w, None).map(|y| drop(black_box(y)));
        let other = || {
            gemm(
                (&mut y, tokens, num_out),
                (&xs, num_in, 1),
                (&ws, 1, num_in),
                num_in,
                false,
            )
        };
        report("forward", in_turns(ours, other)?);
        let ours = || linear_input_grad(&dy, &w).map(|dx| drop(black_box(dx)));
        let other = || {
            gemm(
                (&mut dx, tokens, num_in),
                (&dys, num_out, 1),
                (&ws, num_in, 1),
                num_out,
                false,
            )
        };
        report("input gradient", in_turns(ours, other)?);
        let ours_dw = Tensor::zeros(num_out * num_in, x.dtype(), x.device())?;
        let ours = || linear_weight_grad_into(&ours_dw, true, &dy, &x);
        let other = || {
            gemm(
                (&mut dw, num_out, num_in),
                (&dys, 1, num_out),
                (&xs, num_in, 1),
                tokens,
                true,
            )
        };
        report("weight gradient", in_turns(ours, other)?);
    }
    println!("| all | | | {:.2} |", totals[1] / totals[0]);
    Ok(())
}

fn floats(tensor: &Tensor) -> Result<Vec<f32>> {
    tensor.flatten_all()?.to_vec1()
}

/// Fewest seconds of each, in turns.
fn in_turns(mut ours: impl FnMut() -> Result<()>, mut other: impl FnMut()) -> Result<[f64; 2]> {
    let mut best = [f64::MAX; 2];
    for _ in 0..TURNS {
        let start = Instant::now();
        ours()?;
        best[0] = best[0].min(start.elapsed().as_secs_f64());
        let start = Instant::now();
        other();
        best[1] = best[1].min(start.elapsed().as_secs_f64());
    }
    Ok(best)
}

/// A matrix with its row and column stride.
type Strided<'a> = (&'a [f32], usize, usize);

fn gemm(
    (out, rows, cols): (&mut [f32], usize, usize),
    (lhs, lhs_row, lhs_col): Strided<'_>,
    (rhs, rhs_row, rhs_col): Strided<'_>,
    depth: usize,
    add: bool,
) {
    assert_eq!(
        (out.len(), lhs.len(), rhs.len()),
        (rows * cols, rows * depth, depth * cols)
    );
    let parallelism = gemm::Parallelism::Rayon(rayon::current_num_threads());
    // SAFETY: the matrices fill their slices, by the check above.
    unsafe {
        gemm::gemm(
            rows,
            cols,
            depth,
            out.as_mut_ptr(),
            1,
            cols as isize,
            add,
            lhs.as_ptr(),
            lhs_col as isize,
            lhs_row as isize,
            rhs.as_ptr(),
            rhs_col as isize,
            rhs_row as isize,
            1.0,
            1.0,
            false,
            false,
            false,
            parallelism,
        );
    }
}
