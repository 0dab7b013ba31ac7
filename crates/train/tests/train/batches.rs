use candle_core::Device;
use candle_parallel::MicroBatch;
use candle_train::{BatchConfig, Batches, Tokens};

use crate::assert_error;

fn config(seq_len: usize, micro: usize, global: usize, shuffle: bool) -> BatchConfig {
    BatchConfig {
        seq_len,
        micro_batch_size: micro,
        global_batch_size: global,
        shuffle,
        seed: 7,
    }
}

fn batches(num_tokens: u32, config: &BatchConfig, dp_rank: usize, dp: usize) -> Batches {
    let tokens = Tokens::from_ids((0..num_tokens).collect());
    Batches::new(&tokens, config.clone(), dp_rank, dp, &Device::Cpu).unwrap()
}

/// Each sequence's sample index, checking that it is a sample.
fn samples(micro_batches: &[MicroBatch], t: usize) -> Vec<usize> {
    let mut samples = Vec::new();
    for micro_batch in micro_batches {
        let tokens = micro_batch.tokens.to_vec2::<u32>().unwrap();
        let targets = micro_batch
            .targets
            .as_ref()
            .unwrap()
            .to_vec2::<u32>()
            .unwrap();
        for (tokens, targets) in tokens.iter().zip(&targets) {
            let start = tokens[0];
            assert_eq!(*tokens, (start..start + t as u32).collect::<Vec<_>>());
            assert_eq!(*targets, (start + 1..=start + t as u32).collect::<Vec<_>>());
            assert_eq!(start as usize % t, 0);
            samples.push(start as usize / t);
        }
    }
    samples
}

#[test]
fn without_shuffle_steps_follow_the_text_and_wrap_around() {
    // (12 - 1) / 2 = 5 samples, the last id is nobody's.
    let batches = batches(12, &config(2, 1, 4, false), 0, 1);
    assert_eq!((batches.num_samples(), batches.num_micro_batches()), (5, 4));
    assert_eq!(batches.num_steps_per_epoch(), 2);
    assert_eq!(batches.num_tokens_per_step(), 8);
    assert_eq!(samples(&batches.batch(0).unwrap(), 2), [0, 1, 2, 3]);
    assert_eq!(samples(&batches.batch(1).unwrap(), 2), [4, 0, 1, 2]);
    assert_eq!(samples(&batches.batch(2).unwrap(), 2), [3, 4, 0, 1]);
}

#[test]
fn the_last_sample_may_end_with_the_last_id() {
    let batches = batches(11, &config(2, 1, 1, false), 0, 1);
    assert_eq!(batches.num_samples(), 5);
    assert_eq!(samples(&batches.batch(4).unwrap(), 2), [4]);
}

#[test]
fn ranks_take_contiguous_shares_of_the_same_batch() {
    for shuffle in [false, true] {
        let whole = batches(100, &config(3, 2, 12, shuffle), 0, 1);
        for step in 0..7 {
            let expected = samples(&whole.batch(step).unwrap(), 3);
            let shares: Vec<usize> = (0..3)
                .flat_map(|rank| {
                    let share = batches(100, &config(3, 2, 12, shuffle), rank, 3)
                        .batch(step)
                        .unwrap();
                    assert_eq!(share.len(), 2);
                    assert!(share.iter().all(|m| m.dims().unwrap() == (2, 3)));
                    samples(&share, 3)
                })
                .collect();
            assert_eq!(shares, expected);
        }
    }
}

#[test]
fn each_shuffled_epoch_is_a_new_permutation_that_depends_on_the_seed_only() {
    // 33 samples, batches of 5: steps straddle epochs.
    let order = |batches: &Batches| -> Vec<usize> {
        (0..20)
            .flat_map(|step| samples(&batches.batch(step).unwrap(), 3))
            .collect()
    };
    let seven = order(&batches(100, &config(3, 5, 5, true), 0, 1));
    for epoch in seven[..99].chunks(33) {
        let mut sorted = epoch.to_vec();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..33).collect::<Vec<_>>());
        assert_ne!(sorted, epoch);
    }
    assert_ne!(seven[..33], seven[33..66]);
    assert_eq!(
        seven,
        order(&batches(100, &config(3, 1, 5, true), 0, 1)),
        "the micro-batch size changes nothing"
    );
    let other = BatchConfig {
        seed: 8,
        ..config(3, 5, 5, true)
    };
    assert_ne!(seven, order(&batches(100, &other, 0, 1)));

    // A batch is a pure function of the step: out of order, twice, and on a new object.
    let again = batches(100, &config(3, 5, 5, true), 0, 1);
    for step in [13, 2, 13, 6, 0] {
        assert_eq!(
            samples(&again.batch(step).unwrap(), 3),
            seven[step * 5..step * 5 + 5]
        );
    }
}

