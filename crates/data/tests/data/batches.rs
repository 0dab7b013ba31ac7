use candle_core::{Device, IndexOp};
use candle_data::{BatchConfig, BatchRamp, Batches, SampleConfig, Samples, Tokens};
use candle_ops::IGNORE_INDEX;
use candle_parallel::Pass;

use crate::assert_error;

fn config(micro: usize, global: usize, shuffle: bool) -> BatchConfig {
    BatchConfig {
        micro_batch_size: micro,
        global_batch_size: global,
        shuffle,
        seed: 7,
        uneven: false,
        ramp: None,
    }
}

/// Of a text of ids 0, 1, .., in pieces of `seq_len`.
fn batches(
    (num_tokens, seq_len): (u32, usize),
    config: &BatchConfig,
    (dp_rank, dp): (usize, usize),
) -> Batches {
    let tokens = Tokens::from_ids((0..num_tokens).collect()).unwrap();
    let samples = Samples::new(&tokens, SampleConfig::new(seq_len)).unwrap();
    Batches::new(&samples, config.clone(), dp_rank, dp, &Device::Cpu).unwrap()
}

/// Each sequence's index in the text, checking that each token has the next one as its target, but the last of the text and padding.
fn samples(micro_batches: &[Pass], num_tokens: u32, t: usize) -> Vec<usize> {
    let mut samples = Vec::new();
    for micro_batch in micro_batches {
        let tokens = micro_batch.inputs().to_vec2::<u32>().unwrap();
        let targets = micro_batch.targets().unwrap();
        for (row, tokens) in tokens.iter().enumerate() {
            let targets = targets.i(row).unwrap().to_vec1::<u32>().unwrap();
            if targets.iter().all(|&id| id == IGNORE_INDEX) {
                continue;
            }
            let start = tokens[0];
            assert_eq!(start as usize % t, 0);
            let len = tokens.len().min((num_tokens - start) as usize);
            for (place, (&token, &target)) in tokens.iter().zip(&targets).enumerate() {
                let id = start + place as u32;
                assert!(place >= len || token == id);
                let next = if id + 1 < num_tokens {
                    id + 1
                } else {
                    IGNORE_INDEX
                };
                assert_eq!(target, next);
            }
            samples.push(start as usize / t);
        }
    }
    samples
}

#[test]
fn an_epoch_has_every_sample_once_and_ends_with_a_smaller_batch() {
    let batches = batches((12, 2), &config(1, 4, false), (0, 1));
    assert_eq!(
        (batches.num_samples(), batches.num_steps_per_epoch()),
        (6, 2)
    );
    let taken = |step| samples(&batches.batch(step).unwrap(), 12, 2);
    assert_eq!(taken(0), [0, 1, 2, 3]);
    assert_eq!(taken(1), [4, 5]);
    assert_eq!(taken(2), [0, 1, 2, 3]);
    assert_eq!(batches.position(2).unwrap(), 6);

    // 17 samples, batches of 16, 3 epochs.
    let batches = self::batches((17 * 3, 3), &config(2, 16, true), (0, 1));
    assert_eq!(
        (batches.num_samples(), batches.num_steps_per_epoch()),
        (17, 2)
    );
    let order: Vec<usize> = (0..6)
        .flat_map(|step| samples(&batches.batch(step).unwrap(), 51, 3))
        .collect();
    assert_eq!(order.len(), 51);
    for epoch in order.chunks(17) {
        let mut sorted = epoch.to_vec();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..17).collect::<Vec<_>>());
    }
}

#[test]
fn ranks_take_equal_shares_and_equally_many_micro_batches() {
    for shuffle in [false, true] {
        for num_tokens in [100, 97, 77, 40] {
            let whole = batches((num_tokens, 3), &config(2, 12, shuffle), (0, 1));
            for step in 0..2 * whole.num_steps_per_epoch() {
                let expected = samples(&whole.batch(step).unwrap(), num_tokens, 3);
                let mut counts = Vec::new();
                let mut rows = 0;
                let shares: Vec<usize> = (0..3)
                    .flat_map(|rank| {
                        let share = batches((num_tokens, 3), &config(2, 12, shuffle), (rank, 3))
                            .batch(step)
                            .unwrap();
                        counts.push(share.len());
                        rows += share.iter().map(|m| m.dims().unwrap().0).sum::<usize>();
                        samples(&share, num_tokens, 3)
                    })
                    .collect();
                assert_eq!(shares, expected);
                assert!(counts.iter().all(|&count| count == counts[0]), "{counts:?}");
                // No micro-batch is empty on all ranks.
                assert_eq!(counts[0], expected.len().div_ceil(3).div_ceil(2));
                assert!(rows < expected.len() + 3);
            }
        }
    }
}

