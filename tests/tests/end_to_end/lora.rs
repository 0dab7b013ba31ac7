//! Low-rank adapters: losses, gradients and trained matrices equal those of peft, on every layout.

use candle_comm::Mesh;
use candle_core::DType;
use candle_parallel::{Offload, Recompute, Schedule, WeightFormat, ZeroStage};
use candle_trainer::Trainer;

use crate::determinism::bits;
use crate::fixture::Fixture;
use crate::layouts::{assert_same, kinds};
use crate::run::{
    Adapters, Layout, Outcome, Variant, batches, gather, launch, load_offloaded, train_variant,
};
use crate::tensors::{Tensors, assert_close};

fn train(fixture: &Fixture, layout: Layout, adapters: Adapters, recompute: Recompute) -> Outcome {
    let variant = Variant {
        adapters,
        recompute,
        ..Variant::default()
    };
    train_variant(fixture, &fixture.run, layout, variant).unwrap()
}

/// By the names that the parameters have here.
fn named(reference: Tensors) -> Tensors {
    let name = |name: &str| name.strip_prefix("base_model.model.").unwrap().to_string();
    let named = reference.into_iter();
    named
        .map(|(file_name, values)| (name(&file_name), values))
        .collect()
}

fn is_adapter(name: &str) -> bool {
    name.contains(".lora_")
}

#[test]
fn every_layout_equals_peft() {
    for name in ["qwen3", "tied_bias"] {
        let fixture = Fixture::adapter(name);
        let (gradients, weights) = (
            named(fixture.first_gradients()),
            named(fixture.final_weights()),
        );
        for (pp, dp, tp) in [
            (1, 1, 1),
            (1, 1, 2),
            (1, 1, 3),
            (2, 1, 1),
            (1, 2, 1),
            (2, 2, 2),
        ] {
            for layout in kinds(Layout::new(pp, dp, tp)) {
                let what = format!("{name} {layout:?}");
                let mut ours = train(&fixture, layout, Adapters::Trained, Recompute::None);
                for (ours, expected) in ours.metrics.iter().zip(&fixture.metrics()) {
                    expected.assert_matches(ours, 1e-5, &what);
                }
                assert_eq!(ours.metrics.len(), fixture.run.steps);
                assert_close(&ours.first_gradients, &gradients, 1e-4, &what);
                assert!(ours.optimized.iter().all(|name| is_adapter(name)), "{what}");
                ours.final_weights.retain(|name, _| is_adapter(name));
                assert_close(&ours.final_weights, &weights, 1e-4, &what);
            }
        }
    }
}

#[test]
fn dropout_is_the_same_on_every_layout_and_when_activations_are_recomputed() {
    let mut fixture = Fixture::adapter("qwen3");
    fixture.run.steps = 3;
    let train =
        |layout, dropout, recompute| train(&fixture, layout, Adapters::New(dropout), recompute);
    let one_rank = train(Layout::new(1, 1, 1), 0.3, Recompute::None);
    let without = train(Layout::new(1, 1, 1), 0.0, Recompute::None);
    assert!(one_rank.metrics[1].loss != without.metrics[1].loss);
    for (pp, dp, tp) in [(1, 1, 2), (2, 2, 1), (1, 2, 3), (3, 1, 2)] {
        let layout = Layout {
            zero: if dp > 1 {
                ZeroStage::Three
            } else {
                ZeroStage::One
            },
            ..Layout::new(pp, dp, tp)
        };
        let ours = train(layout, 0.3, Recompute::None);
        assert_same(&ours, &one_rank, &format!("{layout:?}"));
        assert!(
            bits(&train(layout, 0.3, Recompute::Full)) == bits(&ours),
            "{layout:?}"
        );
    }
}

#[test]
fn the_base_stays_in_16_bits_too() {
    let fixture = Fixture::adapter("qwen3");
    let train = |steps, layout| {
        let mut run = fixture.run.clone();
        run.steps = steps;
        let variant = Variant {
            dtype: DType::BF16,
            adapters: Adapters::Trained,
            ..Variant::default()
        };
        train_variant(&fixture, &run, layout, variant).unwrap()
    };
    let layout = Layout {
        zero: ZeroStage::Three,
        tile_linears: 2,
        ..Layout::new(1, 2, 2)
    };
    let (before, after) = (train(0, layout).final_weights, train(5, layout));
    for (name, values) in &after.final_weights {
        assert_eq!(*values == before[name], !is_adapter(name), "{name}");
    }
    for (ours, expected) in after.metrics.iter().zip(&fixture.metrics()) {
        expected.assert_matches(ours, 2e-2, "bf16");
    }
}

