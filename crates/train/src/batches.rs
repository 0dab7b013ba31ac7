//! Batches: step s trains on positions `s*G .. s*G + G` of the endless sample order, G = global batch size.
//!
//! Each data-parallel rank takes a contiguous share of G / dp sequences and cuts it into micro-batches. Which sequences
//! a step trains on therefore does not depend on the layout, and no state has to be saved to resume: a batch is a pure
//! function of (configuration, step).

use std::sync::Arc;

use candle_core::{Device, Result, Tensor, bail};
use candle_parallel::MicroBatch;
use serde::{Deserialize, Serialize};

use crate::sample_order::SampleOrder;
use crate::{Samples, Tokens};

/// Most tokens of one optimizer step: far beyond what is trained with, and their products fit any integer.
const MAX_TOKENS_PER_STEP: u128 = 1 << 31;

/// How a data set is cut into batches. Sizes are in sequences, `seq_len` in tokens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BatchConfig {
    /// Tokens per sequence, T.
    pub seq_len: usize,
    /// Sequences that go through the model together on one data-parallel rank.
    pub micro_batch_size: usize,
    /// Sequences per optimizer step, over all data-parallel ranks.
    pub global_batch_size: usize,
    /// Permute the samples anew each epoch; otherwise they are taken in the order of the text.
    pub shuffle: bool,
    /// Seed of the permutations.
    pub seed: u64,
}

impl BatchConfig {
    /// Checks the sizes for `dp_world_size` data-parallel ranks.
    ///
    /// # Errors
    /// A size is zero, a step has more than 2^31 tokens, or `global_batch_size` is not a multiple of `micro_batch_size * dp_world_size`.
    pub fn validate(&self, dp_world_size: usize) -> Result<()> {
        for (name, size) in [
            ("seq_len", self.seq_len),
            ("micro_batch_size", self.micro_batch_size),
            ("global_batch_size", self.global_batch_size),
            ("dp_world_size", dp_world_size),
        ] {
            if size == 0 {
                bail!("{name} is 0, expected at least 1");
            }
        }
        let (global, micro) = (self.global_batch_size, self.micro_batch_size);
        let num_tokens = global as u128 * self.seq_len as u128;
        if num_tokens > MAX_TOKENS_PER_STEP {
            bail!(
                "global_batch_size({global}) * seq_len({}) = {num_tokens} tokens per step, expected at most {MAX_TOKENS_PER_STEP}\nhint: choose a smaller global_batch_size or seq_len",
                self.seq_len
            );
        }
        let unit = micro as u128 * dp_world_size as u128;
        if !(global as u128).is_multiple_of(unit) {
            bail!(
                "global_batch_size({global}) % (micro_batch_size({micro}) * dp({dp_world_size}) = {unit}) = {} != 0\nhint: choose a global_batch_size that is a multiple of {unit}, or a smaller micro_batch_size",
                global as u128 % unit
            );
        }
        Ok(())
    }
}

/// One data-parallel rank's batches.
#[derive(Debug)]
pub struct Batches {
    samples: Samples,
    /// Numbers of the samples that are trained on, if not all.
    chosen: Option<Arc<[usize]>>,
    order: SampleOrder,
    config: BatchConfig,
    dp_rank: usize,
    local_batch_size: usize,
    device: Device,
    /// A step and the position of its first sequence, from which the others follow.
    origin: (usize, usize),
}

impl Batches {
    /// The batches of rank `dp_rank` of `dp_world_size`, as tensors on `device`.
    ///
    /// # Errors
    /// [`BatchConfig::validate`] fails, the rank is not below the world size, or the data is shorter than one sample.
    pub fn new(
        tokens: &Tokens,
        config: BatchConfig,
        dp_rank: usize,
        dp_world_size: usize,
        device: &Device,
    ) -> Result<Self> {
        config.validate(dp_world_size)?;
        if dp_rank >= dp_world_size {
            bail!("dp_rank({dp_rank}) >= dp_world_size({dp_world_size})");
        }
        let samples = tokens.samples(config.seq_len)?;
        Ok(Self {
            order: SampleOrder::new(samples.len(), config.shuffle, config.seed),
            samples,
            chosen: None,
            dp_rank,
            local_batch_size: config.global_batch_size / dp_world_size,
            config,
            device: device.clone(),
            origin: (0, 0),
        })
    }

