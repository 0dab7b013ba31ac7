//! Frozen parameters: they stay as they are, have no optimizer state, and the others train as if they were not.

use candle_comm::Mesh;
use candle_core::DType;
use candle_parallel::{AdamWConfig, DistributedOptimizer, ParamGroup, ZeroStage};
use candle_trainer::Trainer;

use crate::fixture::{Fixture, Run};
use crate::run::{Layout, Variant, batches, gather, launch, load, train_variant};

const PARTS: [fn(&str) -> bool; 7] = [
    |name| !name.contains("norm"),
    |name| name.contains("norm"),
    |name| name.contains("embed_tokens"),
    |name| name.contains("self_attn"),
    |name| name.contains("mlp.down_proj") || name.contains("lm_head"),
    |name| name.contains("layers.0.") || name.contains("layers.1."),
    // The first blocks, at which the backward pass ends.
    |name| name.contains("embed_tokens") || name.contains("layers.0."),
];

#[test]
fn frozen_parameters_stay_and_the_others_get_the_gradients_they_had() {
    for (name, dtype) in [
        ("gqa", DType::F32),
        ("tied_bias", DType::F32),
        ("bf16_sharded", DType::BF16),
        ("qwen3", DType::F32),
    ] {
        let fixture = Fixture::new(name);
        let mut run = fixture.run.clone();
        // Fast enough for two steps to move weights of bf16.
        (run.lr, run.warmup_steps, run.seq_len) = (0.1, 0, 16);
        for ((pp, dp, tp), zero, tile_linears) in [
            ((1, 1, 1), ZeroStage::One, 1),
            ((2, 1, 2), ZeroStage::One, 1),
            ((1, 2, 1), ZeroStage::Three, 3),
        ] {
            let layout = Layout {
                zero,
                tile_linears,
                ..Layout::new(pp, dp, tp)
            };
            let train = |is_frozen: Option<fn(&str) -> bool>, steps: usize| {
                let mut run = run.clone();
                run.steps = steps;
                train_variant(
                    &fixture,
                    &run,
                    layout,
                    Variant {
                        dtype,
                        is_frozen,
                        ..Variant::default()
                    },
                )
                .unwrap()
            };
            let all = train(None, 2);
            let before = train(None, 0).final_weights;
            for (part, is_frozen) in PARTS.into_iter().enumerate() {
                let what = format!("{name} {dtype:?} {layout:?}, part {part}");
                let ours = train(Some(is_frozen), 2);
                let mut gradients = all.first_gradients.clone();
                gradients.retain(|name, _| !is_frozen(name));
                assert!(!gradients.is_empty(), "{what}");
                assert!(
                    ours.first_gradients == gradients,
                    "{what}: gradients differ"
                );
                assert!(!ours.optimized.iter().any(|name| is_frozen(name)), "{what}");
                for (name, values) in &ours.final_weights {
                    if is_frozen(name) {
                        assert!(*values == before[name], "{what}: {name} has changed");
                    }
                }
                assert!(ours.final_weights != before, "{what}: nothing was trained");
            }
        }
    }
}

#[test]
fn a_group_of_learning_rate_0_stays_in_a_trainer_with_an_optimizer_of_its_own() {
    let fixture = Fixture::new("gqa");
    let layout = Layout {
        zero: ZeroStage::One,
        ..Layout::new(2, 2, 1)
    };
    let run = Run {
        steps: 2,
        ..fixture.run.clone()
    };
    launch(layout, |world| {
        let mesh = Mesh::new(world, layout.degrees())?;
        let part = load(&fixture, &mesh)?;
        let before = gather(&part, &mesh, |index| part.params().values(index))?;
        let config = run.train_config(layout);
        let mut trainer = Trainer::with_optimizer(config, &mesh, part, |params| {
            let adamw = AdamWConfig::default();
            let still = ParamGroup::new(|name| name.contains("mlp")).with_lr_scale(0.0);
            DistributedOptimizer::adamw(params, &mesh, adamw)?.with_groups(vec![still])
        })?;
        trainer.train(&batches(&fixture, &run, &mesh)?, |_| Ok(()))?;
        let params = trainer.part().params();
        let after = gather(trainer.part(), &mesh, |index| params.values(index))?;
        for (name, values) in &after {
            assert_eq!(*values == before[name], name.contains("mlp"), "{name}");
        }
        Ok(())
    })
    .unwrap();
}
