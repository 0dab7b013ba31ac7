//! Training checkpoints: what one layout saved, every other one loads, value by value, and goes on from.

use std::collections::BTreeMap;
use std::path::Path;

use candle_comm::Mesh;
use candle_core::{DType, Result, Tensor};
use candle_parallel::checkpoint::{CheckpointSaver, TrainingCheckpoint};
use candle_parallel::{
    AdamW, AdamWConfig, DataParallel, DistributedOptimizer, Gradients, LossScaling, MemoryCategory,
    ModelPart, Offload, ParamStore, Pipeline, Recompute, Schedule, ZeroStage,
};
use serde_json::json;
use tempfile::tempdir;

use crate::chain::{Bits, Chain, Values, gather_weights, local_bits};
use crate::check::on_mesh;

/// How a run lies on its ranks.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    pub mesh: (usize, usize, usize),
    zero: ZeroStage,
    zero_group: Option<usize>,
    in_file: bool,
    recompute: bool,
    num_tiles: usize,
}

/// All stages of ZeRO, tiles, a vocabulary of 13 on two tensor-parallel ranks, state in files, and recomputation.
const LAYOUTS: [Layout; 9] = [
    layout((1, 1, 1), ZeroStage::Zero),
    layout((2, 1, 1), ZeroStage::One),
    layout((1, 3, 1), ZeroStage::Two),
    layout((1, 2, 2), ZeroStage::Three),
    Layout {
        num_tiles: 3,
        ..layout((2, 2, 1), ZeroStage::Three)
    },
    layout((2, 2, 2), ZeroStage::One),
    Layout {
        in_file: true,
        ..layout((1, 2, 2), ZeroStage::Zero)
    },
    Layout {
        zero_group: Some(3),
        recompute: true,
        ..layout((1, 6, 1), ZeroStage::Three)
    },
    Layout {
        in_file: true,
        zero_group: Some(2),
        ..layout((1, 6, 1), ZeroStage::Two)
    },
];

pub const fn layout(mesh: (usize, usize, usize), zero: ZeroStage) -> Layout {
    Layout {
        mesh,
        zero,
        zero_group: None,
        in_file: false,
        recompute: false,
        num_tiles: 1,
    }
}

/// One rank of a training run.
pub struct Run {
    chain: Chain,
    mesh: Mesh,
    pub part: ModelPart,
    pub optimizer: DistributedOptimizer,
}

impl Run {
    pub fn new(chain: Chain, layout: Layout, mesh: Mesh, seed: u64, files: &Path) -> Result<Self> {
        let store = ParamStore::init(seed).with_data_parallel(DataParallel {
            zero: layout.zero,
            zero_group: layout.zero_group,
            tile_linears: layout.num_tiles,
            ..DataParallel::default()
        });
        let offload = match (layout.in_file, layout.num_tiles) {
            // In parts that begin and end within parameters.
            (true, 1) => Offload {
                update_values: 100,
                ..Offload::all().in_dir(files)
            },
            (true, _) => Offload::optimizer().in_dir(files),
            (false, _) => Offload::default(),
        };
        let part = chain.part(&mesh, &store.with_offload(offload))?;
        let recompute = match layout.recompute {
            true => Recompute::Full,
            false => Recompute::None,
        };
        let part = part.with_recompute(|_| recompute);
        let rule = AdamW(AdamWConfig::default());
        let optimizer = DistributedOptimizer::new(part.params(), &mesh, rule)?;
        let optimizer = optimizer.with_loss_scaling(LossScaling {
            init: 64.0,
            window: 2,
        })?;
        Ok(Self {
            chain,
            mesh,
            part,
            optimizer,
        })
    }

    /// Step `step`; returns its loss.
    pub fn step(&mut self, step: u64) -> Result<f64> {
        let mut gradients = Gradients::new(self.part.params(), &self.mesh)?;
        gradients.set_loss_scale(self.optimizer.loss_scale());
        let pipeline = Pipeline::new(Schedule::OneForwardOneBackward, &self.mesh);
        let (rank, dp) = (self.mesh.dp.rank(), self.mesh.dp.world_size());
        let batches = self.chain.micro_batches(50 * step, 6)?;
        let batches = &batches[rank * 6 / dp..(rank + 1) * 6 / dp];
        pipeline.forward_backward(&self.part, batches, &mut gradients)?;
        let report = self.optimizer.step(&mut gradients, 0.01, Some(1.0))?;
        Ok(report.loss.mean)
    }