    /// Trains on these samples only, of which there must be one.
    pub fn only(self, chosen: Arc<[usize]>) -> Self {
        Self {
            order: SampleOrder::new(chosen.len(), self.config.shuffle, self.config.seed),
            chosen: Some(chosen),
            ..self
        }
    }

    /// The batches of a run that goes on at `step` with the sequence at `position`, whatever the size of the batches before it.
    pub fn continued(self, step: usize, position: usize) -> Self {
        Self {
            origin: (step, position),
            ..self
        }
    }

    /// Place of the first sequence of `step` in the endless order: of every epoch, [`Self::num_samples`].
    ///
    /// # Errors
    /// A step before the one from which the run went on, or beyond all numbers.
    pub fn position(&self, step: usize) -> Result<usize> {
        let (first_step, first) = self.origin;
        let position = step
            .checked_sub(first_step)
            .and_then(|steps| steps.checked_mul(self.config.global_batch_size))
            .and_then(|position| position.checked_add(first));
        match position {
            Some(position) => Ok(position),
            None => bail!(
                "step {step} of {} sequences each is out of range",
                self.config.global_batch_size
            ),
        }
    }

    /// This rank's micro-batches of `step` (from 0), each with tokens and targets (micro_batch_size, seq_len) u32.
    ///
    /// # Errors
    /// The device refuses the tensors, or the step is so large that its positions overflow.
    pub fn batch(&self, step: usize) -> Result<Vec<MicroBatch>> {
        let offset = self.dp_rank * self.local_batch_size;
        let Some(first) = self.position(step)?.checked_add(offset) else {
            bail!("step {step} is out of range");
        };
        (0..self.num_micro_batches())
            .map(|m| self.micro_batch(first + m * self.config.micro_batch_size))
            .collect()
    }

    fn micro_batch(&self, first: usize) -> Result<MicroBatch> {
        let (b, t) = (self.config.micro_batch_size, self.config.seq_len);
        let mut tokens = Vec::with_capacity(b * t);
        let mut targets = Vec::with_capacity(b * t);
        for position in first..first + b {
            let place = self.order.sample(position);
            let sample = self.chosen.as_ref().map_or(place, |chosen| chosen[place]);
            let ids = self.samples.get(sample);
            tokens.extend_from_slice(&ids[..t]);
            targets.extend_from_slice(&ids[1..]);
        }
        Ok(MicroBatch {
            tokens: Tensor::from_vec(tokens, (b, t), &self.device)?,
            targets: Some(Tensor::from_vec(targets, (b, t), &self.device)?),
            documents: None,
            past: None,
        })
    }

    /// Micro-batches per step on this rank.
    pub fn num_micro_batches(&self) -> usize {
        self.local_batch_size / self.config.micro_batch_size
    }

    /// Steps until every sample has been seen once, rounded up: the last step of an epoch may take its remaining
    /// sequences from the next epoch.
    pub fn num_steps_per_epoch(&self) -> usize {
        self.num_samples().div_ceil(self.config.global_batch_size)
    }

    /// Number of samples in one epoch.
    pub fn num_samples(&self) -> usize {
        let chosen = self.chosen.as_ref();
        chosen.map_or(self.samples.len(), |chosen| chosen.len())
    }

    /// Target tokens of one step, over all data-parallel ranks.
    pub fn num_tokens_per_step(&self) -> usize {
        self.config.global_batch_size * self.config.seq_len
    }

    /// The configuration these batches were made with.
    pub fn config(&self) -> &BatchConfig {
        &self.config
    }
}