#[test]
fn groups_of_replicas_divide_adapters_too() {
    let fixture = Fixture::adapter("qwen3");
    let mut weights = named(fixture.final_weights());
    weights.retain(|name, _| is_adapter(name));
    for (zero, schedule, tile_linears) in [
        (ZeroStage::One, Schedule::GPipe, 1),
        (ZeroStage::Two, Schedule::OneForwardOneBackward, 1),
        (ZeroStage::Three, Schedule::OneForwardOneBackward, 1),
        (ZeroStage::Three, Schedule::GPipe, 2),
    ] {
        for (pp, dp, tp) in [(1, 4, 1), (2, 4, 1), (1, 4, 2)] {
            let layout = Layout {
                zero,
                schedule,
                tile_linears,
                zero_group: Some(2),
                ..Layout::new(pp, dp, tp)
            };
            let mut ours = train(&fixture, layout, Adapters::Trained, Recompute::None);
            let what = format!("{layout:?}");
            for (ours, expected) in ours.metrics.iter().zip(&fixture.metrics()) {
                expected.assert_matches(ours, 1e-5, &what);
            }
            ours.final_weights.retain(|name, _| is_adapter(name));
            assert_close(&ours.final_weights, &weights, 1e-4, &what);
        }
    }
}

#[test]
fn where_frozen_weights_and_the_state_of_adapters_are_changes_no_bit() {
    let fixture = Fixture::adapter("qwen3");
    let folder = tempfile::tempdir().unwrap();
    for (zero, (pp, dp, tp)) in [
        (ZeroStage::One, (1, 2, 1)),
        (ZeroStage::Two, (2, 2, 1)),
        (ZeroStage::Three, (1, 2, 2)),
    ] {
        let layout = Layout {
            zero,
            ..Layout::new(pp, dp, tp)
        };
        let trained = |offload: Offload| {
            let all = std::sync::Mutex::new(Tensors::new());
            launch(layout, |world| {
                let mesh = Mesh::new(world, layout.degrees())?;
                let variant = Variant {
                    adapters: Adapters::Trained,
                    ..Variant::default()
                };
                let part = load_offloaded(&fixture, &mesh, (layout, variant), &offload)?;
                let config = fixture.run.train_config(layout);
                let mut trainer = Trainer::new(config, &mesh, part)?;
                trainer.train(&batches(&fixture, &fixture.run, &mesh)?, |_| Ok(()))?;
                let part = trainer.part();
                let weights = gather(part, &mesh, |index| part.params().values(index))?;
                if mesh.world.rank() == 0 {
                    *all.lock().unwrap() = weights;
                }
                Ok(())
            })
            .unwrap();
            all.into_inner().unwrap()
        };
        let want = trained(Offload::default());
        assert!(want.keys().any(|name| is_adapter(name)));
        let in_files = |offload: Offload| offload.in_dir(folder.path());
        for offload in [
            Offload::all(),
            in_files(Offload::optimizer()),
            in_files(Offload::all()),
        ] {
            let ours = trained(offload.clone());
            assert!(ours == want, "{layout:?} {offload:?}");
        }
    }
}

#[test]
fn a_base_in_blocks_trains_alike_on_every_layout() {
    let mut fixture = Fixture::new("gqa");
    (fixture.run.steps, fixture.run.lr) = (3, 1e-2);
    let train = |layout, format| {
        let variant = Variant {
            adapters: Adapters::New(0.0),
            frozen_format: format,
            ..Variant::default()
        };
        train_variant(&fixture, &fixture.run, layout, variant).unwrap()
    };
    let format = Some(WeightFormat::Q8_0);
    let one_rank = train(Layout::new(1, 1, 1), format);
    let whole = train(Layout::new(1, 1, 1), None);
    assert!(one_rank.metrics[0].loss != whole.metrics[0].loss);
    for (layout, zero_group) in [
        (Layout::new(2, 1, 1), None),
        (Layout::new(1, 4, 1), Some(2)),
        (Layout::new(2, 2, 1), None),
    ] {
        let mut kinds: Vec<Layout> = kinds(layout).collect();
        kinds.retain(|layout| layout.zero > ZeroStage::Zero || zero_group.is_none());
        for layout in kinds {
            let layout = Layout {
                zero_group,
                ..layout
            };
            let mut ours = train(layout, format);
            let mut want = one_rank.final_weights.clone();
            // The base is what its blocks stand for, on all of them.
            for (ours, expected) in ours.metrics.iter().zip(&one_rank.metrics) {
                let close = |a: f64, b: f64| (a - b).abs() <= 1e-5 * b.abs();
                assert!(close(ours.loss, expected.loss), "{layout:?}");
            }
            ours.final_weights.retain(|name, _| is_adapter(name));
            want.retain(|name, _| is_adapter(name));
            assert_close(&ours.final_weights, &want, 1e-4, &format!("{layout:?}"));
        }
    }
}
