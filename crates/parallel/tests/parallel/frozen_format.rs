//! Frozen weights in fewer bits, unpacked tile by tile, beside low-rank adapters.

use candle_comm::Mesh;
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Result, Tensor};
use candle_parallel::checkpoint::{CheckpointSaver, TrainingCheckpoint};
use candle_parallel::{
    AdamWConfig, ColumnParallelLinear, DataParallel, DistributedOptimizer, Gradients, Layer,
    LoraConfig, Loss, MemoryCategory, ModelPart, ParamStore, Pass, Pipeline, PlainBlock, PlainHead,
    RowParallelLinear, Schedule, Shard, WEIGHT_INIT, WeightFormat, ZeroStage,
    column_parallel_linear, layer_block, plain_block, plain_head, row_parallel_linear,
    vocab_parallel_cross_entropy, vocab_parallel_embedding,
};

use crate::check::{assert_says, message, on_mesh};

const VOCAB: usize = 37;
const HIDDEN: usize = 256;
const INNER: usize = 512;

struct Mlp(ColumnParallelLinear, RowParallelLinear);

impl PlainBlock for Mlp {
    fn forward(&self, xs: &Tensor, pass: &Pass) -> Result<Tensor> {
        xs + self.1.apply(&self.0.apply(xs, pass)?.gelu()?, pass)?
    }
}

struct Head(ColumnParallelLinear, Shard, Mesh);

impl PlainHead for Head {
    fn loss(&self, xs: &Tensor, pass: &Pass) -> Result<Loss> {
        let logits = self.0.apply(xs, pass)?.flatten_to(1)?;
        let targets = pass.targets()?.flatten_all()?;
        let losses = vocab_parallel_cross_entropy(&logits, &targets, &self.1, &self.2.tp)?;
        Ok(Loss::new(losses.sum_all()?, pass.num_targets()? as f64))
    }
}

fn part(mesh: &Mesh, store: &ParamStore) -> Result<ModelPart> {
    let vb = store.builder(DType::F32, mesh.world.device());
    ModelPart::build(mesh, &vb, 4, HIDDEN, |index, vb| {
        let vb = vb.pp("blocks").pp(index);
        Ok(match index {
            0 => layer_block(vocab_parallel_embedding(VOCAB, HIDDEN, &mesh.tp, vb)?),
            1 | 2 => plain_block(Mlp(
                column_parallel_linear(HIDDEN, INNER, true, &mesh.tp, vb.pp("up"))?,
                row_parallel_linear(INNER, HIDDEN, true, &mesh.tp, vb.pp("down"))?,
            )),
            _ => plain_head(Head(
                column_parallel_linear(HIDDEN, VOCAB, false, &mesh.tp, vb)?,
                Shard::even(0, VOCAB, &mesh.tp)?,
                mesh.clone(),
            )),
        })
    })
}

fn store() -> ParamStore {
    let lora = LoraConfig {
        rank: 3,
        ..LoraConfig::default()
    };
    ParamStore::init(5).with_lora(lora).unwrap()
}

/// The losses and norms of three steps.
fn trained(mesh: &Mesh, part: &ModelPart) -> Result<Vec<(f64, f64)>> {
    let pipeline = Pipeline::new(Schedule::OneForwardOneBackward, mesh);
    let mut gradients = Gradients::new(part.params(), mesh)?;
    let config = AdamWConfig::default();
    let mut optimizer = DistributedOptimizer::adamw(part.params(), mesh, config)?;
    let tokens = Tensor::arange(0u32, 24, &Device::Cpu)?.reshape((3, 8))?;
    let targets = Tensor::arange(11u32, 35, &Device::Cpu)?.reshape((3, 8))?;
    let batch = Pass::train(tokens, targets);
    let step = |_| {
        pipeline.forward_backward(part, std::slice::from_ref(&batch), &mut gradients)?;
        let report = optimizer.step(&mut gradients, 3e-2, Some(1.0))?;
        Ok((report.loss.mean, report.grad_norm))
    };
    (0..3).map(step).collect()
}

