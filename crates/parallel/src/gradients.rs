//! Gradients of the trainable parameters: f32, one flat bucket per block, in name order.

use std::collections::HashMap;
use std::ops::Range;

use candle_comm::{Mesh, ReduceOp};
use candle_core::{Result, Tensor, TensorId, bail};

use crate::flat_buffer::FlatBuffer;
use crate::parameters::Parameters;

/// The gradients that a step accumulates over its micro-batches.
pub struct Gradients {
    params: Parameters,
    layout: BucketLayout,
    buckets: Vec<FlatBuffer>,
    is_filled: Vec<bool>,
    /// How often each parameter's gradient was written to.
    num_writes: Vec<usize>,
    index_of: HashMap<TensorId, usize>,
}

/// Which parameter lies where in which bucket.
#[derive(Debug)]
pub(crate) struct BucketLayout {
    pub buckets: Vec<Bucket>,
    /// (bucket, offset) of each parameter; `None` for frozen ones.
    places: Vec<Option<(usize, usize)>>,
}

/// The gradients of one block's parameters.
#[derive(Debug)]
pub(crate) struct Bucket {
    /// Number of values, padded so that the data-parallel ranks divide it evenly.
    pub len: usize,
    /// Parameter index and its values' range, in name order.
    pub slots: Vec<(usize, Range<usize>)>,
}

impl BucketLayout {
    pub fn new(params: &Parameters, dp_world_size: usize) -> Self {
        let mut blocks: Vec<usize> = params
            .iter()
            .flat_map(|param| param.blocks.first().copied())
            .collect();
        blocks.sort_unstable();
        blocks.dedup();
        let mut places = vec![None; params.len()];
        let mut buckets = Vec::new();
        for block in blocks {
            let mut slots = Vec::new();
            let mut len = 0;
            for (index, param) in params.iter().enumerate() {
                if param.trainable && param.blocks.first() == Some(&block) {
                    places[index] = Some((buckets.len(), len));
                    slots.push((index, len..len + param.num_values()));
                    len += param.num_values();
                }
            }
            if !slots.is_empty() {
                let len = len.next_multiple_of(dp_world_size);
                buckets.push(Bucket { len, slots });
            }
        }
        Self { buckets, places }
    }
}

impl Gradients {
    /// Buffers for the gradients of `params`.
    pub fn new(params: &Parameters, mesh: &Mesh) -> Result<Self> {
        let layout = BucketLayout::new(params, mesh.dp.world_size());
        let zeros = |bucket: &Bucket| FlatBuffer::zeros(bucket.len, mesh.world.device());
        Ok(Self {
            buckets: layout.buckets.iter().map(zeros).collect::<Result<_>>()?,
            is_filled: vec![false; params.len()],
            num_writes: vec![0; params.len()],
            index_of: params
                .iter()
                .enumerate()
                .map(|(index, param)| (param.var.id(), index))
                .collect(),
            params: params.clone(),
            layout,
        })
    }

    /// Adds `grad` to the gradient of parameter `index`, in f32. candle's graph gives gradients in the type of the parameter,
    /// so rounded once a micro-batch if that is bf16; what [`Self::write`] is used for is never rounded.
    pub fn accumulate(&mut self, index: usize, grad: &Tensor) -> Result<()> {
        let param = self.params.get(index);
        if grad.dims() != param.var.dims() {
            bail!(
                "the gradient of {} has shape {:?}; expected that of the parameter, {:?}",
                param.name,
                grad.shape(),
                param.var.shape()
            );
        }
        let Some((bucket, offset)) = self.layout.places[index] else {
            bail!("parameter {} is frozen: it takes no gradient", param.name);
        };
        let bucket = &self.buckets[bucket];
        match self.is_filled[index] {
            false => bucket.write(offset, grad)?,
            true => bucket.add(offset, grad)?,
        }
        self.mark_written(index);
        Ok(())
    }

