//! Weights and gradients that replicas divide (ZeRO-2, ZeRO-3), over all of them or within groups.

use candle_comm::ProcessGroup;
use candle_core::{DType, Result, Tensor};
use candle_nn::Init;
use candle_ops::QuantizedType;
use candle_parallel::{
    AdamWConfig, DataParallel, DistributedOptimizer, Gradients, Loss, ModelPart, Offload,
    ParamStore, Pass, Pipeline, PlainHead, ReduceType, Schedule, ZeroStage, plain_head,
};
use tempfile::tempdir;

use crate::chain::{Bits, Chain, HIDDEN, Values, gather_weights, local_bits};
use crate::check::{assert_says, assert_values_close, message, on_mesh, on_mesh_with_delays};
use crate::traffic::{padded_values, quantized_values};

const STAGES: [ZeroStage; 3] = [ZeroStage::One, ZeroStage::Two, ZeroStage::Three];

pub fn grouped(zero: ZeroStage, zero_group: Option<usize>) -> DataParallel {
    DataParallel {
        zero,
        zero_group,
        ..DataParallel::default()
    }
}

/// Whole weights on rank 0, the first step's norm and the last one's loss after steps on micro-batches of which 12 replicas' worth is the same however many there are; frozen
/// parameters and tied ones among them.
pub fn trained(
    layout: (usize, usize, usize),
    tied: bool,
    replicas: DataParallel,
) -> (Values, f64, f64) {
    trained_with(layout, tied, replicas, &Offload::default())
}

/// [`trained`] with what ranks keep away.
pub fn trained_with(
    layout: (usize, usize, usize),
    tied: bool,
    replicas: DataParallel,
    offload: &Offload,
) -> (Values, f64, f64) {
    let all = on_mesh(layout, |mesh| {
        let chain = Chain {
            tied,
            fused: true,
            ..Chain::default()
        };
        let store = ParamStore::init(5)
            .with_data_parallel(replicas)
            .with_offload(offload.clone())
            .freeze(|name| name.contains("layers.1.down"));
        let part = chain.part(&mesh, &store)?;
        // The update is that of g / (|g| + eps): with the usual eps, gradients that are nothing but rounding change it.
        let adamw = AdamWConfig {
            eps: 1e-4,
            ..AdamWConfig::default()
        };
        let mut optimizer = DistributedOptimizer::adamw(part.params(), &mesh, adamw)?;
        let mut gradients = Gradients::new(part.params(), &mesh)?;
        let pipeline = Pipeline::new(Schedule::OneForwardOneBackward, &mesh);
        let (rank, dp) = (mesh.dp.rank(), mesh.dp.world_size());
        let (mut norms, mut loss) = (Vec::new(), 0.0);
        for step in 0..3 {
            let all = chain.micro_batches(step, 12)?;
            let own = &all[rank * 12 / dp..(rank + 1) * 12 / dp];
            pipeline.forward_backward(&part, own, &mut gradients)?;
            let report = optimizer.step(&mut gradients, 0.01, Some(0.5))?;
            norms.push(report.grad_norm);
            loss = report.loss.mean;
        }
        Ok((gather_weights(&part, &mesh)?, norms[0], loss))
    });
    all.into_iter().next().unwrap_or_default()
}