#[test]
fn each_shuffled_epoch_is_a_new_permutation_that_depends_on_the_seed_only() {
    let order = |batches: &Batches| -> Vec<usize> {
        (0..21)
            .flat_map(|step| samples(&batches.batch(step).unwrap(), 99, 3))
            .collect()
    };
    let text = (99, 3);
    let seven = order(&batches(text, &config(5, 5, true), (0, 1)));
    assert_eq!(seven.len(), 99);
    assert_ne!(seven[..33], seven[33..66]);
    assert_eq!(
        seven,
        order(&batches(text, &config(1, 5, true), (0, 1))),
        "the micro-batch size changes nothing"
    );
    let other = BatchConfig {
        seed: 8,
        ..config(5, 5, true)
    };
    assert_ne!(seven, order(&batches(text, &other, (0, 1))));

    // A batch is a pure function of the step: out of order, twice, and on a new object.
    let again = batches(text, &config(5, 5, true), (0, 1));
    for step in [6, 2, 6, 13, 0] {
        let start = again.position(step).unwrap();
        let taken = samples(&again.batch(step).unwrap(), 99, 3);
        assert_eq!(taken, seven[start..start + taken.len()]);
    }
}

#[test]
fn the_shuffled_order_is_stable_across_versions() {
    let batches = batches((40, 4), &config(1, 10, true), (0, 1));
    assert_eq!(
        samples(&batches.batch(0).unwrap(), 40, 4),
        [5, 3, 9, 8, 1, 6, 2, 0, 4, 7]
    );
}

#[test]
fn shares_may_differ_by_one_and_have_every_sample_of_a_step() {
    for (micro, global, dp) in [(1, 10, 3), (2, 10, 3), (3, 7, 2), (1, 2, 3), (4, 16, 5)] {
        let config = BatchConfig {
            uneven: true,
            ..config(micro, global, true)
        };
        let whole = batches(
            (200, 4),
            &BatchConfig {
                micro_batch_size: 1,
                ..config.clone()
            },
            (0, 1),
        );
        for step in 0..8 {
            let of_rank = |rank| batches((200, 4), &config, (rank, dp)).batch(step).unwrap();
            let all: Vec<_> = (0..dp).map(of_rank).collect();
            assert!(all.iter().all(|rank| rank.len() == all[0].len()));
            let lens: Vec<usize> = all.iter().map(|rank| samples(rank, 200, 4).len()).collect();
            assert!(lens[0] - lens[dp - 1] <= 1, "{lens:?}");
            let found = all.iter().flat_map(|rank| samples(rank, 200, 4));
            assert!(found.eq(samples(&whole.batch(step).unwrap(), 200, 4)));
        }
    }
}

#[test]
fn impossible_sizes_are_refused_with_the_equation() {
    let tokens = Tokens::from_ids(vec![1; 50]).unwrap();
    let new = |seq_len: usize, config: BatchConfig, rank, dp| {
        let samples = Samples::new(&tokens, SampleConfig::new(seq_len))?;
        Batches::new(&samples, config, rank, dp, &Device::Cpu)
    };
    assert_error(
        new(4, config(2, 10, false), 0, 3),
        &[
            "global_batch_size(10) % (micro_batch_size(2) * dp(3) = 6) = 4 != 0",
            "hint:",
        ],
    );
    assert_error(
        new(4, config(usize::MAX, 10, false), 0, 3),
        &["global_batch_size(10)", "= 55340232221128654845) = 10 != 0"],
    );
    assert_error(
        new(4, config(usize::MAX, usize::MAX, false), 0, 1),
        &[
            "global_batch_size(18446744073709551615) * seq_len(4)",
            "at most 2147483648",
            "hint:",
        ],
    );
    assert_error(
        new(1 << 30, config(1, 3, false), 0, 1),
        &["global_batch_size(3) * seq_len(1073741824) = 3221225472 tokens per step"],
    );
    assert_error(new(0, config(1, 1, false), 0, 1), &["seq_len is 0"]);
    assert_error(
        new(4, config(0, 1, false), 0, 1),
        &["micro_batch_size is 0"],
    );
    assert_error(
        new(4, config(1, 0, false), 0, 1),
        &["global_batch_size is 0"],
    );
    assert_error(new(4, config(1, 1, false), 0, 0), &["dp_world_size is 0"]);
    assert_error(
        new(4, config(1, 2, false), 2, 2),
        &["dp_rank(2)", "dp_world_size(2)"],
    );
    let far = new(4, config(1, 4, false), 0, 1).unwrap();
    assert_error(far.batch(usize::MAX), &["out of range"]);
}

