//! What layers say that stays in memory between their passes is what stays.

use candle_comm::launch::threads;
use candle_core::{DType, Device, Result, Tensor};
use candle_parallel::{
    ContextParallel, GradientSink, Head, Layer, LayerRanks, LoraConfig, ParamBuilder, ParamStore,
    Pass, Region, Tape, WeightGrad, WeightHalf, column_parallel_linear, row_parallel_linear,
    vocab_parallel_embedding, vocab_parallel_head,
};
use candle_train_models::{DecoderLayer, ModelConfig, RotaryTable};
use candle_train_run::rank_allocated_bytes;
use serde_json::json;

const SEQ_LEN: usize = 1024;
const VOCAB: usize = 96;
const HIDDEN: usize = 64;
const INTERMEDIATE: usize = 160;

/// Blocks that are smaller are not counted.
const SMALL: usize = 4096;

/// Keeps all gradients that are put.
#[derive(Default)]
struct Jobs {
    of_put: Vec<WeightGrad>,
    of_put_large: Vec<WeightGrad>,
    without_weights: bool,
}

impl GradientSink for Jobs {
    fn put(&mut self, weight: &Tensor, grad: WeightGrad) -> Result<()> {
        self.of_put.extend(weight.track_op().then_some(grad));
        Ok(())
    }

    fn put_large(&mut self, weight: &Tensor, grad: WeightGrad) -> Result<()> {
        self.of_put_large.extend(weight.track_op().then_some(grad));
        Ok(())
    }

    fn put_grad(&mut self, _weight: &Tensor, _grad: Tensor) -> Result<()> {
        Ok(())
    }

