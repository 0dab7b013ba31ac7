//! One training run of a fixture on a layout, with everything that can be compared.

use std::sync::Mutex;

use candle_comm::launch::threads_with;
use candle_comm::{Degrees, LocalConfig, Mesh, ProcessGroup};
use candle_core::{DType, Device, Result, Tensor};
use candle_ops::IGNORE_INDEX;
use candle_parallel::checkpoint::gather_full;
use candle_parallel::{
    Adapter, DataParallel, Gradients, LoraConfig, ModelPart, Offload, ParamStore, Pass, Pipeline,
    Recompute, Schedule, WeightFormat, ZeroStage,
};
use candle_train_models::CausalLm;
use candle_trainer::{Batches, SampleConfig, Samples, StepMetrics, Trainer};

use crate::device::devices;
use crate::fixture::{Fixture, Run};
use crate::tensors::Tensors;

#[derive(Clone, Copy, Debug)]
pub struct Layout {
    pub pp: usize,
    pub dp: usize,
    pub cp: usize,
    pub tp: usize,
    pub zero: ZeroStage,
    pub zero_group: Option<usize>,
    pub tile_linears: usize,
    pub overlap: bool,
    pub schedule: Schedule,
    /// Seed of random delays before each operation.
    pub delays: Option<u64>,
}

impl Layout {
    pub fn new(pp: usize, dp: usize, tp: usize) -> Self {
        Self {
            pp,
            dp,
            cp: 1,
            tp,
            zero: ZeroStage::Zero,
            zero_group: None,
            tile_linears: 1,
            overlap: true,
            schedule: Schedule::OneForwardOneBackward,
            delays: None,
        }
    }

    pub fn world_size(&self) -> usize {
        self.pp * self.dp * self.cp * self.tp
    }

    pub fn data_parallel(&self) -> DataParallel {
        DataParallel {
            zero: self.zero,
            zero_group: self.zero_group,
            tile_linears: self.tile_linears,
            overlap: self.overlap,
            ..DataParallel::default()
        }
    }

    pub fn degrees(&self) -> Degrees {
        Degrees {
            pp: self.pp,
            dp: self.dp,
            cp: self.cp,
            tp: self.tp,
        }
    }
}

/// What is trained, and in which type.
#[derive(Clone, Copy)]
pub struct Variant {
    pub dtype: DType,
    pub is_frozen: Option<fn(&str) -> bool>,
    pub recompute: Recompute,
    pub adapters: Adapters,
    /// Form of frozen weights.
    pub frozen_format: Option<WeightFormat>,
}

/// Which low-rank adapters the model has.
#[derive(Clone, Copy)]
pub enum Adapters {
    None,
    /// The fixture's.
    Trained,
    /// New ones with this dropout.
    New(f64),
}

impl Default for Variant {
    fn default() -> Self {
        Self {
            dtype: DType::F32,
            is_frozen: None,
            recompute: Recompute::None,
            adapters: Adapters::None,
            frozen_format: None,
        }
    }
}

/// What a run gave.
pub struct Outcome {
    pub metrics: Vec<StepMetrics>,
    pub first_gradients: Tensors,
    pub final_weights: Tensors,
    /// Names of the parameters of which the first rank has optimizer state.
    pub optimized: Vec<String>,
}

/// Whether position `.1` of sequence `.0` of a global batch has no target.
pub type Mask = fn(usize, usize) -> bool;

/// Trains the fixture's model as its reference was trained, on this layout.
pub fn train(fixture: &Fixture, run: &Run, layout: Layout) -> Result<Outcome> {
    train_masked(fixture, run, layout, |_, _| false)
}

/// As [`train`], without the targets that `mask` ignores.
pub fn train_masked(fixture: &Fixture, run: &Run, layout: Layout, mask: Mask) -> Result<Outcome> {
    train_on_mesh(fixture, run, layout, (mask, Variant::default()))
}

/// As [`train`], in another type or with frozen parameters.
pub fn train_variant(
    fixture: &Fixture,
    run: &Run,
    layout: Layout,
    variant: Variant,
) -> Result<Outcome> {
    train_on_mesh(fixture, run, layout, (|_, _| false, variant))
}

fn train_on_mesh(
    fixture: &Fixture,
    run: &Run,
    layout: Layout,
    what: (Mask, Variant),
) -> Result<Outcome> {
    let outcome = Mutex::new(None);
    launch(layout, |world| {
        let mesh = Mesh::new(world, layout.degrees())?;
        let result = train_rank(fixture, run, layout, what, &mesh)?;
        if mesh.world.rank() == 0 {
            *outcome.lock().unwrap() = Some(result);
        }
        Ok(())
    })?;
    Ok(outcome.into_inner().unwrap().unwrap())
}

pub fn launch(layout: Layout, rank: impl Fn(ProcessGroup) -> Result<()> + Sync) -> Result<()> {
    let config = LocalConfig {
        delays: layout.delays,
        devices: devices(),
        ..LocalConfig::new(layout.world_size())
    };
    threads_with(config, rank)?;
    Ok(())
}

