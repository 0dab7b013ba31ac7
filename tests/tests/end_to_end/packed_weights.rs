//! Weights that stay packed for products: the same bits, on all layouts and whatever changes them.

use candle_comm::launch::threads;
use candle_comm::{Degrees, Mesh, ProcessGroup};
use candle_core::{DType, Device, Result, Tensor};
use candle_ops::PackedWeight;
use candle_parallel::checkpoint::{CheckpointSaver, TrainingCheckpoint};
use candle_parallel::{
    AdamWConfig, DistributedOptimizer, LoraConfig, LossScaling, MemoryCategory, ModelPart,
    PackWeights, ParamStore, Pass, Pipeline, PipelineLayout, Recompute, Schedule, ZeroStage,
};
use candle_train_models::{CausalLm, ModelConfig, PartConfig};
use candle_trainer::{LrDecay, LrSchedule, TrainConfig, Trainer};
use serde_json::json;

use crate::pairwise::Random;

const VOCAB: usize = 96;
/// More than [`candle_ops`] multiplies row by row, and no multiple of a tile's.
const SEQ_LEN: usize = 37;

#[derive(Clone, Copy, Debug)]
struct Case {
    degrees: Degrees,
    zero: ZeroStage,
    is_tied: bool,
    has_lora: bool,
    recompute: Recompute,
    /// Of each rank.
    num_stages: usize,
    dtype: DType,
}

/// What came of training.
struct Trained {
    losses: Vec<u64>,
    /// Of each parameter.
    bits: Vec<Vec<u32>>,
    has_packed: bool,
}

impl Case {
    /// One rank that trains everything.
    fn plain(dtype: DType) -> Self {
        Self {
            degrees: Degrees::default(),
            zero: ZeroStage::One,
            is_tied: false,
            has_lora: false,
            recompute: Recompute::None,
            num_stages: 1,
            dtype,
        }
    }

    fn config(&self) -> Result<ModelConfig> {
        let config = json!({
            "model_type": "llama", "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 120,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "tie_word_embeddings": self.is_tied,
        });
        ModelConfig::from_json(&config.to_string())
    }

    fn batches(seed: usize) -> Result<Vec<Pass>> {
        let mut random = Random::new(seed);
        let mut tokens = || {
            let tokens = (0..SEQ_LEN).map(|_| random.below(VOCAB) as u32);
            Tensor::from_vec(tokens.collect::<Vec<_>>(), (1, SEQ_LEN), &Device::Cpu)
        };
        (0..3)
            .map(|_| Ok(Pass::train(tokens()?, tokens()?)))
            .collect()
    }

    /// Two steps, an evaluation, weights from elsewhere, a step and an evaluation: of each rank.
    fn trained(&self, pack_weights: PackWeights) -> Result<Vec<Trained>> {
        let num_ranks = self.degrees.world_size().unwrap_or(0);
        threads(num_ranks, |world| {
            let mesh = Mesh::new(world, self.degrees)?;
            let mut store = ParamStore::init(5).with_data_parallel(self.zero);
            if self.has_lora {
                store = store.with_lora(LoraConfig {
                    rank: 4,
                    ..LoraConfig::default()
                })?;
            }
            let store = store.with_packed_weights(pack_weights);
            let vb = store.builder(self.dtype, &Device::Cpu);
            let schedule = Schedule::OneForwardOneBackward;
            let stages = schedule.placement(self.degrees.pp, self.num_stages)?;
            let layers = vec![2 / stages.len(); stages.len()];
            let parts = PartConfig {
                layout: Some(PipelineLayout::of_layers(&layers, &stages)?),
                ..PartConfig::default()
            };
            let part = CausalLm::part_with(&self.config()?, &mesh, &vb, parts)?;
            let part = part.with_recompute(|_| self.recompute);
            let config = TrainConfig {
                lr_schedule: LrSchedule {
                    lr: 1e-2,
                    min_lr_ratio: 1.0,
                    warmup_steps: 0,
                    num_steps: 3,
                    decay: LrDecay::Cosine,
                    ramp: Vec::new(),
                },
                adamw: AdamWConfig::default(),
                max_grad_norm: Some(1.0),
                loss_scaling: LossScaling::default(),
                schedule,
                pipeline_prefetch: 1,
            };
            let mut trainer = Trainer::new(config, &mesh, part)?;
            let mut losses = Vec::new();
            for step in 0..3 {
                let batches = Self::batches(10 * step + mesh.dp.rank())?;
                losses.push(trainer.train_step(&batches)?.loss.to_bits());
                // Updates of the first step arrive in the passes of the second one.
                if step == 0 {
                    continue;
                }
                let params = trainer.part().params();
                params.wait_for_updates()?;
                let pipeline = Pipeline::new(schedule, &mesh);
                let held_out = Self::batches(99)?.into_iter().map(Ok);
                let sums = pipeline.evaluate(trainer.part(), held_out)?;
                losses.push(sums.loss().to_bits());
                if step == 1 && self.zero != ZeroStage::Three {
                    for index in 0..params.len() {
                        let half = (params.values(index)? * 0.5)?;
                        params.refill(index, &half)?;
                    }
                }
            }
            let params = trainer.part().params();
            let bits = (0..params.len()).map(|index| {
                let values = params.values(index)?.flatten_all()?.to_dtype(DType::F32)?;
                let values = values.to_vec1::<f32>()?;
                Ok(values.into_iter().map(f32::to_bits).collect())
            });
            Ok(Trained {
                losses,
                bits: bits.collect::<Result<_>>()?,
                has_packed: trainer.memory().of(MemoryCategory::Packed).peak > 0,
            })
        })
    }
}

