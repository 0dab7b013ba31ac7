//! AdamW under data parallelism, with its state whole on every rank (ZeRO-0) or divided over them (ZeRO-1,
//! arXiv:1910.02054). Both move 2Ψ(N−1)/N values a step over N data-parallel ranks: gradients in f32, weights in their own
//! type.

use std::collections::BTreeMap;
use std::ops::Range;

use candle_comm::{Mesh, Pending, ReduceOp};
use candle_core::{DType, Result, Tensor, bail};
use candle_ops::{AdamWBuffers, adamw, sum_of_squares_into};
use serde::{Deserialize, Serialize};

use crate::adamw::AdamWConfig;
use crate::flat_buffer::FlatBuffer;
use crate::gradients::{Bucket, BucketLayout, Gradients};
use crate::master_weights::{MasterWeights, intersect, offset_by};
use crate::parameters::Parameters;

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

/// Gradients summed over all ranks: whole buckets (ZeRO-0) or this rank's slices of them (ZeRO-1).
pub struct ReducedGradients {
    buckets: Vec<FlatBuffer>,
    norm: f64,
}

impl ReducedGradients {
    /// Global L2 norm, before clipping; each value of the model counts once.
    pub fn norm(&self) -> f64 {
        self.norm
    }
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
        Ok(reduced.norm)
    }

    /// Sums the gradients over all ranks and computes their norm. The gradients are cleared; what is returned may share
    /// their buffers and must be used before the next backward pass.
    pub fn reduce(&self, gradients: &mut Gradients) -> Result<ReducedGradients> {
        Ok(self.reduce_with_loss(gradients, None)?.0)
    }

    /// [`Self::reduce`], and the sum over all ranks of `loss_sum`, the f64 scalar on its device that a rank has of the loss.
    ///
    /// Norm and loss come to the host in one read: on a GPU the only time in a step that the host waits for it.
    pub fn reduce_with_loss(
        &self,
        gradients: &mut Gradients,
        loss_sum: Option<&Tensor>,
    ) -> Result<(ReducedGradients, f64)> {
        gradients.check_complete()?;
        gradients.sum_shared(&self.mesh)?;
        let mut buckets = Vec::with_capacity(self.layout.buckets.len());
        let zero = Tensor::zeros(1, DType::F64, self.mesh.world.device())?;
        let squares = zero.copy()?;
        // The squares are summed bucket by bucket, while what was just reduced is in the cache.
        let mut finish = |started: (&Bucket, &FlatBuffer, Pending<Tensor>)| -> Result<()> {
            let bucket = started.0;
            let flat = self.finish_reduction(started)?;
            self.add_squares(&squares, bucket, &flat)?;
            buckets.push(flat);
            Ok(())
        };
        let mut under_way = None;
        // Two buckets are under way at a time; the sums take the place of what was summed.
        for (bucket, flat) in self.layout.buckets.iter().zip(gradients.buckets()) {
            let started = self.start_reduction(flat)?;
            if let Some(earlier) = under_way.replace((bucket, flat, started)) {
                finish(earlier)?;
            }
        }
        if let Some(last) = under_way {
            finish(last)?;
        }
        gradients.clear();
        let loss_sum = loss_sum.map_or(Ok(zero), |sum| sum.reshape(1))?;
        let sums = Tensor::cat(&[squares, loss_sum], 0)?;
        let sums = self.mesh.world.all_reduce(&sums, ReduceOp::Sum)?;
        let sums = sums.to_vec1::<f64>()?;
        let norm = sums[0].sqrt();
        Ok((ReducedGradients { buckets, norm }, sums[1]))
    }

    fn start_reduction(&self, flat: &FlatBuffer) -> Result<Pending<Tensor>> {
        match self.zero {
            ZeroStage::Zero => self.mesh.dp.start_all_reduce(flat.tensor(), ReduceOp::Sum),
            ZeroStage::One => self
                .mesh
                .dp
                .start_reduce_scatter(flat.tensor(), ReduceOp::Sum),
        }
    }

    fn finish_reduction(
        &self,
        (bucket, flat, started): (&Bucket, &FlatBuffer, Pending<Tensor>),
    ) -> Result<FlatBuffer> {
        let own = self.own_range(bucket);
        let sum = started.wait()?;
        if self.mesh.dp.world_size() > 1 {
            flat.write(own.start, &sum)?;
        }
        FlatBuffer::new(flat.view(own.start, own.len())?)
    }

    /// Adds to `sum` the squares of the values of a reduced bucket that count on this rank: each of the model counts on one.
    fn add_squares(&self, sum: &Tensor, bucket: &Bucket, flat: &FlatBuffer) -> Result<()> {
        if self.zero == ZeroStage::Zero && self.mesh.dp.rank() > 0 {
            return Ok(());
        }
        let own = self.own_range(bucket);
        for (index, range) in &bucket.slots {
            for counted in self.params.counted(*index) {
                let counted = range.start + counted.start..range.start + counted.end;
                let counted = offset_by(&intersect(&counted, &own), own.start);
                if !counted.is_empty() {
                    let values = flat.view(counted.start, counted.len())?;
                    sum_of_squares_into(sum, true, &values)?;
                }
            }
        }
        Ok(())
    }

    /// An error on every rank if the norm is not finite; it names the first parameter, in name order, that has a NaN or
    /// infinite gradient.
    pub fn check_finite(&self, reduced: &ReducedGradients) -> Result<()> {
        if reduced.norm.is_finite() {
            return Ok(());
        }
        let mut first: Option<&str> = None;
        for (bucket, flat) in self.layout.buckets.iter().zip(&reduced.buckets) {
            let own = self.own_range(bucket);
            for (index, range) in &bucket.slots {
                let range = intersect(range, &own);
                let values = flat.values(range.start - own.start, range.len())?;
                let is_finite = values.iter().all(|value| value.is_finite());
                let name = self.params.get(*index).name.as_str();
                if !is_finite && first.is_none_or(|first| name < first) {
                    first = Some(name);
                }
            }
        }
        let all = self
            .mesh
            .world
            .all_gather_bytes(first.unwrap_or_default().as_bytes())?;
        let names = all
            .iter()
            .map(|name| String::from_utf8_lossy(name).into_owned());
        let first = names.filter(|name| !name.is_empty()).min();
        match first {
            Some(name) => bail!(
                "the gradient norm is {}; the first parameter with a NaN or infinite gradient is {name}\nhint: a lower \
                 learning rate, more warm-up steps or gradient clipping may help; the weights were not updated",
                reduced.norm
            ),
            None => bail!(
                "the gradient norm is {} though every gradient is finite: it overflows",
                reduced.norm
            ),
        }
    }

    /// Updates the parameters from reduced gradients, scaled by min(1, max_norm / (norm + 1e-6)).
    pub fn apply(
        &mut self,
        reduced: &ReducedGradients,
        lr: f64,
        max_norm: Option<f64>,
    ) -> Result<()> {
        self.num_steps += 1;
        let grad_scale =
            max_norm.map_or(1.0, |max_norm| (max_norm / (reduced.norm + 1e-6)).min(1.0));
        let mut under_way = None;
        let buckets = self.layout.buckets.iter().zip(&reduced.buckets);
        let state = self.moments.iter().zip(&self.masters);
        for ((bucket, flat), (moments, masters)) in buckets.zip(state) {
            self.update(bucket, flat, (moments, masters), lr, grad_scale)?;
            if self.zero == ZeroStage::One && self.mesh.dp.world_size() > 1 {
                let slice = self.pack(bucket, &self.own_range(bucket), masters.dtype())?;
                let started = self.mesh.dp.start_all_gather(&slice)?;
                if let Some((bucket, earlier)) = under_way.replace((bucket, started)) {
                    self.unpack(bucket, &earlier.wait()?)?;
                }
            }
        }
        match under_way {
            Some((bucket, last)) => self.unpack(bucket, &last.wait()?),
            None => Ok(()),
        }
    }

    /// Updates this rank's part of a bucket's parameters.
    fn update(
        &self,
        bucket: &Bucket,
        flat: &FlatBuffer,
        (moments, masters): (&Moments, &MasterWeights),
        lr: f64,
        grad_scale: f64,
    ) -> Result<()> {
        let own = self.own_range(bucket);
        for (index, range) in &bucket.slots {
            let mine = intersect(range, &own);
            if mine.is_empty() {
                continue;
            }
            let param = self.params.get(*index);
            let is_matrix = param.global_shape.rank() >= 2;
            let weight_decay = match is_matrix {
                true => self.config.weight_decay,
                false => 0.0,
            };
            let constants = self
                .config
                .constants(lr, weight_decay, grad_scale, self.num_steps);
            let weights = param.flat_part(&offset_by(&mine, range.start))?;
            let local = offset_by(&mine, own.start);
            let part = |buffer: &FlatBuffer| buffer.view(local.start, local.len());
            let master = masters.view(&local)?;
            let buffers = AdamWBuffers {
                master: master.as_ref().unwrap_or(&weights),
                exp_avg: &part(&moments.exp_avg)?,
                exp_avg_sq: &part(&moments.exp_avg_sq)?,
                weights: master.is_some().then_some(&weights),
                grad: &part(flat)?,
                device_scale: None,
            };
            adamw(&buffers, &constants)
                .map_err(|err| err.context(format!("updating parameter {}", param.name)))?;
        }
        Ok(())
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

    /// Local gradients out of reduced ones, for inspection: the whole local gradient of each trainable parameter, by its
    /// index. With ZeRO-1 the slices are gathered over the data-parallel ranks, which all must call this.
    pub fn local_gradients(&self, reduced: &ReducedGradients) -> Result<BTreeMap<usize, Tensor>> {
        let mut grads = BTreeMap::new();
        for (bucket, flat) in self.layout.buckets.iter().zip(&reduced.buckets) {
            let whole = match self.zero {
                ZeroStage::Zero => flat.tensor().clone(),
                ZeroStage::One => self.mesh.dp.all_gather(flat.tensor(), 0)?,
            };
            for (index, range) in &bucket.slots {
                let grad = whole.narrow(0, range.start, range.len())?;
                let dims = self.params.get(*index).var.dims();
                grads.insert(*index, grad.reshape(dims)?.copy()?);
            }
        }
        Ok(grads)
    }
}
