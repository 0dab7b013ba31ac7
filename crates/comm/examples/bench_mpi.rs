//! Times an all_reduce of 64 MiB of f32 over MPI against bare `MPI_Allreduce`, in turns in the same run.
//!
//! `MPI_Allreduce` gets a buffer that it has written to before; the all_reduce returns a new tensor each time. The slowest
//! rank of a round counts. The best round of each is compared, as other work on the machine only adds time; the ratio of
//! the medians is printed too. One line of JSON:
//!
//! ```text
//! cargo build --release -p candle-comm --features mpi --example bench_mpi
//! mpirun -n 4 --oversubscribe target/release/examples/bench_mpi
//! {"bench":"mpi_all_reduce","ranks":4,"bytes":67108864,"rounds":15,"all_reduce_ms":..,"bare_ms":..,"ratio":..,..}
//! ```

use std::thread::sleep;
use std::time::{Duration, Instant};

use candle_comm::{MpiConfig, ProcessGroup, ReduceOp, launch};
use candle_core::{Device, Result, Tensor};
use mpi::ffi;

/// As in the example programs: memory is kept, not given back to the system and faulted in again.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const NUM_BYTES: usize = 64 << 20;
const NUM_ELEMENTS: usize = NUM_BYTES / size_of::<f32>();
const ROUNDS: usize = 15;

fn main() -> Result<()> {
    launch::mpi(MpiConfig::default(), run)
}

fn run(world: ProcessGroup) -> Result<()> {
    let rank = world.rank();
    let values: Vec<f32> = (0..NUM_ELEMENTS)
        .map(|i| ((i * 7 + rank) % 1000) as f32)
        .collect();
    let mut sum = vec![0f32; NUM_ELEMENTS];
    let xs = Tensor::from_vec(values.clone(), NUM_ELEMENTS, &Device::Cpu)?;
    let (mut ours, mut bare) = (Vec::new(), Vec::new());
    // The first round warms up.
    for round in 0..=ROUNDS {
        world.barrier()?;
        let (our_secs, got) = secs(|| world.all_reduce(&xs, ReduceOp::Sum));
        let got = got?;
        world.barrier()?;
        // After this MPI's thread has nothing to do, and makes no call.
        sleep(Duration::from_millis(20));
        let (bare_secs, ()) = secs(|| all_reduce(&values, &mut sum));
        if round == 0 {
            let got = got.to_vec1::<f32>()?;
            let same = got.iter().zip(&sum).all(|(a, b)| a == b);
            assert!(same, "sums of integers are exact, in whatever order");
        } else {
            ours.push(slowest(&world, our_secs)?);
            bare.push(slowest(&world, bare_secs)?);
        }
    }
    if rank == 0 {
        ours.sort_by(f64::total_cmp);
        bare.sort_by(f64::total_cmp);
        let median = ROUNDS / 2;
        println!(
            "{{\"bench\":\"mpi_all_reduce\",\"ranks\":{},\"bytes\":{NUM_BYTES},\"rounds\":{ROUNDS},\
             \"all_reduce_ms\":{:.2},\"bare_ms\":{:.2},\"ratio\":{:.3},\"ratio_of_medians\":{:.3}}}",
            world.world_size(),
            ours[0] * 1e3,
            bare[0] * 1e3,
            ours[0] / bare[0],
            ours[median] / bare[median]
        );
    }
    Ok(())
}

/// How long `run` takes, and what it returns.
fn secs<T>(run: impl FnOnce() -> T) -> (f64, T) {
    let start = Instant::now();
    let value = run();
    (start.elapsed().as_secs_f64(), value)
}

/// The longest time of any rank.
fn slowest(world: &ProcessGroup, secs: f64) -> Result<f64> {
    let secs = Tensor::new(&[secs], &Device::Cpu)?;
    Ok(world.all_reduce(&secs, ReduceOp::Max)?.to_vec1::<f64>()?[0])
}

/// Bare MPI, which sums in an order of its own.
fn all_reduce(values: &[f32], sum: &mut [f32]) {
    let (from, to) = (values.as_ptr().cast(), sum.as_mut_ptr().cast());
    // SAFETY: both slices have as many elements as are counted. All ranks call it, and no other thread calls MPI meanwhile.
    let code = unsafe {
        let (f32s, sum) = (ffi::RSMPI_FLOAT, ffi::RSMPI_SUM);
        ffi::MPI_Allreduce(
            from,
            to,
            values.len() as i32,
            f32s,
            sum,
            ffi::RSMPI_COMM_WORLD,
        )
    };
    assert_eq!(code, ffi::MPI_SUCCESS as i32);
}
