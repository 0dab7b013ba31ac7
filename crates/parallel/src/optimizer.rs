//! AdamW under data parallelism, with its state whole on every rank (ZeRO-0) or divided over them (ZeRO-1,
//! arXiv:1910.02054). Both move 2Ψ(N−1)/N values a step over N data-parallel ranks: gradients in f32, weights in their own
//! type.

mod reduce;
mod update;

use std::collections::BTreeMap;
use std::ops::Range;

use candle_comm::Mesh;
use candle_core::{Result, bail};
use serde::{Deserialize, Serialize};

use crate::adamw::AdamWConfig;
use crate::flat_buffer::FlatBuffer;
use crate::gradients::{Bucket, BucketLayout, Gradients};
use crate::master_weights::{MasterWeights, intersect, offset_by};
use crate::parameters::Parameters;

pub use reduce::{ReducedGradients, ReducedLoss};

/// What data-parallel ranks divide between them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ZeroStage {
    /// Nothing: gradients are all-reduced, every rank updates everything.
    Zero,
    /// Optimizer state: gradients are reduce-scattered, each rank updates its slice, weights are all-gathered.
    One,
}

/// The optimizer of one rank.
pub struct Optimizer {
    params: Parameters,
    mesh: Mesh,
    zero: ZeroStage,
    config: AdamWConfig,
    layout: BucketLayout,
    moments: Vec<Moments>,
    masters: Vec<MasterWeights>,
    num_steps: usize,
}

struct Moments {
    exp_avg: FlatBuffer,
    exp_avg_sq: FlatBuffer,
}

/// What a rank keeps for the part of a parameter that it updates.
#[derive(Clone, Debug)]
pub struct ParamMoments {
    /// Hugging Face name.
    pub name: String,
    /// Row-major offsets into the rank's local values of the parameter.
    pub offsets: Range<usize>,
    /// Average of the gradients, m.
    pub exp_avg: Vec<f32>,
    /// Average of the squared gradients, v.
    pub exp_avg_sq: Vec<f32>,
    /// The weights before they were rounded to their type; `None` if they are f32.
    pub master: Option<Vec<f32>>,
}

impl Optimizer {
    /// An optimizer for the trainable ones of `params`.
    pub fn new(
        params: &Parameters,
        mesh: &Mesh,
        zero: ZeroStage,
        config: AdamWConfig,
    ) -> Result<Self> {
        config.validate()?;
        let layout = BucketLayout::new(params, mesh.dp.world_size());
        if layout.buckets.is_empty() && params.is_empty() {
            bail!(
                "there is no parameter to optimize on rank {}",
                mesh.world.rank()
            );
        }
        let mut optimizer = Self {
            params: params.clone(),
            mesh: mesh.clone(),
            zero,
            config,
            layout,
            moments: Vec::new(),
            masters: Vec::new(),
            num_steps: 0,
        };
        let buckets = &optimizer.layout.buckets;
        let moments = buckets.iter().map(|bucket| {
            let (len, device) = (optimizer.own_range(bucket).len(), mesh.world.device());
            Ok(Moments {
                exp_avg: FlatBuffer::zeros(len, device)?,
                exp_avg_sq: FlatBuffer::zeros(len, device)?,
            })
        });
        let moments = moments.collect::<Result<_>>()?;
        let masters = buckets.iter().map(|bucket| {
            let own = optimizer.own_range(bucket);
            MasterWeights::new(params, bucket, &own, mesh.world.device())
        });
        optimizer.masters = masters.collect::<Result<_>>()?;
        optimizer.moments = moments;
        Ok(optimizer)
    }

    /// Number of updates made.
    pub fn num_steps(&self) -> usize {
        self.num_steps
    }

    /// Memory of the moments and masters on this rank.
    pub fn num_bytes(&self) -> usize {
        let moments = self.moments.iter();
        let moments = moments.map(|m| m.exp_avg.num_bytes() + m.exp_avg_sq.num_bytes());
        let masters = self.masters.iter().map(MasterWeights::num_bytes);
        moments.chain(masters).sum()
    }

    /// The part of a bucket that this rank updates.
    fn own_range(&self, bucket: &Bucket) -> Range<usize> {
        match self.zero {
            ZeroStage::Zero => 0..bucket.len,
            ZeroStage::One => {
                let len = bucket.len / self.mesh.dp.world_size();
                let rank = self.mesh.dp.rank();
                rank * len..(rank + 1) * len
            }
        }
    }

    /// Reduces the gradients, clips them to the global norm `max_norm` and updates the parameters with learning rate `lr`.
    ///
    /// Returns the norm before clipping. The gradients are cleared. A norm that is not finite is an error on every rank,
    /// which names the first parameter to blame, and nothing is updated.
    pub fn step(
        &mut self,
        gradients: &mut Gradients,
        lr: f64,
        max_norm: Option<f64>,
    ) -> Result<f64> {
        let reduced = self.reduce(gradients)?;
        self.check_finite(&reduced)?;
        self.apply(&reduced, lr, max_norm)?;
        Ok(reduced.norm())
    }

    /// The moments and masters that this rank keeps, by parameter name.
    pub fn moments(&self) -> Result<Vec<ParamMoments>> {
        let mut all = BTreeMap::new();
        let state = self.moments.iter().zip(&self.masters);
        for (bucket, (moments, masters)) in self.layout.buckets.iter().zip(state) {
            let own = self.own_range(bucket);
            for (index, range) in &bucket.slots {
                let mine = intersect(range, &own);
                if mine.is_empty() {
                    continue;
                }
                let local = offset_by(&mine, own.start);
                let state = ParamMoments {
                    name: self.params.get(*index).name.clone(),
                    offsets: offset_by(&mine, range.start),
                    exp_avg: moments.exp_avg.values(local.start, local.len())?,
                    exp_avg_sq: moments.exp_avg_sq.values(local.start, local.len())?,
                    master: masters.get(local)?,
                };
                all.insert(state.name.clone(), state);
            }
        }
        Ok(all.into_values().collect())
    }
}
