//! Weights that leave memory and come back behind the tensors that layers captured.

use std::sync::{Arc, OnceLock};

use candle_core::{DType, Module, Result, Tensor};
use candle_nn::Linear;
use candle_parallel::{
    AdamWConfig, Block, DistributedOptimizer, Gradients, Loss, MemoryCategory, ModelPart,
    ParamBuilder, ParamStore, Parameters, Pass, Pipeline, PlainBlock, PlainHead, Schedule,
    plain_block, plain_head,
};

use crate::chain::{self, Chain, HIDDEN, local_bits};
use crate::check::{assert_says, message, single_mesh};
use crate::device::device;

/// candle_nn's own layer inside a user's block.
struct Plain(Linear);

impl PlainBlock for Plain {
    fn forward(&self, xs: &Tensor, _pass: &Pass) -> Result<Tensor> {
        xs + self.0.forward(xs)?.tanh()?
    }
}

fn part(dtype: DType) -> Result<(ModelPart, Linear)> {
    let (chain, mesh) = (
        Chain {
            dtype,
            ..Chain::default()
        },
        single_mesh(),
    );
    let vb = ParamStore::init(5).builder(dtype, &device());
    let mut kept = std::cell::RefCell::new(None);
    let build = |index, vb: ParamBuilder| -> Result<Block> {
        if index != 2 {
            return chain.block(index, &mesh.tp, &vb);
        }
        let linear = candle_nn::linear(HIDDEN, HIDDEN, vb.pp("plain").var_builder())?;
        kept.replace(Some(linear.clone()));
        Ok(plain_block(Plain(linear)))
    };
    let part = ModelPart::build(&mesh, &vb, chain.num_blocks(), HIDDEN, build)?;
    Ok((part, kept.get_mut().take().unwrap()))
}

/// Bits of the weights after steps in which each block's weights leave and come back, if they are to.
fn trained(dtype: DType, moves: bool) -> Result<std::collections::BTreeMap<String, Vec<u32>>> {
    let mesh = single_mesh();
    let (part, _) = part(dtype)?;
    let mut optimizer = DistributedOptimizer::adamw(part.params(), &mesh, AdamWConfig::default())?;
    let mut gradients = Gradients::new(part.params(), &mesh)?;
    let pipeline = Pipeline::new(Schedule::OneForwardOneBackward, &mesh);
    let chain = Chain::default();
    for step in 0..3 {
        let batches = chain.micro_batches(step, 2)?;
        pipeline.forward_backward(&part, &batches, &mut gradients)?;
        optimizer.step(&mut gradients, 0.01, None)?;
        for block in part.block_indices().filter(|_| moves) {
            let params = part.params();
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
    Ok(local_bits(&part))
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
    let (part, linear) = part(DType::F32)?;
    let params = part.params();
    let copy = params.get(0).values()?.copy()?;
    assert_eq!(params.get(0).name, "embed.weight");
    params.release(0, &[])?;
    params.release(2, &[])?;
    // Through the parameter, through the stage, and through the layer that captured it.
    assert_says(
        &message(params.get(0).values()),
        &["embed.weight", "released"],
    );
    let batch = Chain::default().micro_batches(1, 1)?.remove(0);
    let pipeline = Pipeline::new(Schedule::GPipe, &single_mesh());
    let said = message(pipeline.logits(&part, &batch, &[0]));
    assert_says(&said, &["block 0", "embed.weight", "released", "hint"]);
    let xs = Tensor::ones((2, HIDDEN), DType::F32, &device())?;
    message(linear.forward(&xs));
    message(linear.weight().to_vec2::<f32>());
    message(linear.weight().sum_all());
    message(linear.weight() + 1.0);
    params.refill(0, &copy)?;
    let said = message(pipeline.logits(&part, &batch, &[0]));
    assert_says(&said, &["block 2", "plain", "released"]);
    Ok(())
}

#[test]
fn a_tied_weight_stays_and_counts_while_a_block_needs_it() -> Result<()> {
    let chain = Chain {
        tied: true,
        ..Chain::default()
    };
    let part = chain.part(&single_mesh(), &ParamStore::init(5))?;
    let params = part.params();
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
    let (part, _) = part(DType::F32)?;
    let params = part.params();
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

/// A head that frees the weights of block 3 before that one's backward pass.
struct Freeing(chain::Plain, Arc<OnceLock<Parameters>>);

impl PlainHead for Freeing {
    fn loss(&self, xs: &Tensor, pass: &Pass) -> Result<Loss> {
        let sum = self.0.forward(xs, pass)?;
        if let Some(params) = self.1.get() {
            params.release(3, &[])?;
        }
        Ok(Loss::new(sum, pass.num_targets()? as f64))
    }
}

#[test]
fn a_weight_that_was_released_before_the_backward_pass_is_named_there() -> Result<()> {
    let (chain, mesh) = (Chain::default(), single_mesh());
    let params = Arc::<OnceLock<Parameters>>::default();
    let vb = ParamStore::init(5).builder(DType::F32, &device());
    let part = ModelPart::build(
        &mesh,
        &vb,
        chain.num_blocks(),
        HIDDEN,
        |index, vb| match index {
            4 => {
                let head = chain.in_graph(index, &mesh.tp, &vb)?;
                Ok(plain_head(Freeing(head, params.clone())))
            }
            _ => chain.block(index, &mesh.tp, &vb),
        },
    )?;
    params.set(part.params().clone()).ok();
    let mut gradients = Gradients::new(part.params(), &mesh)?;
    let batches = chain.micro_batches(1, 1)?;
    let pipeline = Pipeline::new(Schedule::GPipe, &mesh);
    let said = message(pipeline.forward_backward(&part, &batches, &mut gradients));
    assert_says(
        &said,
        &["backward pass of block 3", "layers.2.down", "released"],
    );
    Ok(())
}
