//! Times an all_reduce of 64 MiB of f32 over 4 ranks against the plain copies and adds that it needs.
//!
//! The reference reads every input and writes every output once, as the all_reduce does, with plain loops over
//! preallocated memory shared out over the same rayon pool: copy the first input, add the others, copy the sum to the
//! other outputs. The all_reduce has to allocate its outputs besides. Both run in turns; the medians are compared.
//!
//! ```text
//! cargo run --release -p candle-comm --example bench_all_reduce
//! ```

use std::sync::Mutex;
use std::time::Instant;

use candle_comm::{ReduceOp, launch};
use candle_core::{Device, Result, Tensor};
use rayon::prelude::*;

const WORLD_SIZE: usize = 4;
const NUM_ELEMENTS: usize = (64 << 20) / size_of::<f32>();
const CHUNK: usize = 16 << 10;
const ROUNDS: usize = 15;

fn main() -> Result<()> {
    let memory = Mutex::new(Memory::new());
    let times = launch::threads(WORLD_SIZE, |world| {
        let xs = Tensor::from_vec(values(world.rank()), NUM_ELEMENTS, &Device::Cpu)?;
        let mut times = Vec::new();
        // The first round warms up.
        for round in 0..=ROUNDS {
            world.barrier()?;
            let reference = match memory.lock() {
                Ok(mut memory) if world.rank() == 0 => memory.copy_and_add(),
                _ => 0.0,
            };
            world.barrier()?;
            let start = Instant::now();
            let sum = world.all_reduce(&xs, ReduceOp::Sum)?;
            let all_reduce = start.elapsed().as_secs_f64();
            drop(sum);
            if round > 0 {
                times.push((all_reduce, reference));
            }
        }
        Ok(times)
    })?;
    let median = |mut times: Vec<f64>| {
        times.sort_by(f64::total_cmp);
        times[times.len() / 2]
    };
    // The slowest rank of each round counts.
    let slowest = |round: usize| times.iter().map(|rank| rank[round].0).fold(0.0, f64::max);
    let all_reduce = median((0..ROUNDS).map(slowest).collect());
    let reference = median(times[0].iter().map(|(_, reference)| *reference).collect());
    println!(
        "all_reduce of 64 MiB of f32 over {WORLD_SIZE} ranks on {} rayon threads, median of {ROUNDS}:",
        rayon::current_num_threads()
    );
    println!("  all_reduce            {:8.2} ms", all_reduce * 1e3);
    println!("  plain copies and adds {:8.2} ms", reference * 1e3);
    println!(
        "  ratio                 {:8.2}   (goal: at most 3)",
        all_reduce / reference
    );
    Ok(())
}

fn values(rank: usize) -> Vec<f32> {
    (0..NUM_ELEMENTS)
        .map(|i| ((i * 7 + rank) % 1000) as f32)
        .collect()
}

/// The reference's inputs and outputs, one per rank.
struct Memory {
    inputs: Vec<Vec<f32>>,
    outputs: Vec<Vec<f32>>,
}

impl Memory {
    fn new() -> Self {
        let inputs = (0..WORLD_SIZE).map(values).collect();
        Self {
            inputs,
            outputs: vec![vec![1.0; NUM_ELEMENTS]; WORLD_SIZE],
        }
    }

    /// Seconds for the copies and adds.
    fn copy_and_add(&mut self) -> f64 {
        let start = Instant::now();
        let inputs = &self.inputs;
        let mut tasks: Vec<Vec<&mut [f32]>> = (0..NUM_ELEMENTS.div_ceil(CHUNK))
            .map(|_| Vec::new())
            .collect();
        for output in &mut self.outputs {
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
        start.elapsed().as_secs_f64()
    }
}