#[test]
fn a_run_goes_on_with_the_next_sequence_whatever_the_batch_before() {
    let text = (30, 2);
    let config = config(1, 4, true);
    let before = batches(text, &config, (0, 1));
    let taken = |batches: &Batches, steps: std::ops::Range<usize>| -> Vec<usize> {
        steps
            .flat_map(|step| samples(&batches.batch(step).unwrap(), 30, 2))
            .collect()
    };
    // 15 samples: an epoch is 4 steps, of 4, 4, 4 and 3.
    for step in [0, 2, 3, 4, 9] {
        let position = before.position(step).unwrap();
        assert_eq!(position, step / 4 * 15 + step % 4 * 4);
        let same = batches(text, &config, (0, 1)).continued(step, position);
        assert_eq!(taken(&same, step..step + 9), taken(&before, step..step + 9));
        for global_batch_size in [1, 3, 8, 20] {
            let other = BatchConfig {
                global_batch_size,
                ..config.clone()
            };
            let after = batches(text, &other, (0, 1)).continued(step, position);
            let (left, per_epoch) = (
                (15 - position % 15).div_ceil(global_batch_size),
                15usize.div_ceil(global_batch_size),
            );
            let end = before.position(4 * (step / 4 + 3)).unwrap();
            assert_eq!(after.position(step + left + 2 * per_epoch).unwrap(), end);
            let until = step / 4 * 4 + 12;
            assert_eq!(
                taken(&after, step..step + left + 2 * per_epoch),
                taken(&before, step..until)
            );
        }
    }
    let later = batches(text, &config, (0, 1)).continued(3, 12);
    assert_error(later.batch(2), &["step 3 of 4 sequences"]);
}

#[test]
fn padding_is_what_the_micro_batches_of_all_ranks_hold_beside_tokens() {
    // Pieces of 7, 7, 7 and 2 tokens.
    for (dp, micro, global, expected) in [
        (1, 1, 4, [0.0].to_vec()),
        (1, 4, 4, [5.0 / 28.0].to_vec()),
        (2, 2, 4, [5.0 / 28.0].to_vec()),
        (3, 1, 3, [0.0, 2.0 / 4.0].to_vec()),
    ] {
        for (step, expected) in expected.into_iter().enumerate() {
            let ranks =
                (0..dp).map(|rank| batches((23, 7), &config(micro, global, false), (rank, dp)));
            let (mut num_targets, mut num_positions) = (0, 0);
            for batches in ranks {
                assert!((batches.filling(step).unwrap().padding() - expected).abs() < 1e-12);
                for micro_batch in batches.batch(step).unwrap() {
                    let (b, t) = micro_batch.dims().unwrap();
                    num_positions += b * t;
                    num_targets += micro_batch.num_targets().unwrap();
                }
            }
            // The text's last token has no target.
            let num_tokens =
                num_targets + usize::from(step + 1 == 4 / global + usize::from(4 % global > 0));
            assert!((1.0 - num_tokens as f64 / num_positions as f64 - expected).abs() < 1e-12);
        }
    }
}

#[test]
fn positions_are_those_of_all_replicas_and_epochs_have_fractions() {
    // 15 samples of 8 tokens, the last of 3; steps of 6, 6 and 3.
    let config = BatchConfig {
        uneven: true,
        ..config(2, 6, true)
    };
    for dp in [1, 3, 4] {
        let of_rank = |rank| batches((115, 8), &config, (rank, dp));
        for step in 0..6 {
            let positions = (0..dp).flat_map(|rank| of_rank(rank).batch(step).unwrap());
            let positions = positions.map(|batch| batch.inputs().elem_count());
            let counted = of_rank(0).filling(step).unwrap().num_positions;
            assert_eq!(counted, positions.sum::<usize>(), "{dp} {step}");
        }
        let epochs = [0, 1, 2, 3, 4].map(|step| of_rank(0).epoch(step).unwrap());
        assert_eq!(epochs, [0.0, 0.4, 0.8, 1.0, 1.4]);
    }
}

