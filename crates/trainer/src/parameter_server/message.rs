//! What workers and servers say to each other.

use std::ops::Range;

use candle_comm::Mail;
use candle_core::{DType, Device, Error, Result, Tensor};

pub(super) const HELLO: u64 = 1;
pub(super) const START: u64 = 2;
pub(super) const PUSH: u64 = 3;
pub(super) const REPLY: u64 = 4;

/// Where a run is when a worker begins.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Start {
    pub step: usize,
    pub num_steps: usize,
    /// Of the next sequence, if the run goes on from a checkpoint.
    pub position: Option<usize>,
}

/// What a worker computed in a step.
pub(super) struct Push {
    pub worker: usize,
    pub step: usize,
    pub loss_sum: f64,
    pub num_targets: usize,
    /// Positions of the micro-batches, with a target or not.
    pub num_positions: usize,
    pub asks_to_stop: bool,
    /// Of the whole gradient.
    pub norm: f64,
    /// Of each bucket the server's values.
    pub slices: Vec<Tensor>,
}

/// Updated weights.
pub(super) struct Reply {
    pub num_updates: usize,
    pub loss_scale: f64,
    pub is_stopped: bool,
    pub slices: Vec<Tensor>,
}

impl Start {
    pub fn into_tensors(self, ranges: &[Range<usize>]) -> Result<Vec<Tensor>> {
        let position = self.position.map_or(-1, |position| position as i64);
        let numbers = [self.step as i64, self.num_steps as i64, position];
        let ranges = ranges.iter();
        let ranges = ranges.flat_map(|range| [range.start as i64, range.end as i64]);
        let numbers: Vec<i64> = numbers.into_iter().chain(ranges).collect();
        Ok(vec![Tensor::new(numbers, &Device::Cpu)?])
    }

    pub fn of(mail: &Mail) -> Result<(Self, Vec<Range<usize>>)> {
        let [numbers] = mail.tensors.as_slice() else {
            return Err(unexpected(mail));
        };
        let numbers = numbers.to_vec1::<i64>()?;
        let [step, num_steps, position, ranges @ ..] = numbers.as_slice() else {
            return Err(unexpected(mail));
        };
        let size = |number: &i64| usize::try_from(*number).map_err(|_| unexpected(mail));
        let start = Self {
            step: size(step)?,
            num_steps: size(num_steps)?,
            position: usize::try_from(*position).ok(),
        };
        let ranges = ranges.chunks(2).map(|range| match range {
            [start, end] => Ok(size(start)?..size(end)?),
            _ => Err(unexpected(mail)),
        });
        Ok((start, ranges.collect::<Result<_>>()?))
    }
}

impl Push {
    pub fn into_tensors(self) -> Result<Vec<Tensor>> {
        let numbers = [
            self.step as f64,
            self.loss_sum,
            self.num_targets as f64,
            self.num_positions as f64,
            f64::from(u8::from(self.asks_to_stop)),
            self.norm,
        ];
        with_numbers(&numbers, self.slices)
    }

    pub fn of(mail: Mail) -> Result<Self> {
        let (numbers, slices) = numbers_of::<6>(&mail)?;
        let [step, loss_sum, num_targets, num_positions, asking, norm] = numbers;
        Ok(Self {
            worker: mail.from,
            step: step as usize,
            loss_sum,
            num_targets: num_targets as usize,
            num_positions: num_positions as usize,
            asks_to_stop: asking > 0.0,
            norm,
            slices,
        })
    }
}

impl Reply {
    pub fn into_tensors(self) -> Result<Vec<Tensor>> {
        let is_stopped = f64::from(u8::from(self.is_stopped));
        let numbers = [self.num_updates as f64, self.loss_scale, is_stopped];
        with_numbers(&numbers, self.slices)
    }

    pub fn of(mail: Mail) -> Result<Self> {
        let ([num_updates, loss_scale, is_stopped], slices) = numbers_of::<3>(&mail)?;
        Ok(Self {
            num_updates: num_updates as usize,
            loss_scale,
            is_stopped: is_stopped > 0.0,
            slices,
        })
    }
}

fn with_numbers(numbers: &[f64], slices: Vec<Tensor>) -> Result<Vec<Tensor>> {
    let mut tensors = vec![Tensor::new(numbers, &Device::Cpu)?];
    tensors.extend(slices);
    Ok(tensors)
}

fn numbers_of<const N: usize>(mail: &Mail) -> Result<([f64; N], Vec<Tensor>)> {
    let Some((numbers, slices)) = mail.tensors.split_first() else {
        return Err(unexpected(mail));
    };
    if numbers.dtype() != DType::F64 {
        return Err(unexpected(mail));
    }
    let numbers = <[f64; N]>::try_from(numbers.to_vec1::<f64>()?);
    Ok((numbers.map_err(|_| unexpected(mail))?, slices.to_vec()))
}

fn unexpected(mail: &Mail) -> Error {
    Error::msg(format!(
        "rank {} sent a message of tag {} that is not what it should be\nhint: start the same build of the program on all hosts",
        mail.from, mail.tag
    ))
}