#[test]
fn the_shuffled_order_is_stable_across_versions() {
    let batches = batches(41, &config(4, 1, 10, true), 0, 1);
    assert_eq!(
        samples(&batches.batch(0).unwrap(), 4),
        [5, 3, 9, 8, 1, 6, 2, 0, 4, 7]
    );
}

#[test]
fn impossible_sizes_are_refused_with_the_equation() {
    let tokens = Tokens::from_ids(vec![1; 50]);
    let new = |config: BatchConfig, rank, dp| Batches::new(&tokens, config, rank, dp, &Device::Cpu);
    assert_error(
        new(config(4, 2, 10, false), 0, 3),
        &[
            "global_batch_size(10) % (micro_batch_size(2) * dp(3) = 6) = 4 != 0",
            "hint:",
        ],
    );
    assert_error(
        new(config(4, usize::MAX, 10, false), 0, 3),
        &["global_batch_size(10)", "= 55340232221128654845) = 10 != 0"],
    );
    assert_error(
        new(config(4, usize::MAX, usize::MAX, false), 0, 1),
        &[
            "global_batch_size(18446744073709551615) * seq_len(4)",
            "at most 2147483648",
            "hint:",
        ],
    );
    assert_error(
        new(config(1 << 30, 1, 3, false), 0, 1),
        &["global_batch_size(3) * seq_len(1073741824) = 3221225472 tokens per step"],
    );
    assert_error(new(config(0, 1, 1, false), 0, 1), &["seq_len is 0"]);
    assert_error(
        new(config(4, 0, 1, false), 0, 1),
        &["micro_batch_size is 0"],
    );
    assert_error(
        new(config(4, 1, 0, false), 0, 1),
        &["global_batch_size is 0"],
    );
    assert_error(new(config(4, 1, 1, false), 0, 0), &["dp_world_size is 0"]);
    assert_error(
        new(config(4, 1, 2, false), 2, 2),
        &["dp_rank(2)", "dp_world_size(2)"],
    );
    assert_error(
        new(config(50, 1, 1, false), 0, 1),
        &[
            "too short",
            "50 tokens",
            "seq_len 50",
            "needs 51",
            "at most 49",
        ],
    );
    assert_error(
        Batches::new(
            &Tokens::from_ids(vec![]),
            config(1, 1, 1, false),
            0,
            1,
            &Device::Cpu,
        ),
        &["0 tokens"],
    );
    let far = new(config(4, 1, 4, false), 0, 1).unwrap();
    assert_error(far.batch(usize::MAX / 2), &["out of range"]);
}

#[test]
fn a_run_goes_on_with_the_next_sequence_whatever_the_batch_before() {
    let config = config(2, 1, 4, true);
    let before = batches(30, &config, 0, 1);
    let position = before.position(3).unwrap();
    assert_eq!(position, 12);
    let larger = BatchConfig {
        global_batch_size: 8,
        ..config.clone()
    };
    let after = batches(30, &larger, 0, 1).continued(3, position);
    let taken = |batches: &Batches, step| samples(&batches.batch(step).unwrap(), 2);
    let want = [taken(&before, 3), taken(&before, 4)].concat();
    assert_eq!(taken(&after, 3), want);
    assert_eq!(after.position(4).unwrap(), 20);
    let same = batches(30, &config, 0, 1).continued(3, position);
    assert_eq!(taken(&same, 7), taken(&before, 7));
    assert_error(same.batch(2), &["step 2 of 4 sequences"]);
}
