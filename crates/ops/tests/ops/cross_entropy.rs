//! Forward and gradients to the rounding errors of f32.

use crate::check::{
    EXP_ROUNDINGS, assert_close, device, doubles, floats, grads, in_dtype, lane_roundings,
    on_each_device, on_each_device_in_each_type, random, random_ids, rounding_error,
};
use candle_core::{D, DType, Result, Tensor, Var};
use candle_ops::{
    IGNORE_INDEX, cross_entropy, cross_entropy_grad, cross_entropy_loss, softmax_stats,
};

const LARGEST_LOGIT: f64 = 8.0;

/// Logits of some units, and targets of which each fifth is ignored.
fn inputs(dtype: DType, n: usize, v: usize) -> Result<(Tensor, Vec<u32>)> {
    let logits = in_dtype(&(random(1, (n, v))? * LARGEST_LOGIT)?, dtype)?;
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

const SHAPES: [(usize, usize); 9] = [
    (1, 1),
    (127, 1),
    (1, 97),
    (2, 97),
    (127, 97),
    (1000, 97),
    (40, 3001),
    (1, 32001),
    (127, 32001),
];

/// Sums of up to 1024 exponentials, which go on in f64, and the logarithm and difference.
fn loss_bound(v: usize) -> f64 {
    rounding_error(EXP_ROUNDINGS + lane_roundings(v.min(1024)) + 3)
}

/// A logarithm of the sum, rounded, makes the probabilities wrong by its rounding error: half an epsilon of a number
/// below 8 + ln v. So does the difference from a logit.
fn grad_bound(v: usize) -> f64 {
    let log_sum_exp = LARGEST_LOGIT + (v as f64).ln();
    log_sum_exp / 2.0 * rounding_error(2) + rounding_error(EXP_ROUNDINGS)
}

/// The maxima, the sums of exponentials and the targets' logits.
fn columns(stats: &Tensor) -> Result<[Vec<f32>; 3]> {
    let column = |i| floats(&stats.narrow(1, i, 1)?);
    Ok([column(0)?, column(1)?, column(2)?])
}

#[test]
fn statistics_of_rows_match_the_reference() -> Result<()> {
    on_each_device_in_each_type(|dtype| {
        for (n, v) in SHAPES {
            let (logits, targets) = inputs(dtype, n, v)?;
            let ids = Tensor::new(&targets[..], &device())?;
            let stats = softmax_stats(&logits, &ids, 0)?;
            let (values, mut want_max) = (floats(&logits)?, Vec::new());
            let (mut sums, mut want_hits) = (Vec::new(), Vec::new());
            for (logits, &target) in values.chunks(v).zip(&targets) {
                let max = logits.iter().copied().fold(f32::MIN, f32::max);
                let sum = logits.iter().map(|x| f64::from(x - max).exp());
                sums.push(sum.sum::<f64>());
                want_hits.push(logits.get(target as usize).copied().unwrap_or_default());
                want_max.push(max);
            }
            let [max, _, hits] = columns(&stats)?;
            assert_eq!(max, want_max);
            assert_eq!(hits, want_hits);
            let bound = rounding_error(EXP_ROUNDINGS + lane_roundings(v.min(1024)));
            let got = stats.narrow(1, 1, 1)?;
            assert_close(&format!("sum {n}x{v} {dtype:?}"), &got, &sums, bound);
        }
        Ok(())
    })
}

/// Each logit is larger than all before it, so that every block, and every thread of a GPU, scales its sum down.
#[test]
fn a_maximum_that_grows_with_every_column_keeps_the_sum() -> Result<()> {
    on_each_device(|| {
        let v = 32001;
        let logits: Vec<f32> = (0..v).map(|i| i as f32 * 2e-3 - 30.0).collect();
        let max = f64::from(logits[v - 1]);
        let want: f64 = logits.iter().map(|x| (f64::from(*x) - max).exp()).sum();
        let logits = Tensor::from_vec(logits, (1, v), &device())?;
        let stats = softmax_stats(&logits, &Tensor::new(&[IGNORE_INDEX], &device())?, 0)?;
        let [got_max, sum, hits] = columns(&stats)?;
        assert_eq!((f64::from(got_max[0]), hits[0]), (max, 0.0));
        let error = (f64::from(sum[0]) - want).abs() / want;
        assert!(error < 1e-6, "relative error {error:e}");
        Ok(())
    })
}

/// Logits of minus infinity, as masks write them, in front, behind and in whole blocks.
#[test]
fn logits_of_minus_infinity_add_nothing() -> Result<()> {
    on_each_device(|| {
        for finite in [0, 1, 1500, 2999] {
            let mut logits = vec![f32::NEG_INFINITY; 3000];
            logits[finite] = -7.0;
            let logits = Tensor::from_vec(logits, (1, 3000), &device())?;
            let ids = Tensor::new(&[finite as u32], &device())?;
            assert_eq!(
                floats(&softmax_stats(&logits, &ids, 0)?)?,
                [-7.0, 1.0, -7.0]
            );
            assert_eq!(floats(&cross_entropy(&logits, &ids)?)?, [0.0]);
        }
        Ok(())
    })
}

#[test]
fn matches_the_reference() -> Result<()> {
    on_each_device_in_each_type(|dtype| {
        for (n, v) in SHAPES {
            let (logits, targets) = inputs(dtype, n, v)?;
            let (logits, grad) = (Var::from_tensor(&logits)?, random(3, n)?);
            let what = format!("{n}x{v} {dtype:?}");
            let loss = cross_entropy(&logits, &Tensor::new(&targets[..], &device())?)?;
            let (want_loss, want_grad) = reference(&doubles(&logits)?, &targets, &doubles(&grad)?);
            assert_close(&format!("loss {what}"), &loss, &want_loss, loss_bound(v));
            let [dlogits] = grads(&loss, &grad, [&logits])?;
            assert_close(
                &format!("dlogits {what}"),
                &dlogits,
                &want_grad,
                grad_bound(v),
            );
        }
        Ok(())
    })
}

#[test]
fn shards_of_the_vocabulary_add_up_to_the_whole() -> Result<()> {
    on_each_device_in_each_type(|dtype| {
        let (n, v) = (13, 97);
        let (logits, targets) = inputs(dtype, n, v)?;
        let (grad, ids) = (random(3, n)?, Tensor::new(&targets[..], &device())?);
        // Uneven shards, one of them empty.
        let starts = [0, 40, 40, 90, v];
        let shards: Vec<(usize, Tensor)> = starts
            .windows(2)
            .map(|s| Ok((s[0], logits.narrow(1, s[0], s[1] - s[0])?)))
            .collect::<Result<_>>()?;
        let stats: Vec<Tensor> = shards
            .iter()
            .map(|(start, shard)| softmax_stats(shard, &ids, *start))
            .collect::<Result<_>>()?;
        let (loss, log_sum_exp) = cross_entropy_loss(&Tensor::cat(&stats, 0)?, &ids, v)?;
        let dlogits: Vec<Tensor> = shards
            .iter()
            .map(|(start, shard)| cross_entropy_grad(shard, &log_sum_exp, &ids, *start, &grad))
            .collect::<Result<_>>()?;
        let dlogits = Tensor::cat(&dlogits, D::Minus1)?;
        let (want_loss, want_grad) = reference(&doubles(&logits)?, &targets, &doubles(&grad)?);
        assert_close("loss", &loss, &want_loss, loss_bound(v));
        assert_close("dlogits", &dlogits, &want_grad, grad_bound(v));
        Ok(())
    })
}

#[test]
fn a_broken_logit_breaks_the_loss_of_its_row_only() -> Result<()> {
    on_each_device(|| {
        for at in [0, 1, 5, 50, 96] {
            let mut values = vec![0f32; 3 * 97];
            values[at] = f32::NAN;
            let logits = Tensor::from_vec(values, (3, 97), &device())?;
            let targets = Tensor::new(&[1u32, 2, 3], &device())?;
            let loss = cross_entropy(&logits, &targets)?.to_vec1::<f32>()?;
            assert!(loss[0].is_nan() && loss[1].is_finite() && loss[2].is_finite());
        }
        Ok(())
    })
}

#[test]
fn losses_of_rows_without_a_target_and_with_one_beyond_the_vocabulary() -> Result<()> {
    on_each_device(|| {
        let stats = [
            [1f32, 2.0, 0.5],
            [-2.0, 3.0, -3.0],
            [3.0, 4.0, 0.0],
            [0.5, 5.0, 0.0],
        ];
        let stats = Tensor::new(&stats, &device())?;
        let targets = Tensor::new(&[0u32, 6, IGNORE_INDEX, 7], &device())?;
        let (loss, log_sum_exp) = cross_entropy_loss(&stats, &targets, 7)?;
        let want = [
            1.0 + 2f64.ln(),
            -2.0 + 3f64.ln(),
            3.0 + 4f64.ln(),
            0.5 + 5f64.ln(),
        ];
        assert_close("log_sum_exp", &log_sum_exp, &want, 1e-6);
        let loss = floats(&loss)?;
        assert!((f64::from(loss[0]) - (2f64.ln() + 0.5)).abs() < 1e-6);
        assert!((f64::from(loss[1]) - (3f64.ln() + 1.0)).abs() < 1e-6);
        assert_eq!(loss[2], 0.0);
        assert!(loss[3].is_nan());
        for (stats, targets) in [
            (&stats.narrow(0, 0, 3)?, &targets),
            (&stats.narrow(1, 0, 2)?, &targets),
            (&stats, &targets.narrow(0, 0, 3)?),
        ] {
            assert!(cross_entropy_loss(stats, targets, 7).is_err());
        }
        Ok(())
    })
}
