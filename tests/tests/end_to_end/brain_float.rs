//! Training in bf16: layouts against one rank, and one rank against f32.

use candle_core::DType;
use candle_parallel::{Recompute, Schedule, ZeroStage};

use crate::fixture::{ALL, Fixture, Run};
use crate::run::{Layout, Outcome, Variant, train, train_variant};
use crate::tensors::Tensors;

const BF16: Variant = Variant {
    dtype: DType::BF16,
    is_frozen: |_| false,
    recompute: Recompute::None,
};

/// The root mean square error of a rounding to bf16: at most half of the last of 8 bits, evenly spread.
fn rounding_error() -> f64 {
    2f64.powi(-9) / 3f64.sqrt()
}

/// What independent roundings add up to, in two runs that are compared, that a gradient has seen in a model of 4 layers:
/// about 10 results a layer forward and 14 backward, 9 weights a layer each way, and the ends; doubled, because the
/// exponentials of attention and loss turn absolute errors into relative ones.
fn gradient_tolerance() -> f64 {
    let roundings: f64 = 4.0 * (10.0 + 14.0 + 2.0 * 9.0) + 10.0;
    2.0 * rounding_error() * (2.0 * roundings).sqrt()
}

/// A few steps of a global batch that 2 replicas share.
fn short(fixture: &Fixture) -> Run {
    Run {
        steps: 3,
        seq_len: 16,
        micro_batch_size: 1,
        global_batch_size: 4,
        ..fixture.run.clone()
    }
}

/// Relative L2 distance over all tensors together.
fn distance(ours: &Tensors, reference: &Tensors) -> f64 {
    assert!(ours.keys().eq(reference.keys()));
    let pairs = || ours.values().flatten().zip(reference.values().flatten());
    let difference: f64 = pairs().map(|(a, b)| f64::from(a - b).powi(2)).sum();
    let norm: f64 = pairs().map(|(_, b)| f64::from(*b).powi(2)).sum();
    (difference / norm).sqrt()
}

fn assert_near(ours: &Outcome, reference: &Outcome, tolerance: f64, what: &str) {
    let error = distance(&ours.first_gradients, &reference.first_gradients);
    assert!(error <= tolerance, "{what}: gradients are off by {error}");
    // AdamW divides by the gradient's size: a weight may differ by all its updates where the sign of a small gradient does.
    let error = distance(&ours.final_weights, &reference.final_weights);
    assert!(error <= 0.01, "{what}: weights are off by {error}");
    for (a, b) in ours.metrics.iter().zip(&reference.metrics) {
        let close = (a.loss - b.loss).abs() <= 0.01 * b.loss;
        assert!(
            close,
            "{what}, step {}: loss {} instead of {}",
            b.step, a.loss, b.loss
        );
    }
}

#[test]
fn layouts_equal_one_rank_up_to_rounding_and_one_rank_f32() {
    for name in ALL {
        let fixture = Fixture::new(name);
        let run = short(&fixture);
        let wide = train(&fixture, &run, Layout::new(1, 1, 1)).unwrap();
        let one_rank = train_variant(&fixture, &run, Layout::new(1, 1, 1), BF16).unwrap();
        let tolerance = gradient_tolerance();
        assert_near(&one_rank, &wide, tolerance, &format!("{name} against f32"));
        for (pp, dp, tp) in [(1, 1, 2), (2, 1, 1), (1, 2, 1), (2, 2, 2), (2, 1, 3)] {
            for (zero, schedule) in [
                (ZeroStage::Zero, Schedule::OneForwardOneBackward),
                (ZeroStage::One, Schedule::GPipe),
                (ZeroStage::Three, Schedule::OneForwardOneBackward),
            ] {
                if zero == ZeroStage::Three && dp == 1 {
                    continue;
                }
                let layout = Layout {
                    zero,
                    schedule,
                    ..Layout::new(pp, dp, tp)
                };
                let ours = train_variant(&fixture, &run, layout, BF16).unwrap();
                // Without tensor parallelism every result is rounded where one rank rounds it, and gradients add up in f32.
                let tolerance = if tp == 1 { 1e-6 } else { tolerance };
                assert_near(&ours, &one_rank, tolerance, &format!("{name} {layout:?}"));
            }
        }
    }
}

#[test]
fn two_runs_of_a_layout_give_the_same_bits_with_or_without_zero_1() {
    let fixture = Fixture::new("gqa");
    let run = short(&fixture);
    for (pp, dp, tp) in [(1, 1, 1), (2, 2, 2)] {
        let [zero_0, zero_1] = [ZeroStage::Zero, ZeroStage::One].map(|zero| {
            let with_delays = |delays| {
                let layout = Layout {
                    zero,
                    delays,
                    ..Layout::new(pp, dp, tp)
                };
                train_variant(&fixture, &run, layout, BF16).unwrap()
            };
            let (first, second) = (with_delays(None), with_delays(Some(1)));
            assert_eq!(first.first_gradients, second.first_gradients);
            assert_eq!(first.final_weights, second.final_weights);
            first
        });
        // Two replicas: a sum of two has one order only.
        assert_eq!(zero_0.first_gradients, zero_1.first_gradients);
        assert_eq!(zero_0.final_weights, zero_1.final_weights);
    }
}
