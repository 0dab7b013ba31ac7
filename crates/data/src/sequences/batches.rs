//! Batches: an epoch of n samples is ceil(n / G) steps, G = global batch size; each takes the next G samples of the epoch's order, the
//! last one those that are left. While a [`BatchRamp`] lasts G is smaller, by the number of samples that were taken.
//!
//! Each data-parallel rank takes a contiguous share of a step's samples, as equal as can be, and cuts it into micro-batches. Which samples
//! a step trains on therefore does not depend on the layout, and no state has to be saved to resume: a batch is a pure
//! function of (configuration, step). All ranks have equally many micro-batches; one for which a rank has no sample is a token
//! without a target.

use std::fmt::{Display, Formatter};
use std::ops::Range;
use std::str::FromStr;

use candle_core::{Device, Result, bail};
use candle_parallel::Pass;
use serde::{Deserialize, Serialize};

use super::micro_batch::micro_batch_of;
use super::sample_order::SampleOrder;
use super::samples::Samples;
use super::training_data::Filling;

/// Most tokens of one optimizer step: far beyond what is trained with, and their products fit any integer.
const MAX_TOKENS_PER_STEP: u128 = 1 << 31;

/// Most steps of a batch ramp, whose places are kept.
const MAX_RAMP_STEPS: usize = 1 << 20;

/// A global batch that grows while a run is young (GPT-3's, arXiv:2005.14165): with n = (global - start) / increment, a step before which s samples
/// have been taken has `start + floor(s n / samples) increment`, and the global batch size from `samples` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BatchRamp {
    /// Sequences of the first step.
    pub start: usize,
    /// Sequences by which it grows at a time.
    pub increment: usize,
    /// Samples after which it has grown.
    pub samples: usize,
}

/// As it is parsed: `16,8,10000`.
impl Display for BatchRamp {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        write!(f, "{},{},{}", self.start, self.increment, self.samples)
    }
}

impl FromStr for BatchRamp {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let numbers: Option<Vec<usize>> =
            text.split(',').map(|it| it.trim().parse().ok()).collect();
        match numbers.as_deref() {
            Some(&[start, increment, samples]) if start.min(increment).min(samples) > 0 => {
                Ok(Self {
                    start,
                    increment,
                    samples,
                })
            }
            _ => Err(
                "expected START,INCREMENT,SAMPLES, three whole numbers from 1, such as 16,8,10000"
                    .to_string(),
            ),
        }
    }
}

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
    /// How the global batch grows to its size; `None`: it has it from the first step on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ramp: Option<BatchRamp>,
}

impl BatchConfig {
    /// Checks the sizes for sequences of `seq_len` tokens and `dp_world_size` data-parallel ranks.
    ///
    /// # Errors
    /// A size is zero, a step has more than 2^31 tokens, or `global_batch_size`, or another size of its ramp, is not a multiple of
    /// `micro_batch_size * dp_world_size` and [`uneven`](Self::uneven) is false; a ramp that does not lead to the global batch size.
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
                "global_batch_size({global}) % (micro_batch_size({micro}) * dp({dp_world_size}) = {unit}) = {} != 0\nhint: choose a global_batch_size that is a multiple of {unit}, such as {}, or a smaller micro_batch_size",
                global as u128 % unit,
                nearest_multiple(global as u128, unit)
            );
        }
        self.ramp.map_or(Ok(()), |ramp| self.check_ramp(ramp, unit))
    }

    fn check_ramp(&self, ramp: BatchRamp, unit: u128) -> Result<()> {
        let global = self.global_batch_size;
        let BatchRamp {
            start,
            increment,
            samples,
        } = ramp;
        if start.min(increment).min(samples) == 0 {
            bail!("the batch ramp {ramp} has a 0; expected numbers from 1");
        }
        if start >= global || !(global - start).is_multiple_of(increment) {
            let num_increments =
                nearest_multiple(global.abs_diff(start) as u128, increment as u128);
            let nearest = (global as u128).checked_sub(num_increments);
            let nearest = match nearest.filter(|nearest| start < global && *nearest > 0) {
                Some(nearest) => format!(", such as {nearest}"),
                None => String::new(),
            };
            bail!(
                "the batch ramp {ramp} starts with {start} sequences and does not come to the global_batch_size({global}) in steps of {increment}\nhint: a start below {global}{nearest}, whose difference to it the increment divides, or a larger global batch"
            );
        }
        for (name, size) in [("start", start), ("increment", increment)] {
            if !self.uneven && !(size as u128).is_multiple_of(unit) {
                bail!(
                    "the {name}({size}) of the batch ramp {ramp} % (micro_batch_size * dp = {unit}) = {} != 0\nhint: choose multiples of {unit}, such as {}",
                    size as u128 % unit,
                    nearest_multiple(size as u128, unit)
                );
            }
        }
        Ok(())
    }

    /// Sequences of a step before which so many have been taken.
    fn batch_size_at(&self, position: usize) -> usize {
        let global = self.global_batch_size;
        match self.ramp {
            Some(ramp) if position < ramp.samples => {
                let num_increments = (global - ramp.start) / ramp.increment;
                let grown = position as u128 * num_increments as u128 / ramp.samples as u128;
                ramp.start + grown as usize * ramp.increment
            }
            _ => global,
        }
    }
}