/// What these values become in a form of their own.
fn rounded(values: &Tensor, form: GgmlDType) -> Result<Tensor> {
    let blocks = QTensor::quantize(&values.to_device(&Device::Cpu)?, form)?;
    blocks.dequantize(&Device::Cpu)?.to_device(values.device())
}

#[test]
fn blocks_train_as_the_values_that_they_stand_for() {
    for (format, blocks) in [
        (WeightFormat::Q4K, GgmlDType::Q4K),
        (WeightFormat::Q8_0, GgmlDType::Q8_0),
    ] {
        let reference = on_mesh((1, 1, 1), |mesh| {
            let part = part(&mesh, &store())?;
            let params = part.params();
            for (index, param) in params.iter().enumerate() {
                let is_weight = !param.is_adapter && param.global_shape.rank() == 2;
                let is_inner = param.blocks.iter().all(|block| [1, 2].contains(block));
                let form = if is_inner { blocks } else { GgmlDType::BF16 };
                if is_weight {
                    params.refill(index, &rounded(&param.values()?, form)?)?;
                }
            }
            trained(&mesh, &part)
        });
        for (layout, zero, tile_linears) in [
            ((1, 1, 1), ZeroStage::One, 1),
            ((1, 1, 2), ZeroStage::One, 1),
            ((2, 1, 2), ZeroStage::One, 1),
            ((1, 2, 1), ZeroStage::Three, 1),
            ((1, 2, 2), ZeroStage::Three, 3),
        ] {
            let ranks = on_mesh(layout, |mesh| {
                let replicas = DataParallel {
                    tile_linears,
                    quantize_weights: false,
                    ..zero.into()
                };
                let store = store()
                    .with_data_parallel(replicas)
                    .with_frozen_format(format);
                trained(&mesh, &part(&mesh, &store)?)
            });
            for (ours, expected) in ranks[0].iter().zip(&reference[0]) {
                // Losses and gradients as everywhere; AdamW has amplified both by its second and third step.
                let close = |a: f64, b: f64, bound: f64| (a - b).abs() <= bound * b.abs();
                let what = format!("{format:?} {layout:?} {zero:?}: {ours:?} {expected:?}");
                assert!(
                    close(ours.0, expected.0, 1e-5) && close(ours.1, expected.1, 1e-4),
                    "{what}"
                );
            }
        }
    }
}

#[test]
fn a_rank_holds_the_bits_of_the_form_and_no_gradient_of_the_base() {
    let bytes = |format| {
        on_mesh((1, 1, 1), |mesh| {
            let part = part(&mesh, &store().with_frozen_format(format))?;
            trained(&mesh, &part)?;
            let report = part.params().meter().report();
            let of = |category| report.of(category).peak as usize;
            let optimizer = of(MemoryCategory::Optimizer);
            assert_eq!(of(MemoryCategory::Gradients) * 2, optimizer);
            Ok((of(MemoryCategory::Weights), optimizer))
        })[0]
    };
    let adapters = 2 * 2 * 3 * (HIDDEN + INNER);
    let biases = 2 * (HIDDEN + INNER);
    let (outer, inner) = (2 * VOCAB * HIDDEN, 4 * HIDDEN * INNER);
    let floats = 4 * (adapters + biases);
    let (weights, optimizer) = bytes(WeightFormat::Q4K);
    // 4.5 bits a value in the blocks between the first and the last, 16 in those.
    assert_eq!(weights, inner * 9 / 16 + 2 * outer + floats);
    // Two moments of the adapters alone; slices are padded.
    assert!(
        (8 * adapters..8 * adapters + 4096).contains(&optimizer),
        "{optimizer}"
    );
    assert_eq!(
        bytes(WeightFormat::Q8_0).0,
        inner * 17 / 16 + 2 * outer + floats
    );
    assert_eq!(bytes(WeightFormat::BF16).0, 2 * inner + 2 * outer + floats);
    assert_eq!(bytes(WeightFormat::F32).0, 4 * inner + 4 * outer + floats);
}

