//! Every layout against one rank.

use std::collections::BTreeMap;
use std::process::Command;

use candle_ops::ProductChoice;
use candle_parallel::{Schedule, ZeroStage};
use candle_train_models::CausalLm;

use crate::fixture::{ALL, Fixture, Run};
use crate::run::{Layout, Outcome, train};
use crate::tensors::assert_close;

pub fn assert_same(ours: &Outcome, one_rank: &Outcome, what: &str) {
    assert_eq!(ours.metrics.len(), one_rank.metrics.len());
    for (a, b) in ours.metrics.iter().zip(&one_rank.metrics) {
        let close = |a: f64, b: f64| (a - b).abs() <= 1e-5 * b.abs();
        assert!(
            close(a.loss, b.loss),
            "{what}, step {}: loss {} instead of {}",
            b.step,
            a.loss,
            b.loss
        );
        assert!(
            close(a.grad_norm, b.grad_norm),
            "{what}, step {}: norm {} instead of {}",
            b.step,
            a.grad_norm,
            b.grad_norm
        );
    }
    assert_close(&ours.first_gradients, &one_rank.first_gradients, 1e-4, what);
    assert_close(&ours.final_weights, &one_rank.final_weights, 1e-4, what);
}

/// All (pp, dp, tp) with pp * dp * tp <= 8.
fn layouts() -> Vec<Layout> {
    let mut layouts = Vec::new();
    for pp in 1..=8 {
        for dp in 1..=8 / pp {
            for tp in 1..=8 / (pp * dp) {
                layouts.push(Layout::new(pp, dp, tp));
            }
        }
    }
    layouts
}

/// ModelPart of ZeRO, schedule, tiles of weights.
const KINDS: [(ZeroStage, Schedule, usize); 6] = [
    (ZeroStage::Zero, Schedule::OneForwardOneBackward, 1),
    (ZeroStage::One, Schedule::GPipe, 1),
    (ZeroStage::Two, Schedule::OneForwardOneBackward, 1),
    (ZeroStage::Two, Schedule::GPipe, 1),
    (ZeroStage::Three, Schedule::OneForwardOneBackward, 1),
    (ZeroStage::Three, Schedule::GPipe, 3),
];

/// The layout with every stage of ZeRO and both schedules; without replicas ZeRO has nothing to divide.
pub fn kinds(layout: Layout) -> impl Iterator<Item = Layout> {
    let kinds = KINDS.into_iter();
    let kinds = kinds.filter(move |(zero, ..)| layout.dp > 1 || *zero <= ZeroStage::One);
    kinds.map(move |(zero, schedule, tile_linears)| Layout {
        zero,
        schedule,
        tile_linears,
        ..layout
    })
}

/// A shorter run whose global batch fits `dp` replicas.
fn run_for(fixture: &Fixture, dp: usize) -> Run {
    let multiple = 2 * dp;
    Run {
        steps: 3,
        seq_len: 8,
        micro_batch_size: 1,
        global_batch_size: multiple.max(4).next_multiple_of(multiple),
        ..fixture.run.clone()
    }
}

#[test]
fn every_layout_equals_one_rank() {
    for name in [
        "wide",
        "mistral",
        "mistral_dynamic",
        "qwen2",
        "qwen3",
        "gemma",
    ] {
        let fixture = Fixture::new(name);
        let config = fixture.config();
        let fits = |layout: &Layout| CausalLm::check_degrees(&config, &layout.degrees()).is_ok();
        // By the global batch, of which layouts have few.
        let mut of_one_rank = BTreeMap::new();
        for layout in layouts().into_iter().filter(fits) {
            let run = run_for(&fixture, layout.dp);
            let one_rank = of_one_rank
                .entry(run.global_batch_size)
                .or_insert_with(|| train(&fixture, &run, Layout::new(1, 1, 1)).unwrap());
            for layout in kinds(layout) {
                let ours = train(&fixture, &run, layout).unwrap();
                assert_same(&ours, one_rank, &format!("{name} {layout:?}"));
            }
        }
    }
}

#[test]
fn every_fixture_equals_one_rank() {
    for name in ALL {
        let fixture = Fixture::new(name);
        let run = run_for(&fixture, 2);
        let one_rank = train(&fixture, &run, Layout::new(1, 1, 1)).unwrap();
        for (pp, dp, tp) in [
            (1, 1, 2),
            (1, 1, 3),
            (1, 1, 4),
            (2, 1, 1),
            (2, 2, 2),
            (2, 1, 4),
            (2, 1, 3),
            (1, 2, 4),
        ] {
            for layout in kinds(Layout::new(pp, dp, tp)) {
                let ours = train(&fixture, &run, layout).unwrap();
                assert_same(&ours, &one_rank, &format!("{name} {layout:?}"));
            }
        }
    }
}

#[test]
fn embeddings_tied_across_many_stages_equal_one_rank() {
    let fixture = Fixture::new("tied_bias");
    let run = run_for(&fixture, 2);
    let one_rank = train(&fixture, &run, Layout::new(1, 1, 1)).unwrap();
    for (pp, dp, tp) in [(3, 1, 1), (5, 1, 1), (3, 2, 1), (4, 1, 2), (3, 1, 4)] {
        for layout in kinds(Layout::new(pp, dp, tp)) {
            let ours = train(&fixture, &run, layout).unwrap();
            assert_same(&ours, &one_rank, &format!("{layout:?}"));
        }
    }
}

/// Of pipeline stages, replicas and tensor-parallel ranks, in the way of multiplying that the environment chooses.
#[test]
fn a_layout_of_all_axes_equals_one_rank() {
    let fixture = Fixture::new("gqa");
    let run = run_for(&fixture, 2);
    let one_rank = train(&fixture, &run, Layout::new(1, 1, 1)).unwrap();
    let ours = train(&fixture, &run, Layout::new(2, 2, 2)).unwrap();
    let what = "pp 2 x dp 2 x tp 2";
    assert_same(&ours, &one_rank, what);
}

/// The environment decides for a whole process, so each way of multiplying has one.
#[test]
fn in_each_way_of_multiplying() {
    let possible = ProductChoice::ALL.into_iter();
    for choice in possible.filter(|choice| choice.is_possible()) {
        let output = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "layouts::a_layout_of_all_axes_equals_one_rank",
                "memory_plan::what_is_planned_is_what_is_held",
                "packed_weights::packed_weights_leave_training_as_it_is",
            ])
            .env("CANDLE_TRAIN_PRODUCTS", choice.to_string())
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(
            said.contains("test result: ok. 3 passed"),
            "{choice}: {said}"
        );
    }
}
