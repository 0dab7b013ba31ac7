//! What of a training step is not a matrix product, operation by operation, beside the time that memory needs for it.
//!
//! `cargo run --release -p candle-ops --example bench_elementwise -- bf16` prints for the default model of `bench_train` the milliseconds of
//! a step, the megabytes that each operation must read and write, and the ratio of the time to that of a copy of as many bytes in
//! memory, measured in the same run. Small tensors that the caches still hold are faster than memory.

use candle_core::{DType, Device, Result, Tensor, bail};
use candle_ops::{
    AdamWBuffers, AdamWConstants, AdamWSlot, RopeDirection, adamw, add_into,
    cross_entropy_grad_in_place, embedding_forward, embedding_grad_into, rms_norm_backward,
    rms_norm_forward, rope_in_place, softmax_stats, sum_of_squares, swiglu_backward_and_output,
    swiglu_forward,
};
use std::hint::black_box;
use std::time::Instant;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc; // as the programs have

const TURNS: usize = 30;
/// Sizes of `bench_train`'s default model. Each layer has tensors of its own, so that one finds in the caches what a step would.
const LAYERS: usize = 8;
const TOKENS: [usize; 2] = [4, 256];
const HIDDEN: usize = 512;
const MLP: usize = 1376;
const HEADS: [usize; 2] = [8, 4];
const HEAD_DIM: usize = 64;
const VOCAB: usize = 8192;
const LOGIT_ROWS: usize = 512;
/// Values of an optimizer's bucket, that of a decoder layer.
const BUCKET: usize = 2_900_992;
/// Values of the copy that measures the memory: more than caches hold.
const COPIED: usize = 16 << 20;

fn main() -> Result<()> {
    let dtype = match std::env::args().nth(1).as_deref() {
        None | Some("f32") => DType::F32,
        Some("bf16") => DType::BF16,
        Some("f16") => DType::F16,
        Some(other) => bail!("expected f32, bf16 or f16, got {other}"),
    };
    let mut table = Table::new(dtype)?;
    println!(
        "| operation, {dtype:?} | calls | ms/step | MB/step | of a copy's time |\n|---|---|---|---|---|"
    );
    rows(&mut table)?;
    heads(&mut table)?;
    vocabulary(&mut table)?;
    optimizer(&mut table)?;
    let floor = table.bytes / table.bytes_per_sec;
    let (secs, mb) = (table.secs, table.bytes / 1e6);
    println!(
        "| all | | {:.2} | {mb:.0} | {:.2} |",
        secs * 1e3,
        secs / floor
    );
    println!("copying: {:.1} GB/s", table.bytes_per_sec / 1e9);
    Ok(())
}

struct Table {
    dtype: DType,
    /// Read and written by a copy.
    bytes_per_sec: f64,
    secs: f64,
    bytes: f64,
}

impl Table {
    fn new(dtype: DType) -> Result<Self> {
        let from = Tensor::ones(COPIED, DType::F32, &Device::Cpu)?;
        let to = Tensor::ones(COPIED, DType::F32, &Device::Cpu)?;
        let mut secs = f64::INFINITY;
        for _ in 0..TURNS {
            let start = Instant::now();
            add_into(&to, false, &from)?;
            secs = secs.min(start.elapsed().as_secs_f64());
        }
        Ok(Self {
            dtype,
            bytes_per_sec: 8.0 * COPIED as f64 / secs,
            secs: 0.0,
            bytes: 0.0,
        })
    }

    /// A line for `calls` calls in a step, of which `op` makes [`LAYERS`]; each must move so many values of the dtype and of f32.
    fn add(
        &mut self,
        name: &str,
        calls: usize,
        (values, floats): (usize, usize),
        mut op: impl FnMut(usize) -> Result<()>,
    ) -> Result<()> {
        let mut fewest = [f64::INFINITY; LAYERS];
        for _ in 0..TURNS {
            for (i, fewest) in fewest.iter_mut().enumerate() {
                let start = Instant::now();
                op(i)?;
                *fewest = fewest.min(start.elapsed().as_secs_f64());
            }
        }
        let secs = fewest.iter().sum::<f64>() * calls as f64 / LAYERS as f64;
        let bytes = (calls * (values * self.dtype.size_in_bytes() + 4 * floats)) as f64;
        let ratio = secs / (bytes / self.bytes_per_sec);
        println!(
            "| {name} | {calls} | {:.2} | {:.0} | {ratio:.2} |",
            secs * 1e3,
            bytes / 1e6
        );
        self.secs += secs;
        self.bytes += bytes;
        Ok(())
    }

    fn random(&self, dims: &[usize]) -> Result<Vec<Tensor>> {
        let tensors =
            (0..LAYERS).map(|_| Tensor::randn(0f32, 1.0, dims, &Device::Cpu)?.to_dtype(self.dtype));
        tensors.collect()
    }
}