#[test]
fn a_large_weight_is_unpacked_in_several_tiles() {
    let store = ParamStore::init(3)
        .freeze(|_| true)
        .with_frozen_format(WeightFormat::F16);
    let vb = store.builder(DType::F32, &Device::Cpu);
    let (rows, columns) = (1500, 4096);
    let all = 0..rows;
    let shard = Shard::new(0, all.clone(), rows);
    let weight = vb
        .get_tiled((rows, columns), "weight", shard, WEIGHT_INIT)
        .unwrap();
    assert_eq!(weight.dims2().unwrap(), (rows, columns));
    let mut seen = Vec::new();
    let held = weight.tensor().to_dtype(DType::F32).unwrap();
    weight
        .for_each_tile(|tile_rows, tile| {
            assert_eq!(tile.dims2()?, (tile_rows.len(), columns));
            let part = held.narrow(0, tile_rows.start, tile_rows.len())?;
            let difference = (tile - part)?.abs()?.max_all()?.to_scalar::<f32>()?;
            assert_eq!(difference, 0.0);
            seen.push(tile_rows);
            Ok(())
        })
        .unwrap();
    assert_eq!(seen, [0..1024, 1024..rows]);
}

#[test]
fn blocks_that_a_layout_cuts_are_refused() {
    let refused = on_mesh((1, 1, 4), |mesh| {
        let store = store().with_frozen_format(WeightFormat::Q4K);
        Ok(message(part(&mesh, &store)))
    });
    assert_says(
        &refused[0],
        &[
            "down.weight",
            "columns 0..128 of 512",
            "blocks of 256",
            "hint",
        ],
    );
}

/// A base that began as random numbers is in a checkpoint, and nowhere else.
#[test]
fn a_random_base_in_blocks_is_neither_lost_nor_misread() {
    let dir = tempfile::tempdir().unwrap();
    let optimizer = |mesh: &Mesh, seed, format| {
        let lora = LoraConfig {
            rank: 3,
            ..LoraConfig::default()
        };
        let store = ParamStore::init(seed).with_lora(lora)?;
        let store = match format {
            Some(format) => store.with_frozen_format(format),
            None => store,
        };
        let part = part(mesh, &store)?;
        let optimizer = DistributedOptimizer::adamw(part.params(), mesh, AdamWConfig::default())?;
        Ok::<_, candle_core::Error>((part, optimizer))
    };
    on_mesh((1, 1, 1), |mesh| {
        let save = |name: &str, format| {
            let (_, optimizer) = optimizer(&mesh, 5, format)?;
            let folder = dir.path().join(name);
            let mut saver = CheckpointSaver::new(&mesh.world, &folder, 1, None)?;
            saver.start(&optimizer, 1, serde_json::Value::Null)?;
            Ok::<_, candle_core::Error>(saver.finish()?.unwrap().saved)
        };
        for format in [WeightFormat::Q8_0, WeightFormat::BF16] {
            let said = save("packed", Some(format))?.unwrap_err();
            assert_says(
                &said,
                &["weight is held as ", "no file has its values", "hint"],
            );
        }
        let whole = save("whole", None)?.unwrap();
        let checkpoint = TrainingCheckpoint::open(&mesh.world, &whole)?;
        let (_, mut in_blocks) = optimizer(&mesh, 6, Some(WeightFormat::Q4K))?;
        let said = message(checkpoint.load(&mut in_blocks));
        assert_says(&said, &["frozen parameter", "in blocks (q4k)", "hint"]);
        // In 16 bits they are rounded.
        let (want, _) = optimizer(&mesh, 5, Some(WeightFormat::BF16))?;
        let (ours, mut narrow) = optimizer(&mesh, 6, Some(WeightFormat::BF16))?;
        checkpoint.load(&mut narrow)?;
        for (ours, want) in ours.params().iter().zip(want.params().iter()) {
            let difference = (ours.values()? - want.values()?)?.abs()?.flatten_all()?;
            let largest = difference.max_all()?.to_dtype(DType::F32)?;
            assert_eq!(largest.to_scalar::<f32>()?, 0.0, "{}", ours.name);
        }
        Ok(())
    });
}
