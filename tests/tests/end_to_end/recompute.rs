//! Recomputed activations give the bits of kept ones: losses, every gradient, weights.

use candle_core::DType;
use candle_parallel::{Recompute, Schedule, ZeroStage};

use crate::determinism::bits;
use crate::fixture::Fixture;
use crate::run::{Layout, Variant, train_variant};

const LAYOUTS: [(usize, usize, usize); 5] = [(1, 1, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (3, 1, 1)];

#[test]
fn every_mode_gives_the_same_bits() {
    for (name, dtype) in [
        ("gqa", DType::F32),
        ("tied_bias", DType::F32),
        ("qwen3", DType::F32),
        ("mistral", DType::BF16),
        ("gemma", DType::BF16),
        ("bf16_sharded", DType::BF16),
    ] {
        let fixture = Fixture::new(name);
        let mut run = fixture.run.clone();
        (
            run.steps,
            run.seq_len,
            run.micro_batch_size,
            run.global_batch_size,
        ) = (2, 12, 1, 4);
        for (pp, dp, tp) in LAYOUTS {
            for (is_frozen, zero, overlap, schedule) in [
                (
                    None,
                    ZeroStage::Three,
                    true,
                    Schedule::OneForwardOneBackward,
                ),
                // The first blocks, at which the backward pass ends, and products between trained norms.
                (
                    Some(
                        (|name| {
                            name.contains("embed")
                                || name.contains("layers.0.")
                                || name.contains("proj")
                        }) as fn(&str) -> bool,
                    ),
                    ZeroStage::One,
                    false,
                    Schedule::GPipe,
                ),
            ] {
                let layout = Layout {
                    zero,
                    overlap,
                    schedule,
                    ..Layout::new(pp, dp, tp)
                };
                let train = |recompute, delays| {
                    let variant = Variant {
                        dtype,
                        is_frozen,
                        recompute,
                        ..Variant::default()
                    };
                    let layout = Layout { delays, ..layout };
                    bits(&train_variant(&fixture, &run, layout, variant).unwrap())
                };
                let kept = train(Recompute::None, None);
                assert!(
                    train(Recompute::Full, Some(3)) == kept,
                    "{name} {layout:?}: other bits"
                );
            }
        }
    }
}
