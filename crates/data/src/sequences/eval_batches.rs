//! Batches of an evaluation: every sample once, whatever the layout.

use candle_core::{Device, Result, bail};
use candle_parallel::Pass;

use super::micro_batch::micro_batch_of;
use super::samples::Samples;

/// One data-parallel rank's share of the samples that a model is evaluated on.
///
/// Round r gives rank d of D the samples `(r D + d) b .. + b`. All ranks have as many rounds; one that has no sample left gets a token without
/// a target.
#[derive(Clone, Debug)]
pub struct EvalBatches {
    samples: Samples,
    micro_batch_size: usize,
    dp_rank: usize,
    dp_world_size: usize,
}

impl EvalBatches {
    /// `samples` in micro-batches of `micro_batch_size` for rank `dp_rank` of `dp_world_size`.
    ///
    /// # Errors
    /// A size is zero.
    pub fn new(
        samples: &Samples,
        micro_batch_size: usize,
        (dp_rank, dp_world_size): (usize, usize),
    ) -> Result<Self> {
        if micro_batch_size == 0 || dp_world_size == 0 {
            bail!(
                "micro_batch_size({micro_batch_size}) and dp({dp_world_size}); expected at least 1"
            );
        }
        Ok(Self {
            samples: samples.clone(),
            micro_batch_size,
            dp_rank,
            dp_world_size,
        })
    }

    /// Number of samples, over all data-parallel ranks.
    pub fn num_samples(&self) -> usize {
        self.samples.len()
    }

    /// This rank's micro-batches, as many as every rank has.
    pub fn iter(&self) -> impl Iterator<Item = Result<Pass>> + use<> {
        let this = self.clone();
        let per_round = self.micro_batch_size * self.dp_world_size;
        let rounds = 0..self.samples.len().div_ceil(per_round);
        rounds.map(move |round| {
            let first = round * per_round + this.dp_rank * this.micro_batch_size;
            let end = (first + this.micro_batch_size).min(this.samples.len());
            let samples = (first..end).map(|index| this.samples.get(index));
            micro_batch_of(&samples.collect::<Result<Vec<_>>>()?, &Device::Cpu)
        })
    }
}
