//! Weights that ZeRO-3 gathers tile by tile.

use candle_parallel::{
    DataParallel, MemoryCategory, Offload, ParamStore, Pipeline, ReduceType, Schedule, ZeroStage,
};
use tempfile::tempdir;

use crate::chain::{Chain, HIDDEN, local_bits};
use crate::check::{assert_says, assert_values_close, message, on_mesh, on_mesh_with_delays};
use crate::sharded::{grouped, step, trained, trained_with};

fn tiled(tile_linears: usize, zero_group: Option<usize>) -> DataParallel {
    DataParallel {
        tile_linears,
        ..grouped(ZeroStage::Three, zero_group)
    }
}

#[test]
fn tiles_train_like_one_rank() {
    for tied in [false, true] {
        let (want, want_norm, _) = trained((1, 1, 1), tied, ZeroStage::Zero.into());
        // 100 are more than any weight has rows.
        for (layout, tiles, group) in [
            ((1, 2, 1), 2, None),
            ((1, 3, 1), 5, None),
            ((1, 4, 2), 3, Some(2)),
            ((2, 2, 2), 2, None),
            ((3, 2, 1), 100, None),
        ] {
            for overlap in [true, false] {
                let replicas = DataParallel {
                    overlap,
                    ..tiled(tiles, group)
                };
                let (got, norm, _) = trained(layout, tied, replicas);
                let what = format!("{layout:?} {replicas:?}, tied {tied}");
                assert!(
                    (norm - want_norm).abs() < 1e-5 * want_norm,
                    "{what}: {norm}"
                );
                for (name, values) in &want {
                    assert_values_close(&format!("{what} {name}"), &got[name], values);
                }
            }
        }
    }
}

/// On one rank, too, where nothing is gathered.
#[test]
fn tiles_of_weights_that_are_away_train_as_those_that_replicas_divide() {
    let dir = tempdir().unwrap();
    let away = Offload::all().in_dir(dir.path());
    for tied in [false, true] {
        let (want, ..) = trained((1, 1, 1), tied, ZeroStage::Zero.into());
        for (tiles, zero, overlap) in [
            (2, ZeroStage::Zero, true),
            (3, ZeroStage::One, false),
            (100, ZeroStage::Three, true),
        ] {
            let replicas = DataParallel {
                tile_linears: tiles,
                overlap,
                ..zero.into()
            };
            let (got, ..) = trained_with((1, 1, 1), tied, replicas, &away);
            for (name, values) in &want {
                assert_values_close(&format!("{replicas:?} {tied} {name}"), &got[name], values);
            }
        }
        for (layout, tiles, group) in [
            ((1, 2, 1), 2, None),
            ((1, 3, 1), 5, None),
            ((1, 4, 2), 3, Some(2)),
            ((3, 2, 1), 100, None),
        ] {
            for quantize_weights in [false, true] {
                let replicas = DataParallel {
                    quantize_weights,
                    ..tiled(tiles, group)
                };
                let here = trained(layout, tied, replicas);
                let what = format!("{layout:?} {replicas:?}, tied {tied}");
                assert!(
                    trained_with(layout, tied, replicas, &away) == here,
                    "{what}"
                );
            }
        }
    }
}

#[test]
fn of_one_layer_that_is_too_large_only_tiles_are_here() {
    const VOCAB: usize = 4000;
    let dir = tempdir().unwrap();
    let whole = VOCAB * HIDDEN * 4;
    for (tiles, overlap) in [(4, true), (8, false), (16, true)] {
        on_mesh((1, 1, 1), |mesh| {
            let chain = Chain {
                vocab: VOCAB,
                ..Chain::default()
            };
            let replicas = DataParallel {
                tile_linears: tiles,
                overlap,
                ..ZeroStage::Zero.into()
            };
            let params = Offload {
                params: true,
                ..Offload::default()
            };
            let store = ParamStore::init(5)
                .with_data_parallel(replicas)
                .with_offload(params.in_dir(dir.path()))
                .freeze(|_| true);
            let part = chain.part(&mesh, &store)?;
            let pipeline = Pipeline::new(Schedule::OneForwardOneBackward, &mesh);
            pipeline.evaluate(&part, chain.micro_batches(0, 2)?.into_iter().map(Ok))?;
            let gathered = part.params().meter().report().of(MemoryCategory::Gathered);
            assert_eq!(gathered.now, 0);
            // One that is used, and one on its way.
            let tiles_here = if overlap { 2 } else { 1 };
            let most = tiles_here * whole.div_ceil(tiles) + 16 * HIDDEN * HIDDEN * 4;
            let peak = gathered.peak as usize;
            assert!(
                (whole / tiles..=most).contains(&peak),
                "{tiles} tiles: {peak} of {most}"
            );
            Ok(())
        });
    }
}

