//! Everything that divides, repeats or delays work, in all combinations, over some steps, against one rank.

use candle_core::DType;
use candle_parallel::{Recompute, ZeroStage};

use crate::device::devices;
use crate::fixture::{Fixture, Run};
use crate::half_precision::{assert_near, gradient_tolerance};
use crate::layouts::assert_same;
use crate::run::{Layout, Variant, train_variant};

/// Every stage of ZeRO, with and without overlap, on every layout of these degrees.
fn layouts() -> Vec<Layout> {
    let mut layouts = Vec::new();
    for (pp, tp) in [(1, 1), (1, 2), (2, 1), (2, 2)] {
        for dp in [1, 2, 4] {
            for (zero, tile_linears) in [
                (ZeroStage::Zero, 1),
                (ZeroStage::One, 1),
                (ZeroStage::Two, 1),
                (ZeroStage::Three, 1),
                (ZeroStage::Three, 3),
            ] {
                for overlap in [true, false] {
                    layouts.push(Layout {
                        zero,
                        tile_linears,
                        overlap,
                        ..Layout::new(pp, dp, tp)
                    });
                }
            }
        }
    }
    layouts
}

fn check(dtype: DType) {
    if devices().iter().any(|device| !device.is_cpu()) {
        eprintln!("not tested on a GPU: `layouts` is, of which this is more");
        return;
    }
    let fixture = Fixture::new("gqa");
    let run = Run {
        steps: 4,
        seq_len: 6,
        micro_batch_size: 1,
        global_batch_size: 4,
        ..fixture.run.clone()
    };
    let train = |layout, recompute| {
        let variant = Variant {
            dtype,
            recompute,
            ..Variant::default()
        };
        train_variant(&fixture, &run, layout, variant).unwrap()
    };
    let one_rank = train(Layout::new(1, 1, 1), Recompute::None);
    for layout in layouts() {
        for recompute in [Recompute::None, Recompute::Full] {
            let ours = train(layout, recompute);
            let what = format!("{dtype:?} {layout:?} {recompute:?}");
            match dtype {
                DType::F32 => assert_same(&ours, &one_rank, &what),
                // Without tensor parallelism and tiles every result is rounded where one rank rounds it, and gradients add up in f32.
                _ if layout.tp == 1 && layout.tile_linears == 1 => {
                    assert_near(&ours, &one_rank, 1e-6, &what);
                }
                _ => assert_near(&ours, &one_rank, gradient_tolerance(dtype), &what),
            }
        }
    }
}

#[test]
fn all_combinations_in_f32_equal_one_rank() {
    check(DType::F32);
}

#[test]
fn all_combinations_in_bf16_equal_one_rank_up_to_rounding() {
    check(DType::BF16);
}
