//! What it costs ranks that candle has threads of its own, for blocks made of candle's own operations: training steps of ranks as
//! threads, with and without, in turns.
//!
//! ```text
//! cargo run --release -p candle-comm --example bench_candle_threads -- [RANKS]
//! ```

use std::process::Command;
use std::time::Instant;

use candle_comm::{ReduceOp, launch};
use candle_core::{DType, Device, Result, Tensor, Var};

const STEPS: usize = 10;
const TURNS: usize = 3;

/// Set where this program is started by itself.
const ROLE: &str = "BENCH_CANDLE_THREADS_RANKS";

/// Steps of a residual layer norm, MLP and mean in plain candle, with gradients summed over the ranks.
fn steps(num_ranks: usize) -> Result<f64> {
    let secs = launch::threads(num_ranks, |world| {
        let device = Device::Cpu;
        let up = Var::randn(0f32, 0.02, (256, 1024), &device)?;
        let down = Var::randn(0f32, 0.02, (1024, 256), &device)?;
        let xs = Tensor::randn(0f32, 1.0, (4 * 128, 256), &device)?;
        world.barrier()?;
        let start = Instant::now();
        for _ in 0..STEPS {
            let mut ys = xs.clone();
            for _ in 0..4 {
                let centred = ys.broadcast_sub(&ys.mean_keepdim(1)?)?;
                let scale = (centred.sqr()?.mean_keepdim(1)? + 1e-5)?.sqrt()?;
                let normed = centred.broadcast_div(&scale)?;
                ys = (ys + normed.matmul(&up)?.gelu()?.matmul(&down)?)?;
            }
            let gradients = ys.sqr()?.mean_all()?.backward()?;
            for var in [&up, &down] {
                if let Some(gradient) = gradients.get(var) {
                    let sum = world.all_reduce(&gradient.to_dtype(DType::F32)?, ReduceOp::Sum)?;
                    var.set(&(var.as_tensor() - (sum * 1e-3)?)?)?;
                }
            }
        }
        Ok(start.elapsed().as_secs_f64() / STEPS as f64)
    })?;
    Ok(secs.into_iter().fold(0.0, f64::max))
}

/// The time of a step in a process of its own.
fn measure(num_ranks: usize, candle_threads: Option<usize>) -> Result<f64> {
    let mut command = Command::new(std::env::current_exe()?);
    command
        .env(ROLE, num_ranks.to_string())
        .env_remove("CANDLE_NUM_THREADS");
    if let Some(number) = candle_threads {
        command.env("CANDLE_NUM_THREADS", number.to_string());
    }
    let output = command.output()?;
    let printed = String::from_utf8_lossy(&output.stdout);
    printed.trim().parse().map_err(candle_core::Error::wrap)
}

fn main() -> Result<()> {
    if let Ok(num_ranks) = std::env::var(ROLE) {
        let num_ranks = num_ranks.parse().map_err(candle_core::Error::wrap)?;
        println!("{}", steps(num_ranks)?);
        return Ok(());
    }
    let num_ranks = std::env::args().nth(1).and_then(|ranks| ranks.parse().ok());
    let num_ranks = num_ranks.unwrap_or(4);
    let cores = candle_core::utils::get_num_threads();
    let mut secs = [Vec::new(), Vec::new()];
    for _ in 0..TURNS {
        secs[0].push(measure(num_ranks, Some(cores))?);
        secs[1].push(measure(num_ranks, None)?);
    }
    let [with, without] = secs.map(|secs| secs.into_iter().fold(f64::INFINITY, f64::min));
    println!(
        "{num_ranks} ranks, a step: {with:.3} s with candle's own {cores} threads, {without:.3} s without: ratio {:.2}",
        with / without
    );
    Ok(())
}
