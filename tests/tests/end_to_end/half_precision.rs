//! Training in bf16 and f16: layouts against one rank, and one rank against f32; the loss scale of f16.

use candle_comm::Mesh;
use candle_core::DType;
use candle_parallel::{
    AdamWConfig, DistributedOptimizer, LossScaling, Recompute, Schedule, ZeroStage,
};
use candle_trainer::Trainer;

use crate::fixture::{ALL, Fixture, Run};
use crate::run::{
    Adapters, Layout, Outcome, Variant, batches, launch, load_variant, train, train_variant,
};
use crate::tensors::Tensors;

const fn of(dtype: DType) -> Variant {
    Variant {
        dtype,
        is_frozen: None,
        recompute: Recompute::None,
        adapters: Adapters::None,
        frozen_format: None,
    }
}

const BF16: Variant = of(DType::BF16);
const F16: Variant = of(DType::F16);

/// The root mean square error of a rounding: at most half of the last of 8 bits, or of 11 in f16, evenly spread.
fn rounding_error(dtype: DType) -> f64 {
    let bits = if dtype == DType::F16 { 11 } else { 8 };
    2f64.powi(-bits - 1) / 3f64.sqrt()
}

/// What independent roundings add up to, in two runs that are compared, that a gradient has seen in a model of 4 layers:
/// about 10 results a layer forward and 14 backward, 9 weights a layer each way, and the ends; doubled, because the
/// exponentials of attention and loss turn absolute errors into relative ones.
pub fn gradient_tolerance(dtype: DType) -> f64 {
    let roundings: f64 = 4.0 * (10.0 + 14.0 + 2.0 * 9.0) + 10.0;
    2.0 * rounding_error(dtype) * (2.0 * roundings).sqrt()
}

/// A few steps of a global batch that 2 replicas share.
fn short(fixture: &Fixture) -> Run {
    Run {
        steps: 3,
        seq_len: 16,
        micro_batch_size: 1,
        global_batch_size: 4,
        // The last step has twice the scale.
        loss_scaling: LossScaling {
            init: 1024.0,
            window: 2,
        },
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

pub fn assert_near(ours: &Outcome, reference: &Outcome, tolerance: f64, what: &str) {
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
    check_layouts(BF16);
}

#[test]
fn layouts_in_f16_equal_one_rank_up_to_rounding_and_one_rank_f32() {
    check_layouts(F16);
}

fn check_layouts(variant: Variant) {
    for name in ALL {
        let fixture = Fixture::new(name);
        let run = short(&fixture);
        let wide = train(&fixture, &run, Layout::new(1, 1, 1)).unwrap();
        let one_rank = train_variant(&fixture, &run, Layout::new(1, 1, 1), variant).unwrap();
        let tolerance = gradient_tolerance(variant.dtype);
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
                let ours = train_variant(&fixture, &run, layout, variant).unwrap();
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
    for ((pp, dp, tp), variant) in [(1, 1, 1), (2, 2, 2)]
        .into_iter()
        .flat_map(|layout| [(layout, BF16), (layout, F16)])
    {
        let [zero_0, zero_1] = [ZeroStage::Zero, ZeroStage::One].map(|zero| {
            let with_delays = |delays| {
                let layout = Layout {
                    zero,
                    delays,
                    ..Layout::new(pp, dp, tp)
                };
                train_variant(&fixture, &run, layout, variant).unwrap()
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

/// A first scale that no backward pass in f16 survives: the run finds one that it does.
#[test]
fn overflows_are_skipped_until_the_scale_fits_and_every_layout_goes_on_alike() {
    let fixture = Fixture::new("gqa");
    let run = Run {
        steps: 24,
        loss_scaling: LossScaling {
            init: 2f64.powi(32),
            window: 100,
        },
        ..short(&fixture)
    };
    let one_rank = train_variant(&fixture, &run, Layout::new(1, 1, 1), F16).unwrap();
    let skipped = |outcome: &Outcome| outcome.metrics.last().unwrap().skipped_steps;
    let num_skipped = skipped(&one_rank);
    assert!((12..24).contains(&num_skipped), "{num_skipped} skipped");
    for (step, metrics) in one_rank.metrics.iter().enumerate() {
        let halvings = step.min(num_skipped) as i32;
        assert_eq!(metrics.loss_scale, 2f64.powi(32 - halvings), "step {step}");
        assert_eq!(metrics.skipped_steps, num_skipped.min(step + 1));
        assert_eq!(metrics.grad_norm.is_finite(), step >= num_skipped);
        // The same weights give the same loss, whatever the scale.
        assert!(metrics.loss.is_finite());
    }
    for (pp, dp, tp) in [(2, 1, 1), (1, 2, 1), (2, 2, 2)] {
        let layout = Layout {
            zero: ZeroStage::One,
            ..Layout::new(pp, dp, tp)
        };
        let ours = train_variant(&fixture, &run, layout, F16).unwrap();
        assert_eq!(skipped(&ours), num_skipped, "{layout:?}");
        let error = distance(&ours.final_weights, &one_rank.final_weights);
        assert!(error <= 0.01, "{layout:?}: weights are off by {error}");
    }
}

#[test]
fn an_optimizer_of_ones_own_keeps_its_loss_scale_and_gets_the_trainers_without_one() {
    let fixture = Fixture::new("gqa");
    let run = short(&fixture);
    let own = LossScaling {
        init: 4.0,
        window: 1,
    };
    let layout = Layout::new(1, 1, 1);
    for (own, want) in [
        (Some(own), [4.0, 8.0, 16.0]),
        (None, [1024.0, 1024.0, 2048.0]),
    ] {
        launch(layout, |world| {
            let mesh = Mesh::new(world, layout.degrees())?;
            let stage = load_variant(&fixture, &mesh, (layout, F16))?;
            let config = run.train_config(layout);
            let mut trainer = Trainer::with_optimizer(config, &mesh, stage, |params| {
                let optimizer = DistributedOptimizer::adamw(params, &mesh, AdamWConfig::default())?;
                match own {
                    Some(own) => optimizer.with_loss_scaling(own),
                    None => Ok(optimizer),
                }
            })?;
            let mut scales = Vec::new();
            trainer.train(&batches(&fixture, &run, &mesh)?, |step| {
                scales.push(step.loss_scale);
                Ok(())
            })?;
            assert_eq!(scales, want);
            Ok(())
        })
        .unwrap();
    }
}