    pub fn open(&self, dir: &Path) -> Result<TrainingCheckpoint> {
        TrainingCheckpoint::open(&self.mesh.world, dir)
    }

    pub fn saver(&self, dir: &Path, keep: usize) -> Result<CheckpointSaver> {
        CheckpointSaver::new(&self.mesh.world, dir, keep, None)
    }

    /// Whole weights, moments and masters: weights on rank 0, of the state what this rank has.
    fn state(&self) -> Result<State> {
        let mut state = State {
            weights: gather_weights(&self.part, &self.mesh)?,
            ..State::default()
        };
        for kept in self.optimizer.state()? {
            let places = kept.offsets.into_iter().flatten();
            let of_kind = state.moments.entry((kept.name, kept.kind)).or_default();
            of_kind.extend(places.zip(kept.values.into_iter().map(f32::to_bits)));
        }
        Ok(state)
    }
}

/// Values of a whole model; moments by their places, bit by bit.
#[derive(Default, PartialEq)]
struct State {
    weights: Values,
    moments: BTreeMap<(String, String), BTreeMap<usize, u32>>,
}

/// The state of all ranks together.
fn joined(ranks: impl IntoIterator<Item = State>) -> State {
    let mut all = State::default();
    for rank in ranks {
        all.weights.extend(rank.weights);
        for (key, values) in rank.moments {
            all.moments.entry(key).or_default().extend(values);
        }
    }
    all
}

/// What a run was after its second step, and what its third one gave: the loss, and the bits of every rank's weights.
type Trained = (State, f64, Vec<Bits>);

/// Two steps, a checkpoint after them, and a step while it is being written.
fn save(chain: Chain, layout: Layout, dir: &Path) -> Trained {
    let ranks = on_mesh(layout.mesh, |mesh| {
        let mut run = Run::new(chain, layout, mesh, 5, dir)?;
        run.step(0)?;
        run.step(1)?;
        let state = run.state()?;
        let mut saver = run.saver(&dir.join("saves"), 1)?;
        let buffers = || {
            run.part
                .params()
                .meter()
                .report()
                .of(MemoryCategory::Buffers)
        };
        let before = buffers().peak;
        assert_eq!(saver.start(&run.optimizer, 2, json!({"a": 1}))?, None);
        if layout.in_file {
            assert_eq!(buffers().peak, before, "what is in files was copied");
        }
        let loss = run.step(2)?;
        let outcome = saver.finish()?.expect("a save was under way");
        assert_eq!(outcome.saved.unwrap(), dir.join("saves/step-000002"));
        Ok((state, loss, local_bits(&run.part)))
    });
    summed(ranks)
}

fn summed(ranks: Vec<(State, f64, Bits)>) -> Trained {
    let loss = ranks[0].1;
    let (states, bits): (Vec<_>, Vec<_>) = ranks
        .into_iter()
        .map(|(state, _, bits)| (state, bits))
        .unzip();
    (joined(states), loss, bits)
}

/// A run that began with other weights, and loads them.
fn load(chain: Chain, layout: Layout, dir: &Path) -> Trained {
    let files = tempdir().unwrap();
    let ranks = on_mesh(layout.mesh, |mesh| {
        let mut run = Run::new(chain, layout, mesh, 6, files.path())?;
        let checkpoint = run.open(&dir.join("saves/step-000002"))?;
        assert_eq!(
            (checkpoint.step(), &checkpoint.record()["a"]),
            (2, &json!(1))
        );
        checkpoint.load(&mut run.optimizer)?;
        assert_eq!(run.optimizer.num_steps(), 2);
        assert_eq!(run.optimizer.loss_scale(), 128.0);
        let state = run.state()?;
        let loss = run.step(2)?;
        Ok((state, loss, local_bits(&run.part)))
    });
    summed(ranks)
}