    fn weight_half(&self) -> WeightHalf {
        match self.without_weights {
            true => WeightHalf::LaterWithoutWeights,
            false => WeightHalf::Later,
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Case {
    dtype: DType,
    tp: usize,
    is_sequence_parallel: bool,
    /// Adapters are trained, and not the weights.
    has_adapters: bool,
}

impl Case {
    fn store(&self) -> Result<ParamStore> {
        let store = ParamStore::init(3);
        match self.has_adapters {
            false => Ok(store),
            true => store.with_lora(LoraConfig {
                rank: 8,
                ..LoraConfig::default()
            }),
        }
    }

    fn pass(&self) -> Result<Pass> {
        let tokens = Tensor::arange(0, SEQ_LEN as u32, &Device::Cpu)?;
        let tokens = (tokens.to_dtype(DType::F64)? * 7.0)?;
        let tokens = tokens.to_vec1::<f64>()?;
        let tokens: Vec<u32> = tokens.iter().map(|&id| id as u32 % VOCAB as u32).collect();
        let tokens = Tensor::from_vec(tokens, (1, SEQ_LEN), &Device::Cpu)?;
        Ok(Pass::train(tokens.clone(), tokens))
    }

    /// What a rank has of (1, t, width) outside of the region.
    fn values(&self, rows: usize, width: usize) -> Result<Tensor> {
        Tensor::randn(0f32, 1.0, (1, rows, width), &Device::Cpu)?.to_dtype(self.dtype)
    }
}

/// Bytes that are given back if `values` are dropped; what is made once, for whoever comes next, stays.
fn bytes_of<T>(values: T) -> usize {
    let before = rank_allocated_bytes();
    drop(values);
    usize::try_from(before - rank_allocated_bytes()).unwrap_or(0)
}

#[track_caller]
fn assert_said(what: &str, said: usize, kept: usize) {
    let said = said * SEQ_LEN;
    assert!(
        said.abs_diff(kept) < SMALL,
        "{what}: {said} said, {kept} kept"
    );
}

/// The jobs of a backward pass keep what the tape says.
fn assert_jobs(what: &str, said: Tape, backward: impl Fn(&mut Jobs) -> Result<()>) -> Result<()> {
    let mut jobs = Jobs::default();
    backward(&mut jobs)?;
    let large = bytes_of(std::mem::take(&mut jobs.of_put_large));
    assert_said(&format!("{what}: large"), said.waiting_large, large);
    let others = bytes_of(jobs);
    assert_said(&format!("{what}: not large"), said.waiting, others);
    let mut jobs = Jobs {
        without_weights: true,
        ..Jobs::default()
    };
    backward(&mut jobs)?;
    let all = said.waiting + said.waiting_large + said.waiting_without_weights;
    assert_said(&format!("{what}: without weights"), all, bytes_of(jobs));
    Ok(())
}

/// Of a layer from `input` to `output`, shapes as a rank has them outside.
fn assert_layer(
    what: &str,
    layer: &impl Layer,
    case: &Case,
    input: impl Fn() -> Result<Tensor>,
    output: impl Fn() -> Result<Tensor>,
) -> Result<()> {
    let what = format!("{what} {case:?}");
    let said = layer.tape().expect("each layer says it");
    let pass = case.pass()?;
    let saved = {
        let xs = input()?;
        let (_, saved) = layer.forward(&xs, &pass)?;
        saved
    };
    assert_said(&format!("{what}: the tape"), said.saved, bytes_of(saved));
    let of_input = bytes_of(input()?);
    assert_said(&format!("{what}: its input"), said.input, of_input);
    assert_jobs(&what, said, |jobs| {
        let xs = input()?;
        let (_, saved) = layer.forward(&xs, &pass)?;
        drop(xs);
        layer.backward(saved, &output()?, &pass, jobs)?;
        Ok(())
    })
}

fn assert_all(case: &Case) -> Result<()> {
    threads(case.tp, |world| {
        let vb = case.store()?.builder(case.dtype, &Device::Cpu);
        let region = match case.is_sequence_parallel {
            true => Region::sequence_parallel(&world),
            false => Region::from(&world),
        };
        let rows = region.own_rows(SEQ_LEN).len();
        let outside = || case.values(rows, HIDDEN);
        let own = INTERMEDIATE / case.tp;
        let inside = || case.values(SEQ_LEN, own);
        for bias in [false, true] {
            let vb = vb.pp(format!("linear{bias}"));
            let (up, down) = (vb.pp("up_proj"), vb.pp("down_proj"));
            let layer = column_parallel_linear(HIDDEN, INTERMEDIATE, bias, region.clone(), up)?;
            assert_layer("column", &layer, case, outside, inside)?;
            let layer = row_parallel_linear(INTERMEDIATE, HIDDEN, bias, region.clone(), down)?;
            assert_layer("row", &layer, case, inside, outside)?;
        }
        let pass = case.pass()?;
        let tokens = || Ok(pass.inputs().clone());
        let layer = vocab_parallel_embedding(VOCAB, HIDDEN, region.clone(), vb.pp("embed"))?;
        // The tokens are of the micro-batch.
        assert_layer("embedding", &layer, case, tokens, outside)?;
        assert_head(case, &region, vb.pp("lm_head"), outside)?;
        let ranks = LayerRanks {
            region,
            context: ContextParallel::none(&Device::Cpu),
        };
        for (family, activation) in [
            ("llama", "silu"),
            ("qwen2", "silu"),
            ("qwen3", "silu"),
            ("gemma", "gelu"),
        ] {
            let config = json!({
                "model_type": family, "hidden_act": activation, "vocab_size": VOCAB, "hidden_size": HIDDEN,
                "intermediate_size": INTERMEDIATE, "num_hidden_layers": 2, "num_attention_heads": 4,
                "num_key_value_heads": 2, "head_dim": 24, "max_position_embeddings": SEQ_LEN,
            });
            let config = ModelConfig::from_json(&config.to_string())?;
            let rotary = RotaryTable::new(&config, &Device::Cpu).into();
            let layer = DecoderLayer::new(&config, 0, rotary, &ranks, vb.pp(family))?;
            assert_layer(family, &layer, case, outside, outside)?;
        }
        Ok(())
    })
    .map(drop)
}

fn assert_head(
    case: &Case,
    region: &Region,
    vb: ParamBuilder,
    input: impl Fn() -> Result<Tensor>,
) -> Result<()> {
    let head = vocab_parallel_head(VOCAB, HIDDEN, region.clone(), vb)?;
    let said = head.tape().expect("it says it");
    assert_eq!(said.saved, said.input);
    let pass = case.pass()?;
    assert_jobs(&format!("head {case:?}"), said, |jobs| {
        head.loss(&input()?, &pass, jobs).map(drop)
    })
}

#[test]
fn layers_keep_what_they_say() -> Result<()> {
    for dtype in [DType::F32, DType::BF16] {
        for (tp, is_sequence_parallel) in [(1, false), (2, false), (2, true)] {
            for has_adapters in [false, true] {
                assert_all(&Case {
                    dtype,
                    tp,
                    is_sequence_parallel,
                    has_adapters,
                })?;
            }
        }
    }
    Ok(())
}