    /// Lets `write` put the gradient of the parameter behind `weight` straight into its bucket; does nothing if `weight` is
    /// frozen.
    ///
    /// `write` gets the gradient's values, a flat view of f32, row-major, to be written in place, and whether to add to
    /// them: if not, what they hold is left over and must be overwritten.
    pub fn write(
        &mut self,
        weight: &Tensor,
        write: impl FnOnce(&Tensor, bool) -> Result<()>,
    ) -> Result<()> {
        if !weight.track_op() {
            return Ok(());
        }
        let Some(&index) = self.index_of.get(&weight.id()) else {
            bail!(
                "a weight of shape {:?} is trainable but none of this stage's parameters",
                weight.shape()
            );
        };
        if let Some((bucket, offset)) = self.layout.places[index] {
            let (len, add) = (weight.elem_count(), self.is_filled[index]);
            write(&self.buckets[bucket].view(offset, len)?, add)?;
            self.mark_written(index);
        }
        Ok(())
    }

    /// The gradient accumulated on this rank for parameter `index`, in the parameter's local shape.
    pub fn get(&self, index: usize) -> Result<Tensor> {
        let param = self.params.get(index);
        match self.layout.places[index] {
            Some((bucket, offset)) if self.is_filled[index] => self.buckets[bucket]
                .view(offset, param.num_values())?
                .reshape(param.var.dims()),
            _ => bail!("parameter {} has no gradient", param.name),
        }
    }

    /// Memory of the buckets on this rank.
    pub fn num_bytes(&self) -> usize {
        self.buckets.iter().map(FlatBuffer::num_bytes).sum()
    }

    fn mark_written(&mut self, index: usize) {
        self.is_filled[index] = true;
        self.num_writes[index] += 1;
    }

    /// How often the gradients of these parameters have been written to so far.
    pub(crate) fn num_writes(&self, indices: &[usize]) -> Vec<usize> {
        indices
            .iter()
            .map(|&index| self.num_writes[index])
            .collect()
    }

    /// Forgets what was accumulated; the buffers stay.
    pub fn clear(&mut self) {
        self.is_filled.fill(false);
    }

    pub(crate) fn buckets(&self) -> &[FlatBuffer] {
        &self.buckets
    }

    /// An error that names the first trainable parameter without a gradient, if there is one.
    pub(crate) fn check_complete(&self) -> Result<()> {
        for (index, param) in self.params.iter().enumerate() {
            if param.trainable && !self.is_filled[index] {
                bail!(
                    "parameter {} got no gradient in this step\nhint: run the backward pass of at least one \
                     micro-batch before the optimizer",
                    param.name
                );
            }
        }
        Ok(())
    }

    /// Sums the gradients of what several ranks of a replica hold: overlapping parts of tensor-parallel neighbours, and
    /// parameters tied across pipeline stages.
    pub(crate) fn sum_shared(&self, mesh: &Mesh) -> Result<()> {
        self.sum_overlapping(mesh)?;
        for tie in self.params.ties() {
            let grads = tie
                .params
                .iter()
                .map(|&index| self.get(index)?.flatten_all());
            let flat = Tensor::cat(&grads.collect::<Result<Vec<_>>>()?, 0)?;
            let sum = tie.group.all_reduce(&flat, ReduceOp::Sum)?;
            self.scatter_back(&tie.params, |offset, index| {
                sum.narrow(0, offset, self.params.get(index).num_values())
            })?;
        }
        Ok(())
    }

    fn sum_overlapping(&self, mesh: &Mesh) -> Result<()> {
        for &index in self.params.overlapping() {
            let param = self.params.get(index);
            let grad = self.get(index)?;
            let global = Tensor::zeros(&param.global_shape, grad.dtype(), grad.device())?;
            let (dim, held) = match &param.shard {
                Some(shard) => (shard.dim, shard.range.clone()),
                None => (0, 0..param.global_shape.dims()[0]),
            };
            global.slice_set(&grad, dim, held.start)?;
            let sum = mesh.tp.all_reduce(&global, ReduceOp::Sum)?;
            self.overwrite(index, &sum.narrow(dim, held.start, held.len())?)?;
        }
        Ok(())
    }

    fn scatter_back(
        &self,
        indices: &[usize],
        values: impl Fn(usize, usize) -> Result<Tensor>,
    ) -> Result<()> {
        let mut offset = 0;
        for &index in indices {
            self.overwrite(index, &values(offset, index)?)?;
            offset += self.params.get(index).num_values();
        }
        Ok(())
    }

    fn overwrite(&self, index: usize, grad: &Tensor) -> Result<()> {
        match self.layout.places[index] {
            Some((bucket, offset)) => self.buckets[bucket].write(offset, grad),
            None => Ok(()),
        }
    }
}
