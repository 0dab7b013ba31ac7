//! Operations that are started go on while their ranks compute. For backends whose operations need no order between groups.

use std::time::{Duration, Instant};

use candle_comm::{Pending, ProcessGroup, ReduceOp, hidden, waited};
use candle_core::{Result, Tensor};

use super::Launch;

/// Elements of a bucket: large enough for every backend to do its work in the background.
const LEN: usize = 400_000;

struct Step {
    buckets: Vec<Tensor>,
    activations: Tensor,
    started: Vec<Pending<Tensor>>,
}

impl Step {
    /// Two buckets to be summed over `dp` and activations to be gathered over `tp`, in an order that differs between the ranks.
    fn start(tp: &ProcessGroup, dp: &ProcessGroup, tp_first: bool) -> Result<Self> {
        let bucket =
            |number: usize| Tensor::full((dp.rank() + 10 * number) as f32, LEN, dp.device());
        let buckets = vec![bucket(1)?, bucket(2)?];
        let activations = Tensor::full(tp.rank() as f32, tp.world_size() * LEN, tp.device())?;
        let reduce = |index: usize| dp.start_all_reduce_in_place(&buckets[index], ReduceOp::Sum);
        let gather = || tp.start_all_gather_in_place(&activations);
        let started = match tp_first {
            true => vec![gather()?, reduce(0)?, reduce(1)?],
            false => vec![reduce(0)?, gather()?, reduce(1)?],
        };
        Ok(Self {
            buckets,
            activations,
            started,
        })
    }

    /// Whether all results are in their places, whoever has waited for them.
    fn is_over(&self, tp: &ProcessGroup, dp: &ProcessGroup) -> Result<bool> {
        let is_full = |xs: &Tensor, value: usize| -> Result<bool> {
            let ends = [xs.min(0)?, xs.max(0)?];
            let ends = Tensor::stack(&ends, 0)?.to_vec1::<f32>()?;
            Ok(ends == [value as f32; 2])
        };
        let ranks: usize = (0..dp.world_size()).sum();
        for (index, bucket) in self.buckets.iter().enumerate() {
            if !is_full(bucket, ranks + 10 * (index + 1) * dp.world_size())? {
                return Ok(false);
            }
        }
        for rank in 0..tp.world_size() {
            if !is_full(&self.activations.narrow(0, rank * LEN, LEN)?, rank)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Sleeps until all results are in their places.
    fn sleep_until_it_is_over(&self, tp: &ProcessGroup, dp: &ProcessGroup) -> Result<()> {
        let start = Instant::now();
        while !self.is_over(tp, dp)? {
            assert!(
                start.elapsed() < Duration::from_secs(30),
                "nothing moves without a wait"
            );
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    fn wait(self) -> Result<()> {
        (self.started.into_iter()).try_for_each(|pending| pending.wait().map(drop))
    }
}

/// Results come without a wait, with several operations in flight on two groups, whichever of them a rank starts first; and what
/// the ranks do meanwhile is not waited for.
pub fn background(launch: &impl Launch) -> Result<()> {
    for &world_size in launch.world_sizes().iter().filter(|size| **size % 2 == 0) {
        launch.run(world_size, |world| {
            let (rank, tp_size) = (world.rank(), 2);
            let tp = world.split(rank / tp_size, rank)?;
            let dp = world.split(rank % tp_size, rank)?;
            let step = Step::start(&tp, &dp, rank % 3 == 0)?;
            step.sleep_until_it_is_over(&tp, &dp)?;
            step.wait()?;
            // How much of the waiting is hidden, at its best, as other programs run here too.
            let mut best = f32::INFINITY;
            for _ in 0..10 {
                let (mut secs, mut hidden_secs) = ([0.0; 2], 0.0);
                for (secs, sleeps) in secs.iter_mut().zip([false, true]) {
                    world.barrier()?;
                    let start_of_step = Instant::now();
                    let step = Step::start(&tp, &dp, false)?;
                    if sleeps {
                        step.sleep_until_it_is_over(&tp, &dp)?;
                    }
                    let before = waited();
                    let hidden_before = hidden();
                    step.wait()?;
                    hidden_secs = (hidden() - hidden_before).as_secs_f32();
                    assert!(hidden_secs <= start_of_step.elapsed().as_secs_f32());
                    *secs = (waited() - before).as_secs_f32();
                }
                // Of all ranks together: the last one to start has little to wait for. All ranks go on, or none.
                let mine = Tensor::new(&[secs[0], secs[1], hidden_secs], world.device())?;
                let sums = world.all_reduce(&mine, ReduceOp::Sum)?.to_vec1::<f32>()?;
                best = best.min(sums[1] / sums[0]);
                assert!(sums[2] > 0.0, "nothing was hidden");
                if best < 0.5 {
                    return Ok(());
                }
            }
            panic!("{best:.2} of the waiting is left with time to hide all of it");
        })?;
    }
    Ok(())
}