#[test]
fn groups_of_replicas_train_like_one_rank() {
    for tied in [false, true] {
        let (want, want_norm, _) = trained((1, 1, 1), tied, ZeroStage::Zero.into());
        for (layout, len) in [
            ((1, 4, 1), Some(2)),
            ((1, 6, 1), Some(3)),
            ((2, 4, 1), Some(2)),
            ((1, 4, 2), Some(2)),
            ((2, 3, 1), None),
        ] {
            for zero in STAGES {
                let (got, norm, _) = trained(layout, tied, grouped(zero, len));
                let what = format!("{layout:?} {zero:?} {len:?}, tied {tied}");
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

pub fn step(part: &ModelPart, mesh: &candle_comm::Mesh, batches: &[Pass]) -> Result<()> {
    let mut optimizer = DistributedOptimizer::adamw(part.params(), mesh, AdamWConfig::default())?;
    let mut gradients = Gradients::new(part.params(), mesh)?;
    let pipeline = Pipeline::new(Schedule::OneForwardOneBackward, mesh);
    pipeline.forward_backward(part, batches, &mut gradients)?;
    optimizer.step(&mut gradients, 0.01, None)?;
    part.params().wait_for_updates()
}

#[test]
fn groups_move_weights_and_gradients_inside_and_slices_of_gradients_between() {
    for zero in STAGES {
        on_mesh((1, 6, 1), |mesh| {
            let chain = Chain::default();
            let store = ParamStore::init(5).with_data_parallel(grouped(zero, Some(3)));
            let part = chain.part(&mesh, &store)?;
            let params = part.params();
            assert_eq!(params.shard_group().world_size(), 3);
            assert_eq!(params.copy_group().world_size(), 2);
            let batches = chain.micro_batches(mesh.dp.rank() as u64, 1)?;
            step(&part, &mesh, &batches)?;
            let shard = params.shard_group().counters();
            let once = shard.bytes("reduce_scatter");
            // In two passes, but for the head, which has one.
            let of_head = padded_values(&part, 6, 1).last().copied().unwrap_or(0);
            let twice = match zero {
                ZeroStage::Three => once - (of_head * 4 / 3 * 2) as u64,
                _ => 0,
            };
            assert_eq!(shard.bytes("all_gather"), once + twice);
            // 2 (N - 1) / N of a third of the values, N = 2; inside it is 2/3 of all.
            let copies = params.copy_group().counters();
            assert_eq!(copies.bytes("all_reduce"), once / 2);
            assert_eq!(copies.total().bytes, once / 2);
            Ok(())
        });
    }
}

#[test]
fn a_stage_of_one_bucket_divides_it_for_each_micro_batch() {
    on_mesh((1, 2, 2), |mesh| {
        let store = ParamStore::init(5)
            .with_data_parallel(ZeroStage::Two)
            .freeze(|name| !name.contains("layers.2"));
        let chain = Chain::default();
        let part = chain.part(&mesh, &store)?;
        let batches = chain.micro_batches(10 * mesh.dp.rank() as u64, 3)?;
        step(&part, &mesh, &batches)
    });
}

#[test]
fn copies_in_other_groups_have_the_same_bits() {
    for zero in STAGES {
        let ranks = on_mesh((1, 4, 1), |mesh| {
            let store = ParamStore::init(5).with_data_parallel(grouped(zero, Some(2)));
            let chain = Chain::default();
            let part = chain.part(&mesh, &store)?;
            let batches = chain.micro_batches(mesh.dp.rank() as u64, 2)?;
            step(&part, &mesh, &batches)?;
            Ok(local_bits(&part))
        });
        assert!(ranks.iter().all(|bits| *bits == ranks[0]), "{zero:?}");
    }
}

/// Three steps of two micro-batches, with an evaluation after each if it `evaluates`: every rank's weights, and the bytes that weights have moved
/// between the ranks that divide them, and those that divide a second copy.
fn trained_with_copies(
    dp: usize,
    replicas: DataParallel,
    offload: &Offload,
    evaluates: bool,
) -> Vec<(Bits, [u64; 2])> {
    on_mesh((1, dp, 1), |mesh| {
        let chain = Chain {
            // An evaluation needs what is tied once more.
            tied: evaluates,
            ..Chain::default()
        };
        let store = ParamStore::init(5)
            .with_data_parallel(replicas)
            .with_offload(offload.clone());
        let part = chain.part(&mesh, &store)?;
        let params = part.params();
        let mut optimizer = DistributedOptimizer::adamw(params, &mesh, AdamWConfig::default())?;
        let mut gradients = Gradients::new(params, &mesh)?;
        let pipeline = Pipeline::new(Schedule::OneForwardOneBackward, &mesh);
        for step in 0..3 {
            let batches = chain.micro_batches(10 * step + mesh.dp.rank() as u64, 2)?;
            if evaluates {
                pipeline.evaluate(&part, batches.clone().into_iter().map(Ok))?;
            }
            pipeline.forward_backward(&part, &batches, &mut gradients)?;
            optimizer.step(&mut gradients, 0.01, None)?;
        }
        let gathered = |group: &ProcessGroup| group.counters().bytes("all_gather");
        let moved = [
            gathered(params.shard_group()),
            params.secondary_group().map_or(0, gathered),
        ];
        Ok((local_bits(&part), moved))
    })
}

#[test]
fn a_second_copy_changes_no_bit() {
    let dir = tempdir().unwrap();
    for (dp, zero_group, len) in [(4, None, 2), (6, None, 3), (8, Some(4), 2), (2, None, 2)] {
        for (quantize_weights, overlap) in [(false, true), (true, false)] {
            let replicas = |zero_secondary| DataParallel {
                zero_secondary,
                quantize_weights,
                overlap,
                ..grouped(ZeroStage::Three, zero_group)
            };
            let places = [Offload::default(), Offload::all().in_dir(dir.path())];
            let trained = |copy, place| {
                let ranks = trained_with_copies(dp, replicas(copy), place, true);
                let bits = ranks.into_iter().map(|(bits, _)| bits);
                bits.collect::<Vec<_>>()
            };
            let want = trained(None, &places[0]);
            for place in &places {
                let what =
                    format!("{dp} {zero_group:?} {len}, 8 bits {quantize_weights}, {place:?}");
                assert!(trained(Some(len), place) == want, "{what}");
            }
        }
    }
}

#[test]
fn weights_move_between_groups_once_a_step_if_there_is_a_second_copy() {
    let (dp, len) = (6, 3);
    let replicas = |zero_secondary| DataParallel {
        zero_secondary,
        ..grouped(ZeroStage::Three, None)
    };
    let moved = |copy| trained_with_copies(dp, replicas(copy), &Offload::default(), false)[0].1;
    let ([without, none], [across, within]) = (moved(None), moved(Some(len)));
    let padded = on_mesh((1, dp, 1), |mesh| {
        let store = ParamStore::init(5).with_data_parallel(ZeroStage::Three);
        Ok(padded_values(&Chain::default().part(&mesh, &store)?, dp, 1))
    });
    let [first, inner @ .., head] = padded[0].as_slice() else {
        panic!("{padded:?}");
    };
    let inner: usize = inner.iter().sum();
    // Of so many values a rank of a group sends its part to each other one.
    let sent = |values: usize, group: usize| (4 * values / group * (group - 1)) as u64;
    // In three steps of two micro-batches each is gathered for four passes, but the first block, which stays from the first micro-batch to the
    // second, and the head, which has one pass in each.
    let gathers = |times: [usize; 3], group| {
        let values = [*first, inner, *head].into_iter().zip(times);
        3 * values
            .map(|(len, times)| times as u64 * sent(len, group))
            .sum::<u64>()
    };
    assert_eq!(without, gathers([3, 4, 2], dp));
    assert_eq!(none, 0);
    assert_eq!(across, gathers([1, 1, 1], dp));
    assert_eq!(within, gathers([2, 3, 1], len));
}

/// Bytes of the packed form of a rank's slice of each bucket: 4 for each 256 values, and one a value.
fn packed_slices(part: &ModelPart, dp: usize) -> u64 {
    let slices = quantized_values(part, dp).into_iter().map(|len| len / dp);
    slices.map(|len| len + 4 * len.div_ceil(256)).sum::<usize>() as u64
}

#[test]
fn narrow_gradients_and_weights_move_a_half_and_a_quarter_of_the_bytes() {
    let dp = 3;
    for zero in STAGES {
        for reduce in [ReduceType::Bf16, ReduceType::Int8] {
            let quantize_weights = zero == ZeroStage::Three;
            let replicas = DataParallel {
                zero,
                reduce,
                quantize_weights,
                ..DataParallel::default()
            };
            on_mesh((1, dp, 1), |mesh| {
                let chain = Chain {
                    vocab: 2000,
                    ..Chain::default()
                };
                let part = chain.part(&mesh, &ParamStore::init(5).with_data_parallel(replicas))?;
                step(
                    &part,
                    &mesh,
                    &chain.micro_batches(mesh.dp.rank() as u64, 1)?,
                )?;
                let counters = mesh.dp.counters();
                let is_aligned = quantize_weights || reduce == ReduceType::Int8;
                let lens = if is_aligned {
                    quantized_values(&part, dp)
                } else {
                    padded_values(&part, dp, 1)
                };
                let slices = lens.iter().sum::<usize>() / dp;
                let (slices, others) = (slices as u64, dp as u64 - 1);
                let packed = packed_slices(&part, dp);
                let ratio = packed as f64 / (4 * slices) as f64;
                assert!(!is_aligned || (0.25..0.26).contains(&ratio), "{ratio}");
                match reduce {
                    ReduceType::Bf16 => {
                        assert_eq!(counters.bytes("reduce_scatter"), 2 * slices * others);
                    }
                    _ => {
                        assert_eq!(counters.bytes("all_to_all"), packed * others);
                        assert_eq!(counters.bytes("reduce_scatter"), 0);
                    }
                }
                // In two passes, but for the head, which has one.
                let of_head = lens.last().copied().unwrap_or(0) / dp;
                let of_head = (of_head + 4 * of_head.div_ceil(256)) as u64;
                let gathered = match quantize_weights {
                    true => 2 * packed - of_head,
                    false => 4 * slices,
                };
                assert_eq!(counters.bytes("all_gather"), gathered * others);
                Ok(())
            });
        }
    }
}

#[test]
fn narrow_gradients_and_weights_stay_close_and_equal_on_every_rank() {
    for (zero, zero_group, zero_secondary) in [
        (ZeroStage::Zero, None, None),
        (ZeroStage::One, None, None),
        (ZeroStage::Two, Some(2), None),
        (ZeroStage::Three, None, None),
        (ZeroStage::Three, Some(2), None),
        // Over groups, of which there is one.
        (ZeroStage::Three, None, Some(2)),
        (ZeroStage::Three, None, Some(4)),
    ] {
        let exact = DataParallel {
            zero_secondary,
            ..grouped(zero, zero_group)
        };
        let (_, want_norm, want_loss) = trained((1, 4, 1), false, exact);
        for (reduce, error_bound) in [
            (ReduceType::Bf16, 0.01),
            (ReduceType::Int8, 0.01),
            (ReduceType::Int4, 0.1),
        ] {
            if zero == ZeroStage::Zero && reduce == ReduceType::Int8
                || zero_secondary.is_none() && reduce == ReduceType::Int4
            {
                continue;
            }
            let narrow = DataParallel {
                reduce,
                quantize_weights: zero == ZeroStage::Three,
                ..exact
            };
            let what = format!("{narrow:?}");
            let (_, got_norm, got_loss) = trained((1, 4, 1), false, narrow);
            let norm_error = (got_norm - want_norm).abs() / want_norm;
            assert!(
                norm_error > 0.0 && norm_error < error_bound,
                "{what}: {norm_error}"
            );
            let loss_error = (got_loss - want_loss).abs() / want_loss;
            assert!(
                loss_error > 0.0 && loss_error < error_bound,
                "{what}: {loss_error}"
            );
            for delays in [None, Some(4)] {
                let ranks = on_mesh_with_delays((1, 4, 1), delays, |mesh| {
                    let chain = Chain::default();
                    let store = ParamStore::init(5).with_data_parallel(narrow);
                    let part = chain.part(&mesh, &store)?;
                    step(
                        &part,
                        &mesh,
                        &chain.micro_batches(mesh.dp.rank() as u64, 2)?,
                    )?;
                    Ok(local_bits(&part))
                });
                assert!(ranks.iter().all(|bits| *bits == ranks[0]), "{what}");
            }
        }
    }
}

/// The gradients of the mean loss of a micro-batch for each of `dp` replicas, or those of replica `only` alone, and the bytes that a rank sent
/// to sum them, within its group and to other ones.
fn gradients_of(
    dp: usize,
    only: Option<usize>,
    replicas: DataParallel,
) -> (Vec<Vec<f32>>, usize, [u64; 2]) {
    let mesh = (1, if only.is_some() { 1 } else { dp }, 1);
    let all = on_mesh(mesh, |mesh| {
        let chain = Chain {
            // Slices of no round number of blocks.
            vocab: 1999,
            ..Chain::default()
        };
        let part = chain.part(&mesh, &ParamStore::init(5).with_data_parallel(replicas))?;
        let params = part.params();
        let mut gradients = Gradients::new(params, &mesh)?;
        let rank = only.unwrap_or(mesh.dp.rank());
        let batches = chain.micro_batches(rank as u64, 1)?;
        let pipeline = Pipeline::new(Schedule::OneForwardOneBackward, &mesh);
        pipeline.forward_backward(&part, &batches, &mut gradients)?;
        let reduced = gradients.reduce()?;
        let sent = |group: &ProcessGroup| group.counters().bytes("all_to_all");
        let sent = params
            .hop_groups()
            .map_or([0; 2], |groups| groups.each_ref().map(sent));
        let values = reduced.local_gradients()?.into_values();
        let values = values.map(|grad| grad.flatten_all()?.to_vec1::<f32>());
        let num_targets = reduced.loss().num_targets;
        Ok((values.collect::<Result<_>>()?, num_targets, sent))
    });
    all.into_iter().next().unwrap_or_default()
}

#[test]
fn gradients_in_two_hops_are_off_by_their_roundings_and_cross_groups_once() {
    let (dp, len) = (6, 3);
    let max = |grads: &[Vec<f32>]| {
        let values = grads.iter().flatten();
        values.fold(0f64, |max, &x| max.max(f64::from(x.abs())))
    };
    let (want, num_targets, _) = gradients_of(dp, None, ZeroStage::Three.into());
    // What a replica adds to the sum, at most.
    let summands = (0..dp).map(|rank| {
        let (own, own_targets, _) = gradients_of(dp, Some(rank), ZeroStage::Three.into());
        max(&own) * own_targets as f64 / num_targets as f64
    });
    let summands: f64 = summands.sum();
    let padded = on_mesh((1, dp, 1), |mesh| {
        let chain = Chain {
            vocab: 1999,
            ..Chain::default()
        };
        let store = ParamStore::init(5).with_data_parallel(ZeroStage::Three);
        Ok(quantized_values(&chain.part(&mesh, &store)?, dp))
    });
    for (reduce, packed, max_code, error_bound) in [
        (ReduceType::Int8, QuantizedType::Int8, 127.0, 0.01),
        (ReduceType::Int4, QuantizedType::Int4, 7.0, 0.2),
    ] {
        let replicas = DataParallel {
            reduce,
            zero_secondary: Some(len),
            ..grouped(ZeroStage::Three, None)
        };
        let (got, _, sent) = gradients_of(dp, None, replicas);
        let (mut worst, mut errors, mut squares) = (0f64, 0f64, 0f64);
        for (got, want) in got.iter().flatten().zip(want.iter().flatten()) {
            let error = f64::from(got - want).abs();
            worst = worst.max(error);
            errors += error.powi(2);
            squares += f64::from(*want).powi(2);
        }
        let error = (errors / squares).sqrt();
        println!("{reduce:?}: error {error:.2e} of the norm, the worst value {worst:.2e}");
        assert!(error > 0.0 && error < error_bound, "{reduce:?}: {error}");
        // Half a step of what each replica sends, and of what each group does: no more than the sum of its replicas and their roundings.
        let first = summands / max_code / 2.0;
        let second = (summands + first) / max_code / 2.0;
        assert!(worst < 1.001 * (first + second), "{reduce:?}: {worst}");
        // To each other rank of the group one slice for each group; to each other group one.
        let slices = padded[0].iter().map(|values| packed.row_bytes(values / dp));
        let slices = slices.sum::<usize>() as u64;
        let num_groups = (dp / len) as u64;
        let within = (len as u64 - 1) * num_groups * slices;
        assert_eq!(sent, [within, (num_groups - 1) * slices], "{reduce:?}");
    }
}

/// A head whose small parameter has gradients 100,000 times smaller than those of the one beside it.
struct Beside {
    large: Tensor,
    small: Tensor,
}

impl PlainHead for Beside {
    fn loss(&self, xs: &Tensor, pass: &Pass) -> Result<Loss> {
        let own = ((self.large.sum_all()? * 1e5)? + self.small.sum_all()?)?;
        let sum = (xs.sum_all()? + own)?;
        Ok(Loss::new(sum, pass.num_targets()? as f64))
    }
}

#[test]
fn a_small_parameter_beside_large_gradients_is_trained() {
    for (zero, reduce, zero_secondary) in [
        (ZeroStage::One, ReduceType::Int8, None),
        (ZeroStage::Two, ReduceType::Int8, None),
        (ZeroStage::Three, ReduceType::Int8, None),
        (ZeroStage::Three, ReduceType::Int4, Some(2)),
    ] {
        let replicas = DataParallel {
            zero,
            reduce,
            zero_secondary,
            ..DataParallel::default()
        };
        on_mesh((1, 4, 1), |mesh| {
            let chain = Chain::default();
            let store = ParamStore::init(5).with_data_parallel(replicas);
            let vb = store.builder(DType::F32, mesh.world.device());
            let part = ModelPart::build(&mesh, &vb, 2, HIDDEN, |index, vb| match index {
                0 => chain.block(0, &mesh.tp, &vb),
                _ => Ok(plain_head(Beside {
                    large: vb.get(301, "large", Init::Const(0.0))?,
                    small: vb.get(6, "small", Init::Const(0.0))?,
                })),
            })?;
            let params = part.params();
            let mut optimizer = DistributedOptimizer::adamw(params, &mesh, AdamWConfig::default())?;
            let mut gradients = Gradients::new(params, &mesh)?;
            let pipeline = Pipeline::new(Schedule::GPipe, &mesh);
            // What is left of a step's buffers is in the next one's.
            for step in 1..=3 {
                let batches = chain.micro_batches(mesh.dp.rank() as u64, 2)?;
                pipeline.forward_backward(&part, &batches, &mut gradients)?;
                optimizer.step(&mut gradients, 1.0, None)?;
                let index = params.iter().position(|param| param.name == "small");
                let values = params.values(index.unwrap())?.to_vec1::<f32>()?;
                let is_trained = |x: &f32| (x + step as f32).abs() < 0.1 * step as f32;
                assert!(values.iter().all(is_trained), "{replicas:?}: {values:?}");
            }
            Ok(())
        });
    }
}

#[test]
fn divided_weights_are_here_in_the_passes_of_their_block_only() {
    on_mesh((1, 2, 1), |mesh| {
        let chain = Chain::default();
        let store = ParamStore::init(5).with_data_parallel(ZeroStage::Three);
        let part = chain.part(&mesh, &store)?;
        let params = part.params();
        let is_anything_here = || params.iter().any(|param| param.is_present());
        assert!(!is_anything_here());
        let said = message(params.get(0).values());
        assert_says(
            &said,
            &["embed.weight", "ZeRO-3", "hint", "Parameters::values"],
        );
        let before = local_bits(&part);
        // The same as a whole model draws.
        let whole = chain.part(&mesh, &ParamStore::init(5))?;
        assert!(before == local_bits(&whole));
        step(
            &part,
            &mesh,
            &chain.micro_batches(mesh.dp.rank() as u64, 2)?,
        )?;
        assert!(!is_anything_here());
        assert!(local_bits(&part) != before);
        // What a user puts in is divided too.
        let values = params.values(1)?.ones_like()?;
        params.refill(1, &values)?;
        assert!(
            params
                .values(1)?
                .flatten_all()?
                .to_vec1::<f32>()?
                .iter()
                .all(|x| *x == 1.0)
        );
        Ok(())
    });
}

#[test]
fn one_replica_divides_nothing() {
    on_mesh((1, 1, 2), |mesh| {
        let store = ParamStore::init(5).with_data_parallel(ZeroStage::Three);
        let part = Chain::default().part(&mesh, &store)?;
        assert!(part.params().iter().all(|param| param.is_present()));
        Ok(())
    });
}

#[test]
fn groups_that_do_not_fit_are_refused() {
    let refused = |dp, zero, len| message(grouped(zero, len).validate(dp));
    let words = ["zero-group(4)", "dp(6)", "hint"];
    assert_says(&refused(6, ZeroStage::Three, Some(4)), &words);
    assert_says(
        &refused(6, ZeroStage::One, Some(1)),
        &["zero-group(1)", "at least two"],
    );
    let narrow = |zero, quantize_weights| DataParallel {
        zero,
        reduce: ReduceType::Int8,
        quantize_weights,
        ..DataParallel::default()
    };
    let without_groups = DataParallel {
        reduce: ReduceType::Int4,
        ..narrow(ZeroStage::Three, false)
    };
    let said = message(without_groups.validate(4));
    assert_says(&said, &["int4", "without zero-secondary", "hint", "int8"]);
    let said = message(narrow(ZeroStage::Two, true).validate(2));
    assert_says(&said, &["quantize-weights", "stage 3", "hint"]);
    let said = message(narrow(ZeroStage::Zero, false).validate(2));
    assert_says(&said, &["quantize-gradients", "stage 0", "hint"]);
    assert_says(
        &refused(6, ZeroStage::Zero, Some(2)),
        &["ZeRO stage 0", "hint"],
    );
    let copied = |zero, zero_group, len| {
        let replicas = DataParallel {
            zero_secondary: Some(len),
            ..grouped(zero, zero_group)
        };
        message(replicas.validate(8))
    };
    assert_says(
        &copied(ZeroStage::Two, None, 2),
        &["zero-secondary(2)", "stage 3", "hint"],
    );
    assert_says(
        &copied(ZeroStage::Three, None, 3),
        &["zero-secondary(3)", "dp(8)", "such as 2"],
    );
    assert_says(
        &copied(ZeroStage::Three, Some(4), 8),
        &["zero-secondary(8)", "zero-group(4)", "such as 4"],
    );
    let in_tiles = DataParallel {
        zero_secondary: Some(2),
        tile_linears: 3,
        ..DataParallel::from(ZeroStage::Three)
    };
    assert_says(
        &message(in_tiles.validate(4)),
        &["zero-secondary(2)", "tile-linears(3)", "leave one"],
    );
}