#[test]
fn packed_weights_leave_training_as_it_is() -> Result<()> {
    let degrees = |pp, dp, tp| Degrees { pp, dp, tp, cp: 1 };
    let plain = Case::plain(DType::BF16);
    let cases = [
        plain,
        Case {
            is_tied: true,
            recompute: Recompute::Full,
            dtype: DType::F32,
            ..plain
        },
        Case {
            degrees: degrees(1, 2, 1),
            is_tied: true,
            ..plain
        },
        Case {
            degrees: degrees(2, 1, 2),
            is_tied: true,
            dtype: DType::F32,
            ..plain
        },
        Case {
            degrees: degrees(1, 2, 1),
            zero: ZeroStage::Two,
            recompute: Recompute::Full,
            ..plain
        },
        Case {
            degrees: degrees(1, 2, 1),
            zero: ZeroStage::Three,
            ..plain
        },
        Case {
            num_stages: 2,
            dtype: DType::F16,
            ..plain
        },
        Case {
            has_lora: true,
            ..plain
        },
        Case {
            has_lora: true,
            is_tied: true,
            recompute: Recompute::Full,
            dtype: DType::F16,
            ..plain
        },
        Case {
            degrees: degrees(2, 1, 2),
            has_lora: true,
            is_tied: true,
            ..plain
        },
        Case {
            degrees: degrees(2, 2, 1),
            has_lora: true,
            dtype: DType::F32,
            ..plain
        },
    ];
    for case in cases {
        let want = case.trained(PackWeights::Off)?;
        assert!(want.iter().all(|rank| !rank.has_packed), "{case:?}");
        let can = PackedWeight::num_bytes((64, 64), case.dtype) > 0;
        for which in [PackWeights::Frozen, PackWeights::All] {
            let got = case.trained(which)?;
            let packs = can
                && case.zero != ZeroStage::Three
                && (case.has_lora || which == PackWeights::All);
            for (got, want) in got.iter().zip(&want) {
                assert!(got.losses == want.losses, "{which:?}: {case:?}");
                assert!(got.bits == want.bits, "{which:?}: {case:?}");
                assert_eq!(got.has_packed, packs, "{which:?}: {case:?}");
            }
        }
    }
    Ok(())
}

/// The loss of some batches.
fn evaluated(part: &ModelPart, mesh: &Mesh) -> Result<f64> {
    let pipeline = Pipeline::new(Schedule::OneForwardOneBackward, mesh);
    let sums = pipeline.evaluate(part, Case::batches(1)?.into_iter().map(Ok))?;
    Ok(sums.loss())
}

/// Frozen weights that a checkpoint brings take the place of those that were packed.
#[test]
fn a_checkpoint_brings_frozen_weights() -> Result<()> {
    checkpoint_brings_frozen_weights(DType::F32)?;
    checkpoint_brings_frozen_weights(DType::BF16)
}

fn checkpoint_brings_frozen_weights(dtype: DType) -> Result<()> {
    let case = Case::plain(dtype);
    let mesh = Mesh::new(ProcessGroup::single(Device::Cpu), case.degrees)?;
    let make = |seed, pack_weights| -> Result<(ModelPart, DistributedOptimizer)> {
        let store = ParamStore::init(seed).freeze(|name| name.contains("proj"));
        let vb = store
            .with_packed_weights(pack_weights)
            .builder(case.dtype, &Device::Cpu);
        let part = CausalLm::part_with(&case.config()?, &mesh, &vb, PartConfig::default())?;
        let optimizer = DistributedOptimizer::adamw(part.params(), &mesh, AdamWConfig::default())?;
        Ok((part, optimizer))
    };
    let loss = |part: &ModelPart| evaluated(part, &mesh).map(f64::to_bits);
    let dir = tempfile::tempdir().unwrap();
    let (part, optimizer) = make(5, PackWeights::Off)?;
    let want = loss(&part)?;
    let mut saver = CheckpointSaver::new(&mesh.world, &dir.path().join("saves"), 1, None)?;
    saver.start(&optimizer, 1, json!({}))?;
    let saved = saver.finish()?.expect("a save was under way");
    let saved = saved.saved.unwrap();
    for pack_weights in [PackWeights::Off, PackWeights::Frozen] {
        let (part, mut optimizer) = make(6, pack_weights)?;
        assert_ne!(loss(&part)?, want);
        TrainingCheckpoint::open(&mesh.world, &saved)?.load(&mut optimizer)?;
        assert_eq!(loss(&part)?, want, "{pack_weights:?}");
    }
    Ok(())
}

/// What was packed is not used for values that have left memory, nor for others that came in their place.
#[test]
fn frozen_weights_leave_and_come_back_beside_what_is_packed() -> Result<()> {
    let case = Case::plain(DType::BF16);
    let mesh = Mesh::new(ProcessGroup::single(Device::Cpu), case.degrees)?;
    let store = ParamStore::init(5).freeze(|name| name.contains("proj"));
    let store = store.with_packed_weights(PackWeights::Frozen);
    let vb = store.builder(case.dtype, &Device::Cpu);
    let part = CausalLm::part_with(&case.config()?, &mesh, &vb, PartConfig::default())?;
    let loss = || evaluated(&part, &mesh).map(f64::to_bits);
    let (want, params) = (loss()?, part.params());
    let of_block: Vec<(usize, Tensor)> = (params.iter().enumerate())
        .filter(|(_, param)| param.blocks == [1])
        .map(|(index, param)| Ok((index, param.values()?.copy()?)))
        .collect::<Result<_>>()?;
    params.release(1, &[])?;
    assert!(loss().is_err());
    for (index, values) in &of_block {
        params.refill(*index, &values.zeros_like()?)?;
    }
    assert_ne!(loss()?, want);
    for (index, values) in &of_block {
        params.refill(*index, values)?;
    }
    assert_eq!(loss()?, want);
    Ok(())
}