#[test]
fn every_layout_resumes_from_every_other() {
    for (dtype, tied) in [(DType::F32, true), (DType::BF16, false)] {
        let chain = Chain {
            dtype,
            tied,
            fused: true,
            ..Chain::default()
        };
        let dirs = LAYOUTS.map(|_| tempdir().unwrap());
        for (i, dir) in dirs.iter().enumerate() {
            let (state, loss, bits) = save(chain, LAYOUTS[i], dir.path());
            for (j, other) in LAYOUTS.into_iter().enumerate() {
                let what = format!("{dtype:?} from {:?} to {other:?}", LAYOUTS[i]);
                let (loaded, next_loss, next_bits) = load(chain, other, dir.path());
                assert!(loaded == state, "{what}: the state differs");
                if i == j {
                    assert_eq!(next_loss, loss, "{what}");
                    assert!(next_bits == bits, "{what}: the next step's weights");
                }
                let tolerance = if dtype == DType::F32 { 1e-5 } else { 1e-2 };
                let error = (next_loss - loss).abs() / loss;
                assert!(error < tolerance, "{what}: {next_loss} {loss}");
            }
        }
    }
}

/// Over all files, each value of the model is there once.
#[test]
fn each_value_is_written_once() {
    for layout in LAYOUTS {
        let dir = tempdir().unwrap();
        let (state, ..) = save(Chain::default(), layout, dir.path());
        let num_values: usize = state.weights.values().map(Vec::len).sum();
        let files = crate::folder::read_folder(&dir.path().join("saves/step-000002"));
        let tensors = files.keys().filter(|name| name.ends_with(".safetensors"));
        let tensors = tensors.flat_map(|name| {
            crate::folder::read_file(&dir.path().join("saves/step-000002").join(name))
        });
        let mut num_bytes: BTreeMap<String, usize> = BTreeMap::new();
        for (name, _, _, bytes) in tensors {
            let kind = name.split(':').next().unwrap().to_string();
            *num_bytes.entry(kind).or_default() += bytes.len();
        }
        let kinds = ["exp_avg", "exp_avg_sq", "master"];
        let want = kinds.map(|kind| (kind.to_string(), 4 * num_values));
        assert_eq!(num_bytes, want.into(), "{layout:?}");
    }
}

/// Frozen parameters that no file has, and those to which a caller gave values, come from the checkpoint.
#[test]
fn refilled_and_frozen_parameters() {
    for (zero, dtype) in [
        (ZeroStage::Two, DType::F32),
        (ZeroStage::Three, DType::BF16),
    ] {
        let dir = tempdir().unwrap();
        let chain = Chain {
            dtype,
            ..Chain::default()
        };
        let run = |mesh: Mesh, seed: u64| -> Result<Run> {
            let store = ParamStore::init(seed).with_data_parallel(zero);
            let store = store.freeze(|name| name.contains("up.weight") || name.contains("embed"));
            let part = chain.part(&mesh, &store)?;
            let optimizer =
                DistributedOptimizer::adamw(part.params(), &mesh, AdamWConfig::default())?;
            Ok(Run {
                chain,
                mesh,
                part,
                optimizer,
            })
        };
        let saved = on_mesh((1, 2, 2), |mesh| {
            let mut run = run(mesh, 5)?;
            let params = run.part.params();
            // A frozen one, and one that is trained.
            for name in ["layers.1.up.weight", "layers.0.norm.weight"] {
                let index = params.iter().position(|param| param.name == name).unwrap();
                let param = params.get(index);
                let values = Tensor::full(0.25f32, param.local_shape(), &crate::device::device())?;
                params.refill(index, &values.to_dtype(dtype)?)?;
            }
            let mut saver = run.saver(dir.path(), 1)?;
            saver.start(&run.optimizer, 0, json!(null))?;
            saver.finish()?.unwrap().saved.unwrap();
            let weights = gather_weights(&run.part, &run.mesh)?;
            run.step(0)?;
            Ok((weights, gather_weights(&run.part, &run.mesh)?))
        });
        let loaded = on_mesh((2, 1, 1), |mesh| {
            let mut run = run(mesh, 6)?;
            run.open(&dir.path().join("step-000000"))?
                .load(&mut run.optimizer)?;
            let weights = gather_weights(&run.part, &run.mesh)?;
            run.step(0)?;
            Ok((weights, gather_weights(&run.part, &run.mesh)?))
        });
        assert!(loaded[0].0 == saved[0].0, "{zero:?}");
        for (name, values) in &loaded[0].1 {
            let want = &saved[0].1[name];
            let differ = values.iter().zip(want).any(|(a, b)| (a - b).abs() > 1e-3);
            assert!(!differ, "{zero:?} {name}");
        }
    }
}