/// The multiple of `unit`, but 0, that is nearest to `size`.
fn nearest_multiple(size: u128, unit: u128) -> u128 {
    (size.saturating_add(unit / 2) / unit)
        .max(1)
        .saturating_mul(unit)
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
    /// The position of each step from there on that is smaller than the others.
    ramp: Vec<usize>,
    /// The first step after these, and its position.
    after_ramp: (usize, usize),
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
        if let Some(ramp) = config.ramp {
            // No step has more than an epoch.
            let num_steps = ramp.samples / ramp.start.min(samples.len());
            if num_steps > MAX_RAMP_STEPS {
                bail!(
                    "the batch ramp {ramp} may take {num_steps} steps; expected at most {MAX_RAMP_STEPS}"
                );
            }
        }
        let batches = Self {
            order: SampleOrder::new(samples.len(), config.shuffle, config.seed),
            samples: samples.clone(),
            dp_rank,
            dp_world_size,
            config,
            device: device.clone(),
            origin: (0, 0),
            ramp: Vec::new(),
            after_ramp: (0, 0),
        };
        Ok(batches.continued(0, 0))
    }

    /// The batches of a run that goes on at `step` with the sequence at `position`, whatever the size of the batches before it.
    pub fn continued(self, step: usize, position: usize) -> Self {
        let end = self.config.ramp.map_or(0, |ramp| ramp.samples);
        let (mut ramp, mut next) = (Vec::new(), position);
        while next < end {
            ramp.push(next);
            next += self.len_at(next);
        }
        Self {
            origin: (step, position),
            after_ramp: (step.saturating_add(ramp.len()), next),
            ramp,
            ..self
        }
    }

    /// Sequences of the step that begins with the one at `position`: no more than are left of the epoch.
    fn len_at(&self, position: usize) -> usize {
        let num_samples = self.samples.len();
        let left = num_samples - position % num_samples;
        self.config.batch_size_at(position).min(left)
    }

    /// Progress of a learning-rate schedule after each step of a batch ramp, in steps of the global batch size: a smaller step counts as
    /// the part that it is of one. For batches that begin with the first step of the run and do not go on from another.
    pub fn ramp_progress(&self) -> Vec<f64> {
        let (mut num_sequences, global) = (0, self.config.global_batch_size as f64);
        let steps = self.ramp.iter().map(|&position| {
            num_sequences += self.config.batch_size_at(position);
            num_sequences as f64 / global
        });
        steps.collect()
    }

    /// Number of sequences before the first one of `step`, of which each epoch has [`Self::num_samples`].
    ///
    /// # Errors
    /// A step before the one from which the run went on, or beyond all numbers.
    pub fn position(&self, step: usize) -> Result<usize> {
        let of_ramp = step.checked_sub(self.origin.0);
        if let Some(position) = of_ramp.and_then(|step| self.ramp.get(step)) {
            return Ok(*position);
        }
        let (first_step, first) = self.after_ramp;
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
        // Positions rise with the steps, and one beyond all numbers is not before `end`.
        let is_before = |step: usize| self.position(step).is_ok_and(|position| position < end);
        let (mut first, mut last) = (self.origin.0, usize::MAX);
        while first < last {
            let middle = first + (last - first) / 2;
            if is_before(middle) {
                first = middle + 1;
            } else {
                last = middle;
            }
        }
        if is_before(first) {
            bail!("{end} sequences are more than any number of steps sees");
        }
        Ok(first)
    }

    fn step_samples(&self, step: usize) -> Result<StepSamples> {
        let (position, num_samples) = (self.position(step)?, self.samples.len());
        let place = position % num_samples;
        Ok(StepSamples {
            epoch: position / num_samples,
            places: place..place + self.len_at(position),
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

    /// Steps in which every sample is seen once, at the global batch size.
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
