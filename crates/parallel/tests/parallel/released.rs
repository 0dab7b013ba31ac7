//! Weights that leave memory and come back behind the tensors that layers captured.

use candle_core::{DType, Module, Result, Tensor};
use candle_nn::Linear;
use candle_parallel::{
    AdamWConfig, Block, DistributedOptimizer, Gradients, MemoryCategory, MicroBatch, ParamBuilder,
    ParamStore, Pipeline, PlainBlock, Schedule, Stage, plain_block,
};

use crate::chain::{Chain, HIDDEN, local_bits};
use crate::check::{assert_says, message, single_mesh};
use crate::device::device;

/// candle_nn's own layer inside a user's block.
struct Plain(Linear);

impl PlainBlock for Plain {
    fn forward(&self, xs: &Tensor, _batch: &MicroBatch) -> Result<Tensor> {
        xs + self.0.forward(xs)?.tanh()?
    }
}

fn stage(dtype: DType) -> Result<(Stage, Linear)> {
    let (chain, mesh) = (
        Chain {
            dtype,
            ..Chain::default()
        },
        single_mesh(),
    );
    let vb = ParamStore::init(5).builder(dtype, &device());
    let mut kept = std::cell::RefCell::new(None);
    let build = |index, vb: ParamBuilder| -> Result<Box<dyn Block>> {
        if index != 2 {
            return chain.block(index, &mesh.tp, &vb);
        }
        let linear = candle_nn::linear(HIDDEN, HIDDEN, vb.pp("plain").var_builder())?;
        kept.replace(Some(linear.clone()));
        Ok(plain_block(Plain(linear)))
    };
    let stage = Stage::build(&mesh, &vb, chain.num_blocks(), HIDDEN, build)?;
    Ok((stage, kept.get_mut().take().unwrap()))
}

/// Bits of the weights after steps in which each block's weights leave and come back, if they are to.
fn trained(dtype: DType, moves: bool) -> Result<std::collections::BTreeMap<String, Vec<u32>>> {
    let mesh = single_mesh();
    let (stage, _) = stage(dtype)?;
    let mut optimizer = DistributedOptimizer::adamw(stage.params(), &mesh, AdamWConfig::default())?;
    let mut gradients = Gradients::new(stage.params(), &mesh)?;
    let pipeline = Pipeline::new(Schedule::OneForwardOneBackward, &mesh);
    let chain = Chain::default();
    for step in 0..3 {
        let batches = chain.micro_batches(step, 2)?;
        pipeline.forward_backward(&stage, &batches, &mut gradients)?;
        optimizer.step(&mut gradients, 0.01, None)?;
        for block in stage.block_indices().filter(|_| moves) {
            let params = stage.params();
            let of_block = |index: &usize| params.get(*index).blocks.contains(&block);
            let indices: Vec<usize> = (0..params.len()).filter(of_block).collect();
            let copies = indices
                .iter()
                .map(|&index| params.get(index).values()?.copy());
            let copies = copies.collect::<Result<Vec<_>>>()?;
            params.release(block, &[])?;
            for (&index, copy) in indices.iter().zip(&copies) {
                assert!(!params.get(index).is_present());
                params.refill(index, copy)?;
            }
        }
    }
    Ok(local_bits(&stage))
}

#[test]
fn training_goes_on_with_the_same_bits() -> Result<()> {
    for dtype in [DType::F32, DType::BF16] {
        assert!(trained(dtype, true)? == trained(dtype, false)?, "{dtype:?}");
    }
    Ok(())
}

#[test]
fn a_released_weight_is_an_error_that_names_it() -> Result<()> {
    let (stage, linear) = stage(DType::F32)?;
    let params = stage.params();
    let copy = params.get(0).values()?.copy()?;
    assert_eq!(params.get(0).name, "embed.weight");
    params.release(0, &[])?;
    params.release(2, &[])?;
    // Through the parameter, through the stage, and through the layer that captured it.
    assert_says(
        &message(params.get(0).values()),
        &["embed.weight", "released"],
    );
    let batch = MicroBatch {
        targets: None,
        documents: None,
        past: None,
        ..Chain::default().micro_batches(1, 1)?.remove(0)
    };
    let said = message(stage.infer(None, &batch));
    assert_says(&said, &["block 0", "embed.weight", "released", "hint"]);
    let xs = Tensor::ones((2, HIDDEN), DType::F32, &device())?;
    message(linear.forward(&xs));
    message(linear.weight().to_vec2::<f32>());
    message(linear.weight().sum_all());
    message(linear.weight() + 1.0);
    params.refill(0, &copy)?;
    let said = message(stage.infer(None, &batch));
    assert_says(&said, &["block 2", "plain", "released"]);
    Ok(())
}

#[test]
fn a_tied_weight_stays_and_counts_while_a_block_needs_it() -> Result<()> {
    let chain = Chain {
        tied: true,
        ..Chain::default()
    };
    let stage = chain.stage(&single_mesh(), &ParamStore::init(5))?;
    let params = stage.params();
    let held = || params.meter().report().of(MemoryCategory::Weights).now;
    let all: usize = params.iter().map(|param| param.num_bytes()).sum();
    let copy = params.get(0).values()?.copy()?;
    params.release(0, &[4])?;
    assert!(params.get(0).is_present());
    assert_eq!(held(), all as u64);
    params.release(0, &[])?;
    assert!(!params.get(0).is_present());
    assert_eq!(held(), (all - params.get(0).num_bytes()) as u64);
    params.refill(0, &copy)?;
    assert_eq!(held(), all as u64);
    Ok(())
}

#[test]
fn values_that_do_not_fit_are_refused() -> Result<()> {
    let (stage, _) = stage(DType::F32)?;
    let params = stage.params();
    let values = params.get(0).values()?;
    let said = message(params.refill(0, &values.to_dtype(DType::BF16)?));
    assert_says(&said, &["embed.weight", "BF16", "expected F32"]);
    let said = message(params.refill(0, &values.narrow(0, 0, 2)?));
    assert_says(&said, &["embed.weight", "[2, 6]", "[13, 6]"]);
    // A view is copied, without what it leaves out.
    let twice = Tensor::cat(&[&values, &values], 0)?;
    params.refill(0, &twice.narrow(0, 13, 13)?)?;
    assert_eq!(
        params.get(0).values()?.to_vec2::<f32>()?,
        twice.narrow(0, 13, 13)?.to_vec2::<f32>()?
    );
    Ok(())
}

#[test]
fn a_weight_that_was_released_before_the_backward_pass_is_named_there() -> Result<()> {
    let (stage, mesh) = (stage(DType::F32)?.0, single_mesh());
    let mut gradients = Gradients::new(stage.params(), &mesh)?;
    let batch = Chain::default().micro_batches(1, 1)?.remove(0);
    let (_, tape) = stage.forward(None, &batch, &mut gradients)?;
    stage.params().release(3, &[])?;
    let said = message(stage.backward(tape, None, &mut gradients, true));
    assert_says(
        &said,
        &["backward pass of block 3", "layers.2.down", "released"],
    );
    Ok(())
}
