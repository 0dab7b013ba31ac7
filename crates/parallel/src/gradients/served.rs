//! Gradients on their way from workers, which compute them, to servers, which update the weights.

use std::collections::BTreeMap;
use std::ops::Range;

use candle_comm::{Mesh, ReduceOp};
use candle_core::{DType, Result, Tensor, bail};
use candle_ops::sum_of_squares_into;

use super::accumulate::Gradients;
use super::reduced::{ReducedBuckets, ReducedGradients, ReducedLoss};
use super::squares::Squares;
use crate::params::{FlatBuffer, Parameters};

impl Gradients {
    /// What the passes of a step have added on this rank alone, at `ranges` of each bucket: views, which hold it until the next passes begin.
    ///
    /// # Errors
    /// A parameter without a gradient, ranges that are not of these buckets.
    pub fn slices(&self, ranges: &[Range<usize>]) -> Result<Vec<Tensor>> {
        let buckets = &self.params.layout().buckets;
        if ranges.len() != buckets.len() {
            bail!(
                "{} ranges for {} buckets of gradients",
                ranges.len(),
                buckets.len()
            );
        }
        if self.params.layout().num_gradient_buckets() != buckets.len() {
            bail!(
                "a worker with several pipeline stages that share weights cannot send their gradients\nhint: give it the model as one stage"
            );
        }
        let slice = |(index, range): (usize, &Range<usize>)| {
            self.check_complete(&buckets[index])?;
            match self.written(index)? {
                Some(whole) => {
                    self.write_missing(index, &whole)?;
                    whole.view(range.start, range.len())
                }
                None => bail!("replicas have divided the gradients"),
            }
        };
        ranges.iter().enumerate().map(slice).collect()
    }

    /// The L2 norm of what the passes of a step have added on this rank alone.
    ///
    /// # Errors
    /// Failures of the device.
    pub fn own_norm(&self) -> Result<f64> {
        let squares = Tensor::zeros(1, DType::F64, self.mesh.world.device())?;
        for index in 0..self.whole.len() {
            let Some(whole) = self.written(index)? else {
                continue;
            };
            self.write_missing(index, &whole)?;
            sum_of_squares_into(&squares, true, whole.tensor())?;
        }
        Ok(squares.to_vec1::<f64>()?[0].sqrt())
    }
}

/// Gradients that ranks outside of the mesh, workers, have computed, and what belongs to them: for
/// [`ReducedGradients::from_sums`](crate::ReducedGradients::from_sums).
#[derive(Clone, Debug)]
pub struct GradientSums {
    /// Of each bucket the sums at this rank's [ranges](crate::Parameters::own_ranges), f32.
    pub slices: Vec<Tensor>,
    /// Sum of the losses.
    pub loss_sum: f64,
    /// Number of their targets.
    pub num_targets: usize,
    /// What the gradient of the loss was multiplied by.
    pub loss_scale: f64,
    /// L2 norm of all gradients, of which these are slices, as they are; `None`: the ranks of the mesh add up what they have.
    pub norm: Option<f64>,
    /// Whether a worker asks to stop.
    pub asks_to_stop: bool,
}

impl ReducedGradients {
    /// The gradients of a step whose sums came from workers. Every rank of the mesh must call it if the sums have no norm.
    ///
    /// # Errors
    /// Sums that do not fit the parameters, no targets, failures of ranks.
    pub fn from_sums(params: &Parameters, mesh: &Mesh, sums: GradientSums) -> Result<Self> {
        let (layout, groups) = (params.layout(), params.groups());
        if sums.num_targets == 0 {
            bail!("the global batch has no targets: there is nothing to learn from");
        }
        if sums.slices.len() != layout.buckets.len() {
            let expected = layout.buckets.len();
            bail!(
                "gradients of {} buckets, expected {expected}",
                sums.slices.len()
            );
        }
        let padded = sums.slices.iter().zip(&layout.buckets);
        let padded = padded.map(|(slice, bucket)| {
            let len = groups.own_range(bucket.len).len();
            if slice.dims1()? == len {
                return FlatBuffer::new(slice.clone());
            }
            let padded = FlatBuffer::zeros(len, mesh.world.device())?;
            padded.write(0, slice)?;
            Ok(padded)
        });
        let buckets: Vec<FlatBuffer> = padded.collect::<Result<_>>()?;
        let (norm, is_asked_to_stop) = match sums.norm {
            Some(norm) => (norm, sums.asks_to_stop),
            None => {
                let squares = Squares::new(params)?;
                for (index, flat) in buckets.iter().enumerate() {
                    squares.set(params, index, flat)?;
                }
                let asking = f64::from(u8::from(sums.asks_to_stop));
                let asking = Tensor::new(&[asking], mesh.world.device())?;
                let all = Tensor::cat(&[squares.sum()?, asking], 0)?;
                let all = mesh.world.all_reduce(&all, ReduceOp::Sum)?;
                let all = all.to_vec1::<f64>()?;
                (all[0].sqrt(), all[1] > 0.0)
            }
        };
        let divisor = sums.num_targets as f64 * sums.loss_scale;
        Ok(Self {
            params: params.clone(),
            mesh: mesh.clone(),
            whole: vec![None; buckets.len()],
            buckets: ReducedBuckets::Here(buckets),
            clip: 1.0,
            scale: 1.0 / divisor,
            norm: norm / divisor,
            loss: ReducedLoss {
                mean: sums.loss_sum / sums.num_targets as f64,
                num_targets: sums.num_targets,
            },
            metrics: BTreeMap::new(),
            is_asked_to_stop,
            pipeline: Vec::new(),
            is_compared: true,
        })
    }
}
