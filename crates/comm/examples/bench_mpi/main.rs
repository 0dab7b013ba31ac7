//! Times our operations over MPI against the plain calls of MPI, in turns in the same run.
//!
//! ```text
//! cargo build --release -p candle-comm --features mpi --example bench_mpi
//! mpirun -n 4 --oversubscribe target/release/examples/bench_mpi
//! mpirun -n 4 --oversubscribe target/release/examples/bench_mpi --ops all_gather,broadcast --sizes 1K,1M,16M
//! {"bench":"mpi","op":"all_reduce","ranks":4,"bytes":67108864,"samples":15,"calls":1,"ours_us":..,"bare_us":..,"ratio":..,..}
//! ```
//!
//! Of f32. `bytes` are those of the larger of a rank's input and output. MPI gets a buffer that it has written to before; our
//! operations return a new tensor each time, but the one in place. A sample is the time of one call: of several in a row, if one is
//! short. The slowest rank of a sample counts. `ours_us`, `bare_us` and `ratio` are medians, `best_..` those of the best sample,
//! as other work on the machine only adds time. `ping_pong` is half of a message there and back between the first and the last
//! rank. `scripts/bench_mpi.py` runs it on hosts that are simulated.

mod arguments;
mod bare;
mod operation;

use std::thread::sleep;
use std::time::{Duration, Instant};

use candle_comm::{MpiConfig, ProcessGroup, ReduceOp, launch};
use candle_core::{Device, Result, Tensor};

use arguments::Arguments;
use bare::Bare;
use operation::Operation;

/// As in the example programs: memory is kept, not given back to the system and faulted in again.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Calls in a row last at least so long, or are this many.
const SAMPLE_SECS: f64 = 2e-3;
const MAX_CALLS: f64 = 50.;

/// How often ours and MPI's take turns.
const TURNS: usize = 3;

fn main() -> Result<()> {
    let arguments = Arguments::from_env();
    launch::mpi(MpiConfig::default(), |world| {
        for &bytes in &arguments.sizes {
            for &operation in &arguments.ops {
                let case = Case::new(&world, operation, bytes)?;
                case.measure(&arguments)?;
            }
        }
        Ok(())
    })
}

/// An operation on tensors of one size.
struct Case<'a> {
    world: &'a ProcessGroup,
    operation: Operation,
    input: Tensor,
    bare: Bare,
}

impl<'a> Case<'a> {
    fn new(world: &'a ProcessGroup, operation: Operation, bytes: usize) -> Result<Self> {
        let (rank, num_ranks) = (world.rank(), world.world_size());
        let part = bytes.div_ceil(size_of::<f32>() * num_ranks);
        let (input_parts, output_parts) = operation.parts(num_ranks);
        let values: Vec<f32> = (0..part * input_parts)
            .map(|i| ((i * 7 + rank) % 1000) as f32)
            .collect();
        let input = Tensor::from_vec(values.clone(), values.len(), &Device::Cpu)?;
        let bare = Bare::new(operation, (rank, num_ranks), values, part * output_parts);
        Ok(Self {
            world,
            operation,
            input,
            bare,
        })
    }

    /// Runs it, and prints a line.
    fn measure(mut self, arguments: &Arguments) -> Result<()> {
        self.check()?;
        let our_secs = self.slowest(&[self.ours(1)?])?[0];
        self.calm_down()?;
        let bare_secs = self.bare.run(1, arguments.nonblocking);
        let bare_secs = self.slowest(&[bare_secs])?[0];
        let calls = (SAMPLE_SECS / our_secs.min(bare_secs)).clamp(1., MAX_CALLS) as usize;
        let both = (our_secs + bare_secs) * calls as f64;
        let samples = ((arguments.secs / both) as usize).clamp(TURNS, arguments.samples);
        let samples = samples / TURNS * TURNS;
        let (mut ours, mut bare) = (Vec::new(), Vec::new());
        for _ in 0..TURNS {
            for _ in 0..samples / TURNS {
                self.world.barrier()?;
                ours.push(self.ours(calls)?);
            }
            self.calm_down()?;
            for _ in 0..samples / TURNS {
                bare::barrier();
                bare.push(self.bare.run(calls, arguments.nonblocking));
            }
        }
        let (ours, bare) = (self.slowest(&ours)?, self.slowest(&bare)?);
        if self.world.rank() == 0 {
            let bytes = self.bare.num_bytes();
            let name = match arguments.nonblocking {
                true => "MPI's nonblocking call",
                false => "MPI's blocking call",
            };
            println!(
                "{{\"bench\":\"mpi\",\"op\":\"{}\",\"ranks\":{},\"bytes\":{bytes},\"samples\":{samples},\"calls\":{calls},\
                 \"bare\":\"{name}\",{}}}",
                self.operation.name(),
                self.world.world_size(),
                figures(ours, bare),
            );
        }
        Ok(())
    }

    /// Ends all unless ours and MPI's give the same.
    fn check(&mut self) -> Result<()> {
        let got = self.operation.run(self.world, &self.input)?;
        self.calm_down()?;
        self.bare.run(1, false);
        if let Some(got) = got {
            let got = got.flatten_all()?.to_vec1::<f32>()?;
            let same = got == self.bare.output();
            assert!(same, "{}: ours and MPI's differ", self.operation.name());
        }
        if self.operation == Operation::AllReduceInPlace {
            // It changes its input, which would grow without end.
            self.input = self.input.zeros_like()?;
        }
        Ok(())
    }

    /// Seconds for one of `calls` calls of ours.
    fn ours(&self, calls: usize) -> Result<f64> {
        let start = Instant::now();
        for _ in 0..calls {
            drop(self.operation.run(self.world, &self.input)?);
        }
        Ok(start.elapsed().as_secs_f64() / calls as f64 / self.operation.ways())
    }

    /// Waits until MPI's thread has nothing to do, on any rank, and makes no call.
    fn calm_down(&self) -> Result<()> {
        self.world.barrier()?;
        sleep(Duration::from_millis(
            20 + 2 * self.world.world_size() as u64,
        ));
        Ok(())
    }

    /// Of each of these, the longest of any rank.
    fn slowest(&self, secs: &[f64]) -> Result<Vec<f64>> {
        let secs = Tensor::new(secs, &Device::Cpu)?;
        self.world.all_reduce(&secs, ReduceOp::Max)?.to_vec1()
    }
}

/// The numbers of a line.
fn figures(mut ours: Vec<f64>, mut bare: Vec<f64>) -> String {
    ours.sort_by(f64::total_cmp);
    bare.sort_by(f64::total_cmp);
    let median = ours.len() / 2;
    let figures = |prefix: &str, index: usize| {
        let (ours, bare) = (ours[index] * 1e6, bare[index] * 1e6);
        format!(
            "\"{prefix}ours_us\":{ours:.1},\"{prefix}bare_us\":{bare:.1},\"{prefix}ratio\":{:.3}",
            ours / bare
        )
    };
    format!("{},{}", figures("", median), figures("best_", 0))
}
