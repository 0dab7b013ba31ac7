//! A whole matrix for a rule that needs one, wherever its values are.
//!
//! Each rank of the shard group (ZeRO) and of the tensor-parallel group calls the rule for the matrix, in the order of buckets, which is the
//! same on all of them. [`ParamMatrix::whole`] gathers what the rule asks for, and every rank computes the same from it: one message for
//! each matrix where an owner would send the result back in a second one, and no rank waits for another's arithmetic.

use std::ops::Range;

use candle_comm::ProcessGroup;
use candle_core::{DType, Result, Tensor, bail};

use super::optimizer::ParamSlice;
use crate::params::{Param, Parameters, ReplicaGroups, Slot, gather_range};
use crate::placement::{Shard, intersect, offset_by};

/// One parameter of two or more dims, of which this rank updates a part. Parts are flat and in f32, of as many values each; a rank that has
/// no values of the matrix has one zero in their place, which goes nowhere.
pub struct ParamMatrix<'a> {
    param: &'a Param,
    grad: Tensor,
    state: Vec<Tensor>,
    master: Option<Tensor>,
    weights: Tensor,
    /// Of the local values; empty if this rank updates none of them.
    range: Range<usize>,
    /// The local values that each rank of the shard group updates.
    slices: Vec<Range<usize>>,
    groups: &'a ReplicaGroups,
    tp: &'a ProcessGroup,
    /// Tensor-parallel ranks, and the indices of the cut dim that each owns.
    owners: Vec<(usize, Range<usize>)>,
}

impl<'a> ParamMatrix<'a> {
    /// That at `slot` of bucket `index`; `slice` has what this rank has of gradients, state and masters from `start` of the bucket on.
    pub(super) fn new(
        params: &'a Parameters,
        tp: &'a ProcessGroup,
        index: usize,
        slot: &Slot,
        slice: &ParamSlice<'_>,
        start: usize,
    ) -> Result<Self> {
        let (param, groups) = (params.get(slot.param), params.groups());
        let bucket_len = params.layout().buckets[index].len;
        let slices = groups.slices(bucket_len);
        let slices = slices.iter().map(|slice| intersect(slice, &slot.range));
        let slices: Vec<Range<usize>> = slices
            .map(|mine| offset_by(&mine, slot.range.start))
            .collect();
        let mine = intersect(&groups.own_range(bucket_len), &slot.range);
        let zero = || Tensor::zeros(1, DType::F32, slice.grad.device());
        let part = |values: &Tensor| match mine.is_empty() {
            true => zero(),
            false => values.narrow(0, mine.start - start, mine.len()),
        };
        let Some(spec) = params.model().get(&param.name) else {
            bail!("parameter {} is not one of the model", param.name);
        };
        let owners = params.model().holders(spec).into_iter();
        let owners = owners.map(|holder| (holder.rank % tp.world_size(), holder.range));
        Ok(Self {
            param,
            grad: part(slice.grad)?,
            state: slice.state.iter().map(part).collect::<Result<_>>()?,
            master: slice.master.map(part).transpose()?,
            weights: match mine.is_empty() {
                true => zero()?,
                false => params.own_weights(index, slot, &mine)?,
            },
            range: slices[groups.shard.rank()].clone(),
            slices,
            groups,
            tp,
            owners: owners.collect(),
        })
    }

    /// The parameter: its name, shape and placement.
    pub fn param(&self) -> &Param {
        self.param
    }

    /// This rank's part of the gradient, to be multiplied by [`UpdateStep::grad_scale`](crate::UpdateStep::grad_scale).
    pub fn grad(&self) -> &Tensor {
        &self.grad
    }

    /// This rank's parts of the rule's kinds of state.
    pub fn state(&self) -> &[Tensor] {
        &self.state
    }

    /// This rank's part of the weights, before they were rounded to the model's type.
    ///
    /// # Errors
    /// What the conversion returns.
    pub fn weights(&self) -> Result<Tensor> {
        match &self.master {
            Some(master) => Ok(master.clone()),
            None => self.weights.to_dtype(DType::F32),
        }
    }

