//! Accuracy: 1e-6 relative L2, forward and gradients.

use crate::check::{assert_close, doubles, grads, random, random_ids};
use candle_core::{D, Device, Result, Tensor, Var};
use candle_ops::{
    IGNORE_INDEX, cross_entropy, cross_entropy_grad, row_max, sum_exp_and_target_logit,
};

/// Logits of some units, and targets of which each fifth is ignored.
fn inputs(n: usize, v: usize) -> Result<(Tensor, Vec<u32>)> {
    let logits = (random(1, (n, v))? * 8.0)?;
    let mut targets = random_ids(2, n, v as u32);
    targets
        .iter_mut()
        .skip(3)
        .step_by(5)
        .for_each(|target| *target = IGNORE_INDEX);
    Ok((logits, targets))
}

/// The losses and the gradient of the logits.
fn reference(logits: &[f64], targets: &[u32], grad: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let v = logits.len() / targets.len();
    let (mut loss, mut dlogits) = (vec![0.0; targets.len()], vec![0.0; logits.len()]);
    for (row, &target) in targets
        .iter()
        .enumerate()
        .filter(|(_, id)| **id != IGNORE_INDEX)
    {
        let logits = &logits[row * v..][..v];
        let max = logits.iter().fold(f64::MIN, |max, x| max.max(*x));
        let sum: f64 = logits.iter().map(|x| (x - max).exp()).sum();
        loss[row] = sum.ln() - (logits[target as usize] - max);
        for (i, logit) in logits.iter().enumerate() {
            let hit = f64::from(u8::from(i == target as usize));
            dlogits[row * v + i] = ((logit - max).exp() / sum - hit) * grad[row];
        }
    }
    (loss, dlogits)
}

#[test]
fn matches_the_reference() -> Result<()> {
    for (n, v) in [(1, 1), (1, 97), (7, 97), (40, 3001), (2, 20000)] {
        let (logits, targets) = inputs(n, v)?;
        let (logits, grad) = (Var::from_tensor(&logits)?, random(3, n)?);
        let loss = cross_entropy(&logits, &Tensor::new(&targets[..], &Device::Cpu)?)?;
        let (want_loss, want_grad) = reference(&doubles(&logits)?, &targets, &doubles(&grad)?);
        assert_close(&format!("loss {n}x{v}"), &loss, &want_loss, 1e-6);
        let [dlogits] = grads(&loss, &grad, [&logits])?;
        assert_close(&format!("dlogits {n}x{v}"), &dlogits, &want_grad, 1e-6);
    }
    Ok(())
}

#[test]
fn shards_of_the_vocabulary_add_up_to_the_whole() -> Result<()> {
    let (n, v) = (13, 97);
    let (logits, targets) = inputs(n, v)?;
    let (grad, ids) = (random(3, n)?, Tensor::new(&targets[..], &Device::Cpu)?);
    // Uneven shards, one of them empty.
    let starts = [0, 40, 40, 90, v];
    let shards: Vec<(usize, Tensor)> = starts
        .windows(2)
        .map(|s| Ok((s[0], logits.narrow(1, s[0], s[1] - s[0])?)))
        .collect::<Result<_>>()?;
    let maxima: Vec<Tensor> = shards
        .iter()
        .map(|(_, x)| row_max(x))
        .collect::<Result<_>>()?;
    let max = Tensor::stack(&maxima, 0)?.max(0)?;
    let mut pieces = Tensor::zeros((2, n), candle_core::DType::F32, &Device::Cpu)?;
    for (start, shard) in &shards {
        pieces = (pieces + sum_exp_and_target_logit(shard, &max, &ids, *start)?)?;
    }
    let log_sum_exp = (pieces.get(0)?.log()? + &max)?;
    let dlogits: Vec<Tensor> = shards
        .iter()
        .map(|(start, shard)| cross_entropy_grad(shard, &log_sum_exp, &ids, *start, &grad))
        .collect::<Result<_>>()?;
    let dlogits = Tensor::cat(&dlogits, D::Minus1)?;
    let (want_loss, want_grad) = reference(&doubles(&logits)?, &targets, &doubles(&grad)?);
    let valid: Vec<f32> = targets
        .iter()
        .map(|&id| f32::from(id != IGNORE_INDEX))
        .collect();
    let loss = (log_sum_exp - &max)?
        .sub(&pieces.get(1)?)?
        .mul(&Tensor::new(valid, &Device::Cpu)?)?;
    assert_close("loss", &loss, &want_loss, 1e-6);
    assert_close("dlogits", &dlogits, &want_grad, 1e-6);
    Ok(())
}

#[test]
fn a_broken_logit_breaks_the_loss_of_its_row_only() -> Result<()> {
    let mut values = vec![0f32; 3 * 40];
    values[5] = f32::NAN;
    let logits = Tensor::from_vec(values, (3, 40), &Device::Cpu)?;
    let loss =
        cross_entropy(&logits, &Tensor::new(&[1u32, 2, 3], &Device::Cpu)?)?.to_vec1::<f32>()?;
    assert!(loss[0].is_nan() && loss[1].is_finite() && loss[2].is_finite());
    Ok(())
}
