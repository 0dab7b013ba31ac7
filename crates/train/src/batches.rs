//! Batches: an epoch of n samples is ceil(n / G) steps, G = global batch size; each takes the next G samples of the epoch's order, the
//! last one those that are left.
//!
//! Each data-parallel rank takes a contiguous share of a step's samples, as equal as can be, and cuts it into micro-batches. Which samples
//! a step trains on therefore does not depend on the layout, and no state has to be saved to resume: a batch is a pure
//! function of (configuration, step). All ranks have equally many micro-batches; one for which a rank has no sample is a token
//! without a target.

use std::ops::Range;

use candle_core::{Device, Result, bail};
use candle_parallel::Pass;
use serde::{Deserialize, Serialize};

use crate::rows::micro_batch_of;
use crate::sample_order::SampleOrder;
use crate::samples::Samples;
use crate::training_data::Filling;

/// Most tokens of one optimizer step: far beyond what is trained with, and their products fit any integer.
const MAX_TOKENS_PER_STEP: u128 = 1 << 31;

/// How samples are put into batches. Sizes are in sequences.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BatchConfig {
    /// Sequences that go through the model together on one data-parallel rank.
    pub micro_batch_size: usize,
    /// Sequences per optimizer step, over all data-parallel ranks.
    pub global_batch_size: usize,
    /// Permute the samples anew each epoch; otherwise they are taken in the order of the data.
    pub shuffle: bool,
    /// Seed of the permutations.
    pub seed: u64,
    /// Whether data-parallel ranks may have shares of a step that differ by one, where it cannot be divided evenly.
    #[serde(default)]
    pub uneven: bool,
}