#[test]
fn the_first_step_from_a_sequence_is_the_one_whose_position_is_not_before_it() {
    // 15 samples of 8 tokens, 16 of them would be 2 steps of 8 exactly.
    for (num_tokens, size) in [(115, 6), (115, 15), (115, 20), (128, 8), (128, 1)] {
        let fresh = || batches((num_tokens, 8), &config(1, size, true), (0, 1));
        for (first_step, first) in [(0, 0), (3, 7), (1, 15), (2, 40)] {
            let batches = fresh().continued(first_step, first);
            for end in 0..70 {
                let step = batches.first_step_from(end).unwrap();
                assert!(batches.position(step).unwrap() >= end, "{size} {end}");
                let is_first = step == first_step || batches.position(step - 1).unwrap() < end;
                assert!(is_first, "{size} {end} from {first}");
            }
        }
        let most = fresh().continued(usize::MAX, 0).first_step_from(usize::MAX);
        let reason = most.unwrap_err().to_string();
        assert!(reason.contains("more than any number of steps"), "{reason}");
    }
}

#[test]
fn a_batch_grows_with_the_samples_and_each_epoch_still_has_all_of_them() {
    let ramp = BatchRamp {
        start: 2,
        increment: 2,
        samples: 30,
    };
    for (num_tokens, dp, micro) in [(46, 1, 1), (46, 2, 1), (201, 1, 2), (9, 1, 1)] {
        let config = BatchConfig {
            ramp: Some(ramp),
            ..config(micro, 8, true)
        };
        let of_rank = |rank| batches((num_tokens, 2), &config, (rank, dp));
        let ranks: Vec<Batches> = (0..dp).map(of_rank).collect();
        let of_step = |ranks: &[Batches], step| -> Vec<usize> {
            let of_rank = |rank: &Batches| samples(&rank.batch(step).unwrap(), num_tokens, 2);
            ranks.iter().flat_map(of_rank).collect()
        };
        let num_samples = ranks[0].num_samples();
        let (mut position, mut seen, mut progress) = (0, Vec::new(), Vec::new());
        for step in 0..40 {
            assert_eq!(ranks[0].position(step).unwrap(), position);
            let size = match position < 30 {
                true => 2 + position / 10 * 2,
                false => 8,
            };
            if position < 30 {
                progress.push(progress.last().unwrap_or(&0.0) + size as f64 / 8.0);
            }
            let size = size.min(num_samples - position % num_samples);
            let taken = of_step(&ranks, step);
            // The text's last token alone is a sample without a target.
            let has_last = num_tokens % 2 == 1 && (position + size) % num_samples == 0;
            assert!(taken.len() == size || has_last, "{step}: {taken:?}");
            let goes_on = |rank| of_rank(rank).continued(step, position);
            let later: Vec<Batches> = (0..dp).map(goes_on).collect();
            for next in step..step + 5 {
                assert_eq!(of_step(&later, next), of_step(&ranks, next));
            }
            seen.extend(taken);
            position += size;
            if position % num_samples == 0 {
                seen.sort_unstable();
                let all = num_tokens as usize / 2;
                assert_eq!(seen, (0..all).collect::<Vec<_>>());
                seen.clear();
            }
        }
        assert_eq!(ranks[0].ramp_progress(), progress);
        for end in 0..position {
            let first = ranks[0].first_step_from(end).unwrap();
            assert!(ranks[0].position(first).unwrap() >= end);
            assert!(first == 0 || ranks[0].position(first - 1).unwrap() < end);
        }
    }
}

#[test]
fn batch_ramps_that_lead_nowhere_are_refused() {
    let check = |ramp: &str| {
        let config = BatchConfig {
            ramp: Some(ramp.parse().unwrap()),
            ..config(2, 16, true)
        };
        config.validate(4, 2)
    };
    check("4,4,100").unwrap();
    assert_eq!(
        "4, 4,100".parse::<BatchRamp>().unwrap().to_string(),
        "4,4,100"
    );
    assert_error(
        check("16,4,100"),
        &["starts with 16", "global_batch_size(16)"],
    );
    assert_error(check("4,8,100"), &["steps of 8", "hint"]);
    assert_error(check("6,2,100"), &["start(6)", "= 4", "= 2 != 0"]);
    assert_error(check("4,6,100"), &["increment(6)", "multiples of 4"]);
    let tokens = Tokens::from_ids(vec![0; 21]).unwrap();
    let samples = Samples::new(&tokens, SampleConfig::new(2)).unwrap();
    let long = BatchConfig {
        ramp: Some("40,40,99999999".parse().unwrap()),
        ..config(1, 80, true)
    };
    let refused = Batches::new(&samples, long, 0, 1, &Device::Cpu).map(drop);
    assert_error(refused, &["9999999 steps", "1048576"]);
    for wrong in [
        "", "4", "4,4", "4,4,4,4", "0,4,4", "4,0,4", "4,4,0", "a,4,4", "-4,4,4",
    ] {
        assert!(
            wrong
                .parse::<BatchRamp>()
                .unwrap_err()
                .contains("16,8,10000"),
            "{wrong}"
        );
    }
}