fn rows(table: &mut Table) -> Result<()> {
    let [b, t] = TOKENS;
    let (x, dy) = (
        table.random(&[b, t, HIDDEN])?,
        table.random(&[b, t, HIDDEN])?,
    );
    let residual = table.random(&[b, t, HIDDEN])?;
    let w = table.random(&[HIDDEN])?;
    let n = b * t * HIDDEN;
    // In the backward pass once more.
    table.add("rms_norm", 4 * LAYERS, (2 * n, 0), |i| {
        drop(black_box(rms_norm_forward(&x[i], &w[i], 1e-5)?));
        Ok(())
    })?;
    table.add("rms_norm, backward", 2 * LAYERS, (4 * n, 0), |i| {
        let dx = rms_norm_backward(&x[i], &w[i], &dy[i], 1e-5, Some(&residual[i]), true)?;
        drop(black_box(dx));
        Ok(())
    })?;
    let (gate, up) = (table.random(&[b, t, MLP])?, table.random(&[b, t, MLP])?);
    let dy = table.random(&[b, t, MLP])?;
    let n = b * t * MLP;
    table.add("swiglu", LAYERS, (3 * n, 0), |i| {
        drop(black_box(swiglu_forward(&gate[i], &up[i])?));
        Ok(())
    })?;
    table.add("swiglu, backward", LAYERS, (6 * n, 0), |i| {
        let grads_and_output = swiglu_backward_and_output(&gate[i], &up[i], &dy[i])?;
        drop(black_box(grads_and_output));
        Ok(())
    })
}

fn heads(table: &mut Table) -> Result<()> {
    let [b, t] = TOKENS;
    let angles = Tensor::randn(0f32, 1.0, (t, HEAD_DIM / 2), &Device::Cpu)?;
    let (cos, sin) = (angles.cos()?, angles.sin()?);
    for (name, heads) in [("rope of q", HEADS[0]), ("rope of k", HEADS[1])] {
        let x = table.random(&[b, t, heads, HEAD_DIM])?;
        let n = b * t * heads * HEAD_DIM;
        table.add(name, 2 * LAYERS, (2 * n, 0), |i| {
            let turned = rope_in_place(x[i].clone(), &cos, &sin, RopeDirection::Forward)?;
            drop(black_box(turned));
            Ok(())
        })?;
    }
    Ok(())
}

fn vocabulary(table: &mut Table) -> Result<()> {
    let [b, t] = TOKENS;
    let ids = |len: usize, dims: &[usize]| {
        let ids: Vec<u32> = (0..len as u32).map(|i| i * 7919 % VOCAB as u32).collect();
        Tensor::from_vec(ids, dims, &Device::Cpu)
    };
    let (targets, tokens) = (ids(LOGIT_ROWS, &[LOGIT_ROWS])?, ids(b * t, &TOKENS)?);
    let weight = table.random(&[VOCAB, HIDDEN])?;
    let n = b * t * HIDDEN;
    table.add("embedding", 1, (2 * n, 0), |i| {
        drop(black_box(embedding_forward(&weight[i], &tokens)?));
        Ok(())
    })?;
    let dy = table.random(&[b, t, HIDDEN])?;
    let dst = Tensor::zeros(VOCAB * HIDDEN, DType::F32, &Device::Cpu)?;
    table.add("embedding, gradient", 1, (n, VOCAB * HIDDEN), |i| {
        embedding_grad_into(&dst, false, &tokens, &dy[i])
    })?;
    let logits = table.random(&[LOGIT_ROWS, VOCAB])?;
    let lse = Tensor::full(10f32, LOGIT_ROWS, &Device::Cpu)?;
    let (n, calls) = (LOGIT_ROWS * VOCAB, b * t / LOGIT_ROWS);
    table.add("softmax_stats", calls, (n, 0), |i| {
        drop(black_box(softmax_stats(&logits[i], &targets, 0)?));
        Ok(())
    })?;
    table.add("cross_entropy_grad", calls, (2 * n, 0), |i| {
        let grad = cross_entropy_grad_in_place(logits[i].clone(), &lse, &targets, 0, 1.0)?;
        drop(black_box(grad));
        Ok(())
    })
}

fn optimizer(table: &mut Table) -> Result<()> {
    let zeros = |dtype| -> Result<Vec<Tensor>> {
        let zeros = |_| Tensor::zeros(BUCKET, dtype, &Device::Cpu);
        (0..LAYERS).map(zeros).collect()
    };
    let calls = 2 * VOCAB * HIDDEN / BUCKET + LAYERS;
    let [grad, exp_avg, exp_avg_sq] = [zeros(DType::F32)?, zeros(DType::F32)?, zeros(DType::F32)?];
    table.add("norm of gradients", calls, (0, BUCKET), |i| {
        black_box(sum_of_squares(&grad[i])?);
        Ok(())
    })?;
    // Masters, and how many values of the dtype and of f32 are read and written; remainders are of 16 bits as bf16 is.
    let (master, moved) = match table.dtype {
        DType::F32 => (None, (0, 7 * BUCKET)),
        DType::BF16 => (Some(zeros(DType::I16)?), (4 * BUCKET, 5 * BUCKET)),
        _ => (Some(zeros(DType::F32)?), (BUCKET, 7 * BUCKET)),
    };
    let weights = table.random(&[BUCKET])?;
    let constants = AdamWConstants {
        step_size: 1e-3,
        correction: 1.0,
        decay_factor: 0.9999,
        one_minus_beta1: 0.1,
        beta2: 0.95,
        one_minus_beta2: 0.05,
        eps: 1e-8,
        scale: 1.0,
    };
    table.add("adamw", calls, moved, |i| {
        let buffers = AdamWBuffers {
            master: master.as_ref().map(|master| &master[i]),
            exp_avg: &exp_avg[i],
            exp_avg_sq: &exp_avg_sq[i],
            grad: &grad[i],
        };
        let slot = AdamWSlot {
            weights: &weights[i],
            start: 0,
            decays: true,
        };
        adamw(&buffers, &[slot], &constants)
    })
}