    /// The whole matrix, in the parameter's global shape, of which each rank has `part`. Every rank calls it as often and in the same order.
    ///
    /// # Errors
    /// A part of another length, failures of ranks, and memory that is missing.
    pub fn whole(&self, part: &Tensor) -> Result<Tensor> {
        self.check_len("part", part)?;
        let local = 0..self.param.num_values();
        let local = gather_range(&local, &self.slices, part, &self.groups.shard)?;
        let local = local.reshape(self.param.local_shape())?;
        match self.param.shard() {
            None => Ok(local),
            Some(shard) => self.join(&local, shard),
        }
    }

    /// What this rank updates of a whole matrix, flat.
    ///
    /// # Errors
    /// A tensor of another shape.
    pub fn part(&self, whole: &Tensor) -> Result<Tensor> {
        let shape = &self.param.global_shape;
        if whole.shape() != shape {
            bail!(
                "the update of parameter {} has shape {:?}; expected {shape:?}",
                self.param.name,
                whole.shape()
            );
        }
        if self.range.is_empty() {
            return Tensor::zeros(1, whole.dtype(), whole.device());
        }
        let local = match self.param.shard() {
            None => whole.clone(),
            Some(shard) => {
                let ranges = shard.ranges().iter();
                let parts = ranges.map(|range| whole.narrow(shard.dim(), range.start, range.len()));
                Tensor::cat(&parts.collect::<Result<Vec<_>>>()?, shard.dim())?
            }
        };
        let local = local.flatten_all()?;
        local.narrow(0, self.range.start, self.range.len())
    }

    /// Overwrites this rank's part of the kind of state `kind`.
    ///
    /// # Errors
    /// No such kind, and a part of another length or type.
    pub fn set_state(&self, kind: usize, part: &Tensor) -> Result<()> {
        self.check_len("state", part)?;
        match self.state.get(kind) {
            Some(state) => state.slice_set(part, 0, 0),
            None => bail!(
                "the rule of parameter {} sets kind {kind} of its state; expected less than {}",
                self.param.name,
                self.state.len()
            ),
        }
    }

    /// Overwrites this rank's part of the weights; the model's are rounded from it.
    ///
    /// # Errors
    /// A part of another length or type.
    pub fn set_weights(&self, part: &Tensor) -> Result<()> {
        self.check_len("weights", part)?;
        if let Some(master) = &self.master {
            master.slice_set(part, 0, 0)?;
        }
        let rounded = part.to_dtype(self.weights.dtype())?;
        self.weights.slice_set(&rounded, 0, 0)
    }

    /// The matrix of which each tensor-parallel rank has `local`, its shard.
    fn join(&self, local: &Tensor, shard: &Shard) -> Result<Tensor> {
        let mut parts = Vec::with_capacity(self.owners.len());
        for (owner, range) in &self.owners {
            let own = match *owner == self.tp.rank() {
                true => self.param.narrow(local, range)?,
                false => None,
            };
            let part = match own {
                Some(own) => own.contiguous()?,
                None => {
                    let mut dims = self.param.global_shape.dims().to_vec();
                    dims[shard.dim()] = range.len();
                    Tensor::zeros(dims, local.dtype(), local.device())?
                }
            };
            parts.push(self.tp.start_broadcast(&part, *owner)?);
        }
        let parts = parts.into_iter().map(|part| part.wait());
        Tensor::cat(&parts.collect::<Result<Vec<_>>>()?, shard.dim())
    }

    fn check_len(&self, what: &str, part: &Tensor) -> Result<()> {
        if part.dims() != self.grad.dims() {
            bail!(
                "the rule of parameter {} gives {what} of shape {:?}; expected {:?}, as its gradient has",
                self.param.name,
                part.dims(),
                self.grad.dims()
            );
        }
        Ok(())
    }
}
