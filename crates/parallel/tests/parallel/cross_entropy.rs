//! The vocabulary-parallel cross-entropy against the one of whole rows.

use candle_core::{D, Device, Result, Tensor};
use candle_ops::IGNORE_INDEX;
use candle_parallel::{Shard, vocab_parallel_cross_entropy};

use crate::check::{assert_close, assert_says, grads, message, own_part, random, random_ids, var};
use crate::device::{device, on_ranks};

const VOCAB: usize = 11;
const TOKENS: usize = 9;

/// log Σ exp(z) − z_target by candle, 0 for ignored targets.
fn reference(logits: &Tensor, ids: &[u32]) -> Result<Tensor> {
    let log_probs = candle_nn::ops::log_softmax(logits, D::Minus1)?;
    let valid = ids.iter().map(|&id| f32::from(id != IGNORE_INDEX));
    let valid: Vec<f32> = valid.collect();
    let index = ids
        .iter()
        .map(|&id| if id == IGNORE_INDEX { 0 } else { id });
    let index = Tensor::from_iter(index, &device())?.unsqueeze(1)?;
    let picked = log_probs.gather(&index, 1)?.squeeze(1)?;
    picked.neg()? * Tensor::new(valid, &device())?
}

#[test]
fn equals_the_loss_of_whole_rows() {
    // Logits of tens: an unshifted exponential would overflow.
    let logits = (random(1, (TOKENS, VOCAB)).unwrap() * 60.0).unwrap();
    let mut ids = random_ids(2, TOKENS, VOCAB);
    (ids[2], ids[7]) = (IGNORE_INDEX, IGNORE_INDEX);
    let targets = Tensor::new(ids.as_slice(), &Device::Cpu).unwrap();
    let weights = random(3, TOKENS).unwrap();
    let whole = var(&logits).unwrap();
    let losses = reference(&whole, &ids).unwrap();
    let [grad] = grads(&losses, &weights, [&whole]).unwrap();
    for tp in 1..=4 {
        on_ranks(tp, |tp| {
            let shard = Shard::even(0, VOCAB, &tp)?;
            let z = var(&own_part(&logits, 1, &tp)?)?;
            let mine = vocab_parallel_cross_entropy(&z, &targets, &shard, &tp)?;
            assert_close("losses", &mine, &losses);
            let zero = mine.to_vec1::<f32>()?;
            assert_eq!((zero[2], zero[7]), (0.0, 0.0));
            let [dz] = grads(&mine, &weights, [&z])?;
            assert_close("dlogits", &dz, &own_part(&grad, 1, &tp)?);
            assert_eq!(dz.get(2)?.abs()?.sum_all()?.to_scalar::<f32>()?, 0.0);
            Ok(())
        });
    }
}

#[test]
fn wrong_targets_and_shapes_are_errors() {
    on_ranks(2, |tp| {
        let shard = Shard::even(0, VOCAB, &tp)?;
        let z = own_part(&random(1, (2, VOCAB))?, 1, &tp)?;
        let loss = |ids: &[u32]| {
            let targets = Tensor::new(ids, &Device::Cpu)?;
            vocab_parallel_cross_entropy(&z, &targets, &shard, &tp)
        };
        let said = message(loss(&[3, 11]));
        assert_says(&said, &["target id 11", "position 1", "11 tokens"]);
        assert_says(&message(loss(&[3])), &["targets [1]", "expected (n, "]);
        Ok(())
    });
}
