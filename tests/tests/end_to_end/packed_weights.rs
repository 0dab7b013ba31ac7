//! Weights that stay packed for products: the same bits, on all layouts and whatever changes them.

use candle_comm::launch::threads;
use candle_comm::{Degrees, Mesh, ProcessGroup, message_of};
use candle_core::{DType, Device, Result, Tensor};
use candle_ops::PackedWeight;
use candle_parallel::checkpoint::{CheckpointSaver, TrainingCheckpoint};
use candle_parallel::{
    AdamWConfig, ColumnParallelLinear, DistributedOptimizer, Layer, LoraConfig, Loss, LossScaling,
    MemoryCategory, ModelPart, PackWeights, ParamStore, Pass, Pipeline, PipelineLayout, PlainBlock,
    PlainHead, Recompute, Schedule, Shard, WEIGHT_INIT, ZeroStage, column_parallel_linear,
    plain_block, plain_head,
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
    /// Bytes of weights after a step.
    weights: u64,
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
            let memory = trainer.memory();
            Ok(Trained {
                losses,
                bits: bits.collect::<Result<_>>()?,
                has_packed: memory.of(MemoryCategory::Packed).peak > 0,
                weights: memory.of(MemoryCategory::Weights).now,
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
            // Frozen ones are nowhere else.
            let less = packs && case.has_lora && PackedWeight::can_hold(case.dtype);
            for (got, want) in got.iter().zip(&want) {
                assert!(got.losses == want.losses, "{which:?}: {case:?}");
                assert!(got.bits == want.bits, "{which:?}: {case:?}");
                assert_eq!(got.has_packed, packs, "{which:?}: {case:?}");
                assert_eq!(got.weights < want.weights, less, "{which:?}: {case:?}");
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

/// What is only in the order of products is read, freed, put back and asked for by others like everything else.
#[test]
fn frozen_weights_that_stay_packed_are_parameters_like_others() -> Result<()> {
    let case = Case::plain(DType::BF16);
    let mesh = Mesh::new(ProcessGroup::single(Device::Cpu), case.degrees)?;
    let config = case.config()?;
    let name = "model.layers.0.mlp.gate_proj.weight";
    let build = |pack_weights| -> Result<(ParamStore, ModelPart)> {
        let store = ParamStore::init(5).freeze(|name| name.contains("proj"));
        let store = store.with_packed_weights(pack_weights);
        let vb = store.builder(case.dtype, &Device::Cpu);
        let part = CausalLm::part_with(&config, &mesh, &vb, PartConfig::default())?;
        Ok((store, part))
    };
    let loss = |part: &ModelPart| evaluated(part, &mesh).map(f64::to_bits);
    let (_, plain) = build(PackWeights::Off)?;
    let (store, part) = build(PackWeights::Frozen)?;
    let (want, params) = (loss(&plain)?, part.params());
    let of = |part: &ModelPart, category| part.params().meter().report().of(category).now;
    let holds = PackedWeight::can_hold(case.dtype);
    let is_less = of(&part, MemoryCategory::Weights) < of(&plain, MemoryCategory::Weights);
    assert_eq!(is_less, holds);
    let index = params.iter().position(|param| param.name == name).unwrap();
    let values = params.values(index)?;
    let bits = |values: &Tensor| -> Result<Vec<f32>> {
        values.flatten_all()?.to_dtype(DType::F32)?.to_vec1::<f32>()
    };
    assert_eq!(bits(&values)?, bits(&plain.params().values(index)?)?);
    assert_eq!(loss(&part)?, want);

    let packed = of(&part, MemoryCategory::Packed);
    let of_block: Vec<(usize, Tensor)> = (params.iter().enumerate())
        .filter(|(_, param)| param.blocks == [1])
        .map(|(index, _)| Ok((index, params.values(index)?.copy()?)))
        .collect::<Result<_>>()?;
    params.release(1, &[])?;
    let error = params.values(index).unwrap_err().to_string();
    assert!(error.contains("are not in memory"), "{error}");
    assert!(loss(&part).is_err());
    assert_eq!(of(&part, MemoryCategory::Packed) < packed, packed > 0);
    for (index, values) in &of_block {
        params.refill(*index, values)?;
    }
    assert_eq!(loss(&part)?, want);
    assert_eq!(of(&part, MemoryCategory::Packed), packed);

    // By something that reads the values.
    let vb = store.builder(case.dtype, &Device::Cpu);
    let vb = vb.pp("model.layers.0.mlp.gate_proj").tied();
    let (num_out, num_in) = values.dims2()?;
    let shard = Shard::even(0, num_out, &mesh.tp)?;
    let asked = vb.get_placed((num_out, num_in), "weight", shard, WEIGHT_INIT)?;
    assert_eq!(bits(&asked)?, bits(&values)?);
    assert_eq!(loss(&part)?, want);
    assert_eq!(bits(&params.values(index)?)?, bits(&values)?);
    Ok(())
}

const WIDTH: usize = 64;

/// A block that reads the values of its linear layer's weight, or multiplies with it.
struct Reading {
    linear: ColumnParallelLinear,
    reads: bool,
}

impl PlainBlock for Reading {
    fn forward(&self, tokens: &Tensor, pass: &Pass) -> Result<Tensor> {
        let xs = tokens.to_dtype(DType::BF16)?.unsqueeze(2)?;
        let xs = xs.repeat((1, 1, WIDTH))?;
        match self.reads {
            true => xs.broadcast_matmul(&self.linear.weight().t()?),
            false => Ok(self.linear.forward(&xs, pass)?.0),
        }
    }
}

struct Scaled(Tensor);

impl PlainHead for Scaled {
    fn loss(&self, xs: &Tensor, pass: &Pass) -> Result<Loss> {
        let sum = xs.broadcast_mul(&self.0)?.to_dtype(DType::F32)?.sqr()?;
        Ok(Loss::new(sum.sum_all()?, pass.num_targets()? as f64))
    }
}

/// Values that a layer does not find have an error that says why.
#[test]
fn a_block_that_reads_a_weight_that_stays_packed() -> Result<()> {
    let mesh = Mesh::new(ProcessGroup::single(Device::Cpu), Degrees::default())?;
    let run = |reads, pack_weights| -> Result<f64> {
        let store = ParamStore::init(5).freeze(|name| name.contains("up"));
        let store = store.with_packed_weights(pack_weights);
        let vb = store.builder(DType::BF16, &Device::Cpu);
        let part = ModelPart::build(&mesh, &vb, 2, WIDTH, |index, vb| {
            Ok(match index {
                0 => plain_block(Reading {
                    linear: column_parallel_linear(WIDTH, WIDTH, false, &mesh.tp, vb.pp("up"))?,
                    reads,
                }),
                _ => plain_head(Scaled(vb.get(WIDTH, "scale", candle_nn::init::ONE)?)),
            })
        })?;
        evaluated(&part, &mesh)
    };
    for pack_weights in [PackWeights::Off, PackWeights::Frozen] {
        run(false, pack_weights)?;
    }
    run(true, PackWeights::Off)?;
    let read = run(true, PackWeights::Frozen);
    match PackedWeight::can_hold(DType::BF16) {
        false => drop(read?),
        true => {
            let error = message_of(&read.unwrap_err());
            let said = "perhaps of up.weight: a frozen weight of a linear layer stays packed, and is nowhere else\nhint: ";
            assert!(error.contains(said), "{error}");
        }
    }
    Ok(())
}