#[test]
fn delays_change_no_bit_and_tiles_in_8_bits_are_equal_on_every_rank() {
    for quantize_weights in [false, true] {
        let replicas = DataParallel {
            quantize_weights,
            reduce: ReduceType::Bf16,
            ..tiled(3, Some(2))
        };
        let run = |delays, overlap| {
            on_mesh_with_delays((1, 4, 1), delays, |mesh| {
                let chain = Chain::default();
                let replicas = DataParallel {
                    overlap,
                    ..replicas
                };
                let store = ParamStore::init(5).with_data_parallel(replicas);
                let part = chain.part(&mesh, &store)?;
                let batches = chain.micro_batches(mesh.dp.rank() as u64, 2)?;
                step(&part, &mesh, &batches)?;
                Ok(local_bits(&part))
            })
        };
        let ranks = run(None, true);
        assert!(ranks.iter().all(|bits| *bits == ranks[0]));
        assert!(run(Some(4), true) == ranks && run(Some(5), false) == ranks);
    }
}

#[test]
fn the_peak_of_gathered_weights_falls_with_the_tiles_and_the_bytes_moved_are_the_same() {
    const VOCAB: usize = 4000;
    let dp = 2;
    for overlap in [true, false] {
        let mut peaks = Vec::new();
        for tiles in [2, 4, 8] {
            let peak_of_ranks = on_mesh((1, dp, 1), |mesh| {
                let chain = Chain {
                    vocab: VOCAB,
                    ..Chain::default()
                };
                let replicas = DataParallel {
                    overlap,
                    ..tiled(tiles, None)
                };
                let store = ParamStore::init(5).with_data_parallel(replicas);
                let part = chain.part(&mesh, &store)?;
                let group = part.params().tile_group();
                let batches = chain.micro_batches(mesh.dp.rank() as u64, 1)?;
                step(&part, &mesh, &batches)?;
                let params = part.params();
                let (mut moved, mut whole, mut rest) = (0, 0, 0);
                for param in params.iter() {
                    match param.global_shape.rank() {
                        // The backward pass of an embedding reads no weight.
                        2 if param.name.starts_with("embed") => moved += param.num_bytes(),
                        2 => moved += 2 * param.num_bytes(),
                        _ => rest += param.num_bytes(),
                    }
                    whole += param.num_bytes();
                }
                let broadcast = group.counters().bytes("broadcast") as usize;
                assert_eq!(broadcast, moved / dp * (dp - 1), "{tiles} tiles");
                assert!(whole > 2 * VOCAB * HIDDEN * 4);
                let gathered = params.meter().report().of(MemoryCategory::Gathered);
                assert_eq!(gathered.now, 0);
                // One that is used, and one on its way, with what it is received with and, in pieces, joined.
                let tile = VOCAB / tiles * HIDDEN * 4;
                let most = 4 * tile + rest + 2 * 64 * dp * 4;
                let peak = gathered.peak as usize;
                assert!((tile..=most).contains(&peak), "{tiles} tiles: {gathered:?}");
                Ok(peak)
            });
            peaks.push(peak_of_ranks[0]);
        }
        assert!(
            peaks[0] > 3 * peaks[2] / 2 && peaks[1] < peaks[0],
            "{peaks:?}"
        );
    }
}

#[test]
fn what_cannot_be_tiled_is_refused() {
    let two = DataParallel {
        tile_linears: 4,
        ..ZeroStage::Two.into()
    };
    assert_says(
        &message(Offload::optimizer().validate(&two, true)),
        &["tile-linears(4)", "ZeRO stage 3", "offloaded", "hint"],
    );
    assert!(Offload::all().validate(&two, true).is_ok());
    assert!(Offload::all().validate(&two, false).is_err());
    assert_says(
        &message(tiled(0, None).validate(2)),
        &["tile-linears is 0", "from 1 on"],
    );
    assert!(tiled(1000, None).validate(2).is_ok());
}