impl BatchConfig {
    /// Checks the sizes for sequences of `seq_len` tokens and `dp_world_size` data-parallel ranks.
    ///
    /// # Errors
    /// A size is zero, a step has more than 2^31 tokens, or `global_batch_size` is not a multiple of `micro_batch_size * dp_world_size` and
    /// [`uneven`](Self::uneven) is false.
    pub fn validate(&self, seq_len: usize, dp_world_size: usize) -> Result<()> {
        for (name, size) in [
            ("micro_batch_size", self.micro_batch_size),
            ("global_batch_size", self.global_batch_size),
            ("dp_world_size", dp_world_size),
        ] {
            if size == 0 {
                bail!("{name} is 0, expected at least 1");
            }
        }
        let (global, micro) = (self.global_batch_size, self.micro_batch_size);
        let num_tokens = global as u128 * seq_len as u128;
        if num_tokens > MAX_TOKENS_PER_STEP {
            bail!(
                "global_batch_size({global}) * seq_len({seq_len}) = {num_tokens} tokens per step, expected at most {MAX_TOKENS_PER_STEP}\nhint: choose a smaller global_batch_size or seq_len"
            );
        }
        let unit = micro as u128 * dp_world_size as u128;
        if !self.uneven && !(global as u128).is_multiple_of(unit) {
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
    order: SampleOrder,
    config: BatchConfig,
    dp_rank: usize,
    dp_world_size: usize,
    device: Device,
    /// A step and the position of its first sequence, from which the others follow.
    origin: (usize, usize),
}

/// The samples of a step: those at these places of the epoch.
struct StepSamples {
    epoch: usize,
    places: Range<usize>,
}

impl Batches {
    /// The batches of rank `dp_rank` of `dp_world_size`, as tensors on `device`.
    ///
    /// # Errors
    /// [`BatchConfig::validate`] fails, or the rank is not below the world size.
    pub fn new(
        samples: &Samples,
        config: BatchConfig,
        dp_rank: usize,
        dp_world_size: usize,
        device: &Device,
    ) -> Result<Self> {
        config.validate(samples.config().seq_len, dp_world_size)?;
        if dp_rank >= dp_world_size {
            bail!("dp_rank({dp_rank}) >= dp_world_size({dp_world_size})");
        }
        Ok(Self {
            order: SampleOrder::new(samples.len(), config.shuffle, config.seed),
            samples: samples.clone(),
            dp_rank,
            dp_world_size,
            config,
            device: device.clone(),
            origin: (0, 0),
        })
    }

    /// The batches of a run that goes on at `step` with the sequence at `position`, whatever the size of the batches before it.
    pub fn continued(self, step: usize, position: usize) -> Self {
        Self {
            origin: (step, position),
            ..self
        }
    }

    /// Number of sequences before the first one of `step`, of which each epoch has [`Self::num_samples`].
    ///
    /// # Errors
    /// A step before the one from which the run went on, or beyond all numbers.
    pub fn position(&self, step: usize) -> Result<usize> {
        let (first_step, first) = self.origin;
        let (num_samples, batch) = (self.samples.len(), self.config.global_batch_size);
        let position = step.checked_sub(first_step).and_then(|steps| {
            let (epoch, place) = (first / num_samples, first % num_samples);
            let left = (num_samples - place).div_ceil(batch);
            if steps < left {
                return steps.checked_mul(batch)?.checked_add(first);
            }
            let (steps, per_epoch) = (steps - left, num_samples.div_ceil(batch));
            let epochs = epoch.checked_add(1)?.checked_add(steps / per_epoch)?;
            epochs
                .checked_mul(num_samples)?
                .checked_add(steps % per_epoch * batch)
        });
        match position {
            Some(position) => Ok(position),
            None => bail!(
                "step {} of {batch} sequences each is out of range",
                step.saturating_add(1)
            ),
        }
    }

    /// The first step whose [`Self::position`] is not before `end`: so many steps see the sequences before that, each epoch's last step as
    /// many as are left of it.
    ///
    /// # Errors
    /// A step beyond all numbers.
    pub fn first_step_from(&self, end: usize) -> Result<usize> {
        let (first_step, first) = self.origin;
        let (num_samples, batch) = (self.samples.len(), self.config.global_batch_size);
        let steps_of = |num_sequences: usize| num_sequences.div_ceil(batch);
        if end <= first {
            return Ok(first_step);
        }
        let (first_epoch, place) = (first / num_samples, first % num_samples);
        let (last_epoch, last_place) = (end / num_samples, end % num_samples);
        let step = match last_epoch - first_epoch {
            0 => first_step.checked_add(steps_of(last_place - place)),
            epochs => steps_of(num_samples)
                .checked_mul(epochs - 1)
                .and_then(|steps| steps.checked_add(first_step))
                .and_then(|steps| steps.checked_add(steps_of(num_samples - place)))
                .and_then(|steps| steps.checked_add(steps_of(last_place))),
        };
        match step {
            Some(step) => Ok(step),
            None => bail!("{end} sequences are more than any number of steps sees"),
        }
    }

    fn step_samples(&self, step: usize) -> Result<StepSamples> {
        let (position, num_samples) = (self.position(step)?, self.samples.len());
        let place = position % num_samples;
        let end = (place + self.config.global_batch_size).min(num_samples);
        Ok(StepSamples {
            epoch: position / num_samples,
            places: place..end,
        })
    }

    /// The share of a rank: the first ranks have one more where a step's samples cannot be divided.
    fn share(&self, step: &StepSamples, dp_rank: usize) -> Range<usize> {
        let (len, dp) = (step.places.len(), self.dp_world_size);
        let start_of = |rank: usize| step.places.start + rank * (len / dp) + rank.min(len % dp);
        start_of(dp_rank)..start_of(dp_rank + 1)
    }

    fn num_micro_batches_of(&self, step: &StepSamples) -> usize {
        let largest_share = step.places.len().div_ceil(self.dp_world_size);
        largest_share.div_ceil(self.config.micro_batch_size)
    }

    /// This rank's micro-batches of `step` (from 0), each with tokens and targets (b, t) u32, where b is at most the micro-batch size and t
    /// the longest of its sequences; shorter ones end with tokens without a target.
    ///
    /// # Errors
    /// The tokens cannot be read, the device refuses the tensors, or the step is so large that its positions overflow.
    pub fn batch(&self, step: usize) -> Result<Vec<Pass>> {
        let step = self.step_samples(step)?;
        let mut share = self.share(&step, self.dp_rank);
        let micro_batches = (0..self.num_micro_batches_of(&step)).map(|_| {
            let end = (share.start + self.config.micro_batch_size).min(share.end);
            let places = std::mem::replace(&mut share.start, end)..end;
            let samples =
                places.map(|place| self.samples.get(self.order.sample(step.epoch, place)));
            micro_batch_of(&samples.collect::<Result<Vec<_>>>()?, &self.device)
        });
        micro_batches.collect()
    }

    /// Passes over the data in the steps before `step`, with their fraction.
    ///
    /// # Errors
    /// As [`Self::position`].
    pub fn epoch(&self, step: usize) -> Result<f64> {
        Ok(self.position(step)? as f64 / self.num_samples() as f64)
    }

    /// How far `step` fills its micro-batches, over all data-parallel ranks.
    ///
    /// # Errors
    /// As [`Self::position`].
    pub fn filling(&self, step: usize) -> Result<Filling> {
        let step = self.step_samples(step)?;
        let (mut num_tokens, mut num_positions) = (0, 0);
        for dp_rank in 0..self.dp_world_size {
            let share: Vec<usize> = self.share(&step, dp_rank).collect();
            let micro_batches: Vec<&[usize]> = share.chunks(self.config.micro_batch_size).collect();
            num_positions += self.num_micro_batches_of(&step) - micro_batches.len();
            for places in micro_batches {
                let lens = places.iter().map(|&place| {
                    self.samples
                        .num_tokens(self.order.sample(step.epoch, place))
                });
                let lens: Vec<usize> = lens.collect();
                num_tokens += lens.iter().sum::<usize>();
                num_positions += lens.len() * lens.iter().max().copied().unwrap_or_default();
            }
        }
        Ok(Filling {
            num_tokens,
            num_positions,
        })
    }

    /// Steps in which every sample is seen once.
    pub fn num_steps_per_epoch(&self) -> usize {
        self.samples.len().div_ceil(self.config.global_batch_size)
    }

    /// Number of samples in one epoch.
    pub fn num_samples(&self) -> usize {
        self.samples.len()
    }

    /// What they are made of.
    pub fn samples(&self) -> &Samples {
        &self.samples
    }

    /// The configuration these batches were made with.
    pub fn config(&self) -> &BatchConfig {
        &self.config
    }
}
