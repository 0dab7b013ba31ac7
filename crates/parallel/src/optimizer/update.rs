//! From reduced gradients to new weights.

use std::ops::Range;

use candle_core::{DType, Result, Tensor};
use candle_ops::{AdamWBuffers, AdamWConstants, AdamWSlot, adamw};

use super::{Moments, Optimizer, ReducedGradients, ZeroStage};
use crate::flat_buffer::FlatBuffer;
use crate::gradients::Bucket;
use crate::master_weights::{MasterWeights, intersect, offset_by};

impl Optimizer {
    /// Updates the parameters from reduced gradients, scaled by min(1, max_norm / (norm + 1e-6)).
    ///
    /// After an error some parameters are updated and others are not: the run cannot go on.
    pub fn apply(
        &mut self,
        reduced: &ReducedGradients,
        lr: f64,
        max_norm: Option<f64>,
    ) -> Result<()> {
        let clip = max_norm.map_or(1.0, |max_norm| (max_norm / (reduced.norm + 1e-6)).min(1.0));
        let grad_scale = clip * reduced.scale;
        let constants = self.config.constants(lr, grad_scale, self.num_steps + 1);
        let mut under_way = None;
        let buckets = self.layout.buckets.iter().zip(&reduced.buckets);
        let state = self.moments.iter().zip(&self.masters);
        for ((bucket, flat), (moments, masters)) in buckets.zip(state) {
            self.update(bucket, flat, (moments, masters), &constants)?;
            if self.zero == ZeroStage::One && self.mesh.dp.world_size() > 1 {
                let slice = self.pack(bucket, &self.own_range(bucket), masters.dtype())?;
                let started = self.mesh.dp.start_all_gather(&slice)?;
                if let Some((bucket, earlier)) = under_way.replace((bucket, started)) {
                    self.unpack(bucket, &earlier.wait()?)?;
                }
            }
        }
        if let Some((bucket, last)) = under_way {
            self.unpack(bucket, &last.wait()?)?;
        }
        self.num_steps += 1;
        Ok(())
    }

    /// Updates this rank's part of a bucket's parameters.
    fn update(
        &self,
        bucket: &Bucket,
        flat: &FlatBuffer,
        (moments, masters): (&Moments, &MasterWeights),
        constants: &AdamWConstants,
    ) -> Result<()> {
        let own = self.own_range(bucket);
        let mut places = Vec::with_capacity(bucket.slots.len());
        for (index, range) in &bucket.slots {
            let mine = intersect(range, &own);
            if !mine.is_empty() {
                let param = self.params.get(*index);
                let weights = param.flat_part(&offset_by(&mine, range.start))?;
                // Not norms and biases.
                let decays = param.global_shape.rank() >= 2;
                places.push((weights, mine.start - own.start, decays));
            }
        }
        let slots = places.iter().map(|(weights, start, decays)| AdamWSlot {
            weights,
            start: *start,
            decays: *decays,
        });
        let buffers = AdamWBuffers {
            master: masters.tensor(),
            exp_avg: moments.exp_avg.tensor(),
            exp_avg_sq: moments.exp_avg_sq.tensor(),
            grad: flat.tensor(),
        };
        adamw(&buffers, &slots.collect::<Vec<_>>(), constants).map_err(|err| {
            let first = bucket.slots.first();
            let name = first.map_or("nothing", |(index, _)| &self.params.get(*index).name);
            err.context(format!("updating the parameters from {name} on"))
        })
    }

    /// This rank's slice of a bucket's parameters, flat.
    fn pack(&self, bucket: &Bucket, own: &Range<usize>, dtype: DType) -> Result<Tensor> {
        let slice = Tensor::zeros(own.len(), dtype, self.mesh.world.device())?;
        for (index, range) in &bucket.slots {
            let mine = intersect(range, own);
            if !mine.is_empty() {
                let param = self.params.get(*index);
                let values = param.flat_part(&offset_by(&mine, range.start))?;
                slice.slice_set(&values.contiguous()?, 0, mine.start - own.start)?;
            }
        }
        Ok(slice)
    }

    /// Writes a bucket's parameters, gathered from all slices.
    fn unpack(&self, bucket: &Bucket, flat: &Tensor) -> Result<()> {
        for (index, range) in &bucket.slots {
            if range.is_empty() {
                continue;
            }
            let var = &self.params.get(*index).var;
            let values = flat
                .narrow(0, range.start, range.len())?
                .reshape(var.dims())?;
            var.set(&values)?;
        }
        Ok(())
    }
}
