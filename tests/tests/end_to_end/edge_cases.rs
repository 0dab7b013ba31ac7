//! Small, odd and uneven runs against one rank.

use crate::device::devices;
use crate::fixture::{Fixture, Run};
use crate::layouts::{assert_same, kinds};
use crate::run::{Layout, Mask, train_masked};

/// A case: global batch, micro-batch, sequence length, layout.
type Case = (usize, usize, usize, (usize, usize, usize));

fn check(name: &str, cases: &[Case], mask: Mask) {
    let fixture = Fixture::new(name);
    for &(global_batch_size, micro_batch_size, seq_len, (pp, dp, tp)) in cases {
        let run = Run {
            steps: 3,
            seq_len,
            micro_batch_size,
            global_batch_size,
            ..fixture.run.clone()
        };
        let one_rank = train_masked(&fixture, &run, Layout::new(1, 1, 1), mask).unwrap();
        for layout in kinds(Layout::new(pp, dp, tp)) {
            let ours = train_masked(&fixture, &run, layout, mask).unwrap();
            assert_same(&ours, &one_rank, &format!("{name} {run:?} {layout:?}"));
        }
    }
}

fn all(_: usize, _: usize) -> bool {
    false
}

#[test]
fn fewer_micro_batches_than_stages() {
    check(
        "gqa",
        &[
            (2, 1, 8, (4, 1, 1)),
            (1, 1, 8, (4, 1, 2)),
            (2, 1, 8, (3, 2, 1)),
        ],
        all,
    );
}

#[test]
fn sequences_of_one_token() {
    // In exact arithmetic nothing reaches queries and keys. The CPU's kernel computes just that; a GPU's leaves rounding errors,
    // which AdamW makes as large as any gradient: there is nothing to compare.
    if devices().iter().any(|device| !device.is_cpu()) {
        eprintln!("not tested on a GPU");
        return;
    }
    check("gqa", &[(4, 2, 1, (1, 1, 1)), (4, 2, 1, (2, 2, 2))], all);
}

#[test]
fn uneven_layers_few_key_value_heads_and_ties() {
    let layouts = [(2, 1, 1), (3, 1, 2), (1, 1, 6), (2, 2, 2)];
    let cases = layouts.map(|layout| (4, 1, 8, layout));
    check("tied_bias", &cases, all);
}

#[test]
fn other_micro_batch_sizes() {
    let fixture = Fixture::new("gqa");
    let run = |micro_batch_size| Run {
        steps: 3,
        seq_len: 8,
        micro_batch_size,
        global_batch_size: 12,
        ..fixture.run.clone()
    };
    let train = |size, layout| train_masked(&fixture, &run(size), layout, all).unwrap();
    let one_by_one = train(1, Layout::new(1, 1, 1));
    for (size, layout) in [
        (12, (1, 1, 1)),
        (6, (2, 2, 1)),
        (4, (1, 3, 2)),
        (2, (2, 3, 1)),
    ] {
        let ours = train(size, Layout::new(layout.0, layout.1, layout.2));
        assert_same(&ours, &one_by_one, &format!("micro-batch {size}"));
    }
}

#[test]
fn ignored_targets_count_over_the_global_batch() {
    // Replicas have different numbers of valid targets, and sequence 1 has none.
    let uneven: Mask = |sequence, position| sequence == 1 || position > 2 * sequence;
    check(
        "gqa",
        &[
            (4, 1, 8, (1, 2, 1)),
            (4, 1, 8, (2, 4, 1)),
            (4, 2, 8, (1, 2, 3)),
        ],
        uneven,
    );
    // A whole replica without targets.
    let half: Mask = |sequence, _| sequence >= 2;
    check("gqa", &[(4, 1, 8, (1, 2, 2))], half);
}
