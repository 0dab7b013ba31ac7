//! Batches of an evaluation: every sample once, whatever the layout.

use std::sync::Arc;

use candle_core::{Device, Result, Tensor, bail};
use candle_ops::IGNORE_INDEX;
use candle_parallel::MicroBatch;

use crate::{Samples, Tokens};

/// One data-parallel rank's share of the samples that a model is evaluated on.
///
/// Round r gives rank d of D the samples `(r D + d) b .. + b`. All ranks have as many rounds; rows beyond the last sample have no targets.
#[derive(Clone, Debug)]
pub struct EvalBatches {
    samples: Samples,
    /// Numbers of the samples.
    chosen: Arc<[usize]>,
    micro_batch_size: usize,
    dp_rank: usize,
    dp_world_size: usize,
}

impl EvalBatches {
    /// The samples of `seq_len` tokens in `tokens`, or those of them that are `chosen`, in micro-batches of `micro_batch_size` for rank
    /// `dp_rank` of `dp_world_size`.
    ///
    /// # Errors
    /// A size is zero, or the data is shorter than one sample.
    pub fn new(
        tokens: &Tokens,
        chosen: Option<Arc<[usize]>>,
        (seq_len, micro_batch_size): (usize, usize),
        (dp_rank, dp_world_size): (usize, usize),
    ) -> Result<Self> {
        if micro_batch_size == 0 || dp_world_size == 0 {
            bail!(
                "micro_batch_size({micro_batch_size}) and dp({dp_world_size}); expected at least 1"
            );
        }
        let samples = tokens.samples(seq_len)?;
        Ok(Self {
            chosen: chosen.unwrap_or_else(|| (0..samples.len()).collect()),
            samples,
            micro_batch_size,
            dp_rank,
            dp_world_size,
        })
    }

    /// Number of samples, over all data-parallel ranks.
    pub fn num_samples(&self) -> usize {
        self.chosen.len()
    }

    /// This rank's micro-batches, as many as every rank has.
    pub fn iter(&self) -> impl Iterator<Item = Result<MicroBatch>> + '_ {
        let per_round = self.micro_batch_size * self.dp_world_size;
        let rounds = 0..self.chosen.len().div_ceil(per_round);
        rounds.map(move |round| {
            let first = round * per_round + self.dp_rank * self.micro_batch_size;
            self.micro_batch(first)
        })
    }

    fn micro_batch(&self, first: usize) -> Result<MicroBatch> {
        let (b, t) = (self.micro_batch_size, self.samples.seq_len());
        let mut tokens = Vec::with_capacity(b * t);
        let mut targets = Vec::with_capacity(b * t);
        for place in first..first + b {
            match self.chosen.get(place) {
                Some(&sample) => {
                    let ids = self.samples.get(sample);
                    tokens.extend_from_slice(&ids[..t]);
                    targets.extend_from_slice(&ids[1..]);
                }
                None => {
                    tokens.extend(std::iter::repeat_n(0, t));
                    targets.extend(std::iter::repeat_n(IGNORE_INDEX, t));
                }
            }
        }
        Ok(MicroBatch {
            tokens: Tensor::from_vec(tokens, (b, t), &Device::Cpu)?,
            targets: Some(Tensor::from_vec(targets, (b, t), &Device::Cpu)?),
            documents: None,
            past: None,
        })
    }
}