fn train_rank(
    fixture: &Fixture,
    run: &Run,
    layout: Layout,
    (mask, variant): (Mask, Variant),
    mesh: &Mesh,
) -> Result<Outcome> {
    let part = load_variant(fixture, mesh, (layout, variant))?;
    let batches = batches(fixture, run, mesh)?;
    let config = run.train_config(layout);

    let mut gradients = Gradients::new(part.params(), mesh)?;
    if variant.dtype == DType::F16 {
        gradients.set_loss_scale(config.loss_scaling.init);
    }
    let pipeline = Pipeline::new(layout.schedule, mesh);
    let micro_batches = masked(&batches, 0, mask, mesh)?;
    pipeline.forward_backward(&part, &micro_batches, &mut gradients)?;
    let local = gradients.reduce()?.local_gradients()?;
    let mut first_gradients = gather(&part, mesh, |index| match local.get(&index) {
        Some(grad) => Ok(grad.clone()),
        None => {
            let shape = part.params().get(index).local_shape();
            Tensor::zeros(shape, DType::F32, part.device())
        }
    })?;
    let catalog = part.params().catalog();
    let is_trained = |name: &str| {
        let mut trained = catalog.iter().filter(|entry| entry.trainable);
        trained.any(|entry| entry.name == name)
    };
    first_gradients.retain(|name, _| is_trained(name));

    let mut trainer = Trainer::new(config, mesh, part)?;
    let metrics = (0..run.steps)
        .map(|step| trainer.train_step(&masked(&batches, step, mask, mesh)?))
        .collect::<Result<Vec<_>>>()?;
    let part = trainer.part();
    let values = |index| part.params().values(index);
    let final_weights = gather(part, mesh, values)?;
    Ok(Outcome {
        metrics,
        first_gradients,
        final_weights,
        optimized: trainer
            .optimizer()
            .state()?
            .into_iter()
            .map(|state| state.name)
            .collect(),
    })
}

/// This rank's micro-batches of a step, with the ignored targets marked.
fn masked(batches: &Batches, step: usize, mask: Mask, mesh: &Mesh) -> Result<Vec<Pass>> {
    let mut sequence = mesh.dp.rank() * batches.config().global_batch_size / mesh.dp.world_size();
    let mut micro_batches = batches.batch(step)?;
    for batch in &mut micro_batches {
        let (b, t) = batch.dims()?;
        let targets = batch.targets()?.clone();
        let mut ids = targets.flatten_all()?.to_vec1::<u32>()?;
        for (i, id) in ids.iter_mut().enumerate() {
            if mask(sequence + i / t, i % t) {
                *id = IGNORE_INDEX;
            }
        }
        let targets = Tensor::from_vec(ids, (b, t), targets.device())?;
        *batch =
            Pass::train(batch.inputs().clone(), targets).with_documents(batch.documents().cloned());
        sequence += b;
    }
    Ok(micro_batches)
}

/// This rank's stage of the fixture's model.
pub fn load(fixture: &Fixture, mesh: &Mesh) -> Result<ModelPart> {
    let layout = Layout {
        zero: ZeroStage::One,
        ..Layout::new(1, 1, 1)
    };
    load_variant(fixture, mesh, (layout, Variant::default()))
}

/// The same of another layout, or in another type.
pub fn load_variant(
    fixture: &Fixture,
    mesh: &Mesh,
    (layout, variant): (Layout, Variant),
) -> Result<ModelPart> {
    load_offloaded(fixture, mesh, (layout, variant), &Offload::default())
}

/// As [`load_variant`], with what `offload` names away from the device.
pub fn load_offloaded(
    fixture: &Fixture,
    mesh: &Mesh,
    (layout, variant): (Layout, Variant),
    offload: &Offload,
) -> Result<ModelPart> {
    let store = ParamStore::from_pretrained(fixture.model_dir())?
        .with_data_parallel(layout.data_parallel())
        .with_offload(offload.clone());
    let store = match variant.is_frozen {
        Some(is_frozen) => store.freeze(is_frozen),
        None => store,
    };
    let store = match variant.frozen_format {
        Some(format) => store.with_frozen_format(format),
        None => store,
    };
    let store = match variant.adapters {
        Adapters::None => store,
        Adapters::Trained => store.with_adapter(Adapter::open(fixture.adapter_dir())?)?,
        Adapters::New(dropout) => store.with_lora(LoraConfig {
            rank: 3,
            dropout,
            ..LoraConfig::default()
        })?,
    };
    let vb = store.builder(variant.dtype, mesh.world.device());
    Ok(CausalLm::part(&fixture.config(), mesh, &vb)?.with_recompute(|_| variant.recompute))
}

pub fn batches(fixture: &Fixture, run: &Run, mesh: &Mesh) -> Result<Batches> {
    let samples = Samples::new(&fixture.tokens(), SampleConfig::new(run.seq_len))?;
    let (rank, world_size) = (mesh.dp.rank(), mesh.dp.world_size());
    Batches::new(&samples, run.batch_config(), rank, world_size, &Device::Cpu)
}

/// Whole tensors by name, on rank 0, but for those in blocks.
pub fn gather(
    part: &ModelPart,
    mesh: &Mesh,
    local: impl Fn(usize) -> Result<Tensor>,
) -> Result<Tensors> {
    let mut tensors = Tensors::new();
    let is_in_blocks = |form: &str| ["q8_0", "q4k"].contains(&form);
    let catalog = part.params().catalog().iter();
    // Blocks are no values, and never written.
    for entry in catalog.filter(|entry| !is_in_blocks(entry.form())) {
        let whole = gather_full(part.params(), mesh, entry, DType::F32, &local)?;
        if let Some(whole) = whole {
            assert_eq!(whole.dims(), entry.shape);
            tensors.insert(entry.name.clone(), whole.flatten_all()?.to_vec1::<f32>()?);
        }
    }
    Ok(tensors)
}
