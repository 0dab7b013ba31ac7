//! Times an all_reduce of 64 MiB of f32 over 4 ranks against the plain copies and adds that it needs.
//!
//! The reference reads every input and writes every output once, as the all_reduce does, with plain loops shared out
//! over the same rayon pool: copy the first input, add the others, copy the sum to the other outputs. It runs twice:
//! into memory in use already, and into new memory, which the all_reduce needs because every rank gets a new tensor.
//! (For 64 MiB the allocator asks the system each time, and first writes then cost page faults.) All three run in
//! turns; medians are compared.
//!
//! ```text
//! cargo run --release -p candle-comm --example bench_all_reduce
//! ```

use std::sync::Mutex;
use std::time::Instant;

use candle_comm::{ReduceOp, launch};
use candle_core::{Device, Result, Tensor};
use rayon::prelude::*;

/// As in the example programs: memory is kept, not given back to the system and faulted in again.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const WORLD_SIZE: usize = 4;
const NUM_ELEMENTS: usize = (64 << 20) / size_of::<f32>();
const CHUNK: usize = 16 << 10;
const ROUNDS: usize = 15;

/// Seconds of one round: the all_reduce, and the reference into old and into new memory.
#[derive(Clone, Copy)]
struct Times {
    all_reduce: f64,
    old_memory: f64,
    new_memory: f64,
}

fn main() -> Result<()> {
    let inputs: Vec<Vec<f32>> = (0..WORLD_SIZE).map(values).collect();
    let old_memory = Mutex::new(vec![vec![1.0; NUM_ELEMENTS]; WORLD_SIZE]);
    let times = launch::threads(WORLD_SIZE, |world| {
        let xs = Tensor::from_vec(values(world.rank()), NUM_ELEMENTS, &Device::Cpu)?;
        let mut times = Vec::new();
        // The first round warms up.
        for round in 0..=ROUNDS {
            let (mut in_old_memory, mut in_new_memory) = (0.0, 0.0);
            world.barrier()?;
            if world.rank() == 0 {
                if let Ok(mut outputs) = old_memory.lock() {
                    in_old_memory = secs(|| copy_and_add(&inputs, &mut outputs)).0;
                }
                in_new_memory = secs(|| {
                    let mut outputs: Vec<Vec<f32>> =
                        (0..WORLD_SIZE).map(|_| vec![0.0; NUM_ELEMENTS]).collect();
                    copy_and_add(&inputs, &mut outputs);
                    outputs
                })
                .0;
            }
            world.barrier()?;
            let (all_reduce, sum) = secs(|| world.all_reduce(&xs, ReduceOp::Sum));
            drop(sum?);
            if round > 0 {
                times.push(Times {
                    all_reduce,
                    old_memory: in_old_memory,
                    new_memory: in_new_memory,
                });
            }
        }
        Ok(times)
    })?;
    // The slowest rank of each round counts; rank 0 ran the references.
    let slowest = |round: usize| {
        times
            .iter()
            .map(|rank| rank[round].all_reduce)
            .fold(0.0, f64::max)
    };
    let all_reduce = median((0..ROUNDS).map(slowest));
    let new_memory = median(times[0].iter().map(|times| times.new_memory));
    let old_memory = median(times[0].iter().map(|times| times.old_memory));
    let num_threads = rayon::current_num_threads();
    println!(
        "64 MiB of f32 over {WORLD_SIZE} ranks, {num_threads} rayon threads, median of {ROUNDS} (goal: ratio at most 3)"
    );
    println!(
        "  all_reduce                              {:8.2} ms",
        all_reduce * 1e3
    );
    for (name, reference) in [("new", new_memory), ("old", old_memory)] {
        let ratio = all_reduce / reference;
        println!(
            "  plain copies and adds into {name} memory   {:8.2} ms   ratio {ratio:.2}",
            reference * 1e3
        );
    }
    Ok(())
}

fn median(times: impl Iterator<Item = f64>) -> f64 {
    let mut times: Vec<f64> = times.collect();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// How long `run` takes, and what it returns.
fn secs<T>(run: impl FnOnce() -> T) -> (f64, T) {
    let start = Instant::now();
    let value = run();
    (start.elapsed().as_secs_f64(), value)
}

fn values(rank: usize) -> Vec<f32> {
    (0..NUM_ELEMENTS)
        .map(|i| ((i * 7 + rank) % 1000) as f32)
        .collect()
}

fn copy_and_add(inputs: &[Vec<f32>], outputs: &mut [Vec<f32>]) {
    let mut tasks: Vec<Vec<&mut [f32]>> = (0..NUM_ELEMENTS.div_ceil(CHUNK))
        .map(|_| Vec::new())
        .collect();
    for output in outputs {
        for (task, chunk) in tasks.iter_mut().zip(output.chunks_mut(CHUNK)) {
            task.push(chunk);
        }
    }
    tasks
        .into_par_iter()
        .enumerate()
        .for_each(|(i, mut outputs)| {
            let Some((sum, copies)) = outputs.split_first_mut() else {
                return;
            };
            let range = i * CHUNK..i * CHUNK + sum.len();
            sum.copy_from_slice(&inputs[0][range.clone()]);
            for input in &inputs[1..] {
                sum.iter_mut()
                    .zip(&input[range.clone()])
                    .for_each(|(sum, x)| *sum += x);
            }
            copies.iter_mut().for_each(|copy| copy.copy_from_slice(sum));
        });
}
