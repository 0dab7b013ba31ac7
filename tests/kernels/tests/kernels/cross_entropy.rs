//! Vocabulary-parallel cross-entropy: two shards together against the loss and gradient of whole rows.

use crate::element::{Element, assert_close, random, rng, to_f64};
use candle_train_kernel_tests::{Buffer, Launch};
use half::{bf16, f16};
use rand::Rng;

type Stats<T> = unsafe extern "C" fn(*mut f32, *const T, *const u32, i64, i64, i64);
type Backward<T> =
    unsafe extern "C" fn(*mut T, *const T, *const f32, *const u32, *const f32, f32, i64, i64, i64);

unsafe extern "C" {
    fn softmax_stats_f32(
        stats: *mut f32,
        logits: *const f32,
        targets: *const u32,
        rows: i64,
        cols: i64,
        vocab_start: i64,
    );
    fn softmax_stats_bf16(
        stats: *mut f32,
        logits: *const bf16,
        targets: *const u32,
        rows: i64,
        cols: i64,
        vocab_start: i64,
    );
    fn softmax_stats_f16(
        stats: *mut f32,
        logits: *const f16,
        targets: *const u32,
        rows: i64,
        cols: i64,
        vocab_start: i64,
    );
    fn cross_entropy_loss(
        loss: *mut f32,
        log_sum_exp: *mut f32,
        stats: *const f32,
        targets: *const u32,
        rows: i64,
        shards: i64,
        vocab: i64,
    );
    fn cross_entropy_backward_f32(
        dlogits: *mut f32,
        logits: *const f32,
        log_sum_exp: *const f32,
        targets: *const u32,
        row_grads: *const f32,
        grad: f32,
        rows: i64,
        cols: i64,
        vocab_start: i64,
    );
    fn cross_entropy_backward_bf16(
        dlogits: *mut bf16,
        logits: *const bf16,
        log_sum_exp: *const f32,
        targets: *const u32,
        row_grads: *const f32,
        grad: f32,
        rows: i64,
        cols: i64,
        vocab_start: i64,
    );
    fn cross_entropy_backward_f16(
        dlogits: *mut f16,
        logits: *const f16,
        log_sum_exp: *const f32,
        targets: *const u32,
        row_grads: *const f32,
        grad: f32,
        rows: i64,
        cols: i64,
        vocab_start: i64,
    );
}

#[test]
fn losses_of_rows_with_and_without_targets_and_beyond_the_vocabulary() {
    let (rows, shards, vocab) = (130, 3, 120);
    let mut rng = rng(9);
    let stats: Vec<[f32; 3]> = (0..rows * shards)
        .map(|_| [-6f32..6.0, 1.0..90.0, -3.0..3.0].map(|range| rng.random_range(range)))
        .collect();
    let targets: Vec<u32> = (0..rows as u32)
        .map(|row| if row % 4 == 3 { u32::MAX } else { row })
        .collect();
    let [loss, log_sum_exp] = losses(&stats.concat(), &targets, vocab);
    for row in 0..rows {
        let of_shards = || stats[row..].iter().step_by(rows);
        let sum = of_shards().map(|[max, sum, _]| f64::from(*max).exp() * f64::from(*sum));
        let want = sum.sum::<f64>().ln();
        assert!(
            (f64::from(log_sum_exp[row]) - want).abs() < 2e-6,
            "row {row}"
        );
        let hit: f64 = of_shards().map(|[_, _, hit]| f64::from(*hit)).sum();
        match targets[row] {
            u32::MAX => assert_eq!(loss[row], 0.0),
            target if target as usize >= vocab => assert!(loss[row].is_nan(), "row {row}"),
            _ => assert!(
                (f64::from(loss[row]) - (want - hit)).abs() < 2e-5,
                "row {row}"
            ),
        }
    }
}

/// The loss and the log-sum-exp of each row.
fn losses(stats: &[f32], targets: &[u32], vocab: usize) -> [Vec<f32>; 2] {
    let rows = targets.len();
    let out = [(); 2].map(|()| Buffer::<f32>::new(rows));
    let (stats_in, ids) = (Buffer::from_slice(stats), Buffer::from_slice(targets));
    let shards = stats.len() / (3 * rows);
    let (n, shards, vocab) = (rows as i64, shards as i64, vocab as i64);
    let (loss, log_sum_exp) = (out[0].ptr(), out[1].ptr());
    launch!(
        Launch::new(2, 32, 0),
        cross_entropy_loss(
            loss,
            log_sum_exp,
            stats_in.ptr(),
            ids.ptr(),
            n,
            shards,
            vocab
        )
    )
    .unwrap();
    out.map(|out| out.read())
}

struct Kernels<T> {
    stats: Stats<T>,
    backward: Backward<T>,
}

/// Columns `start ..` of the logits, on their own.
struct Shard<T> {
    start: usize,
    cols: usize,
    logits: Vec<T>,
}

fn shards<T: Element>(logits: &[T], vocab: usize, cut: usize) -> Vec<Shard<T>> {
    [(0, cut), (cut, vocab)]
        .map(|(start, end)| Shard {
            start,
            cols: end - start,
            logits: logits
                .chunks_exact(vocab)
                .flat_map(|row| row[start..end].to_vec())
                .collect(),
        })
        .into()
}

fn check<T: Element>(kernels: Kernels<T>) {
    let Kernels { stats, backward } = kernels;
    for (seed, [rows, vocab, cut]) in [
        [1, 1, 0],
        [2, 97, 33],
        [127, 97, 96],
        [3, 1000, 512],
        [2, 32001, 16000],
    ]
    .into_iter()
    .enumerate()
    {
        let mut rng = rng(seed);
        let logits = random::<T>(&mut rng, rows * vocab, 6.0);
        let targets: Vec<u32> = (0..rows)
            .map(|row| match row % 3 {
                2 => u32::MAX,
                _ => rng.random_range(0..vocab as u32),
            })
            .collect();
        let ids = Buffer::from_slice(&targets);
        let (at, n) = (
            Launch {
                seed: seed as u64,
                ..Launch::new(2, [32, 128, 256, 1024][seed % 4], 128)
            },
            rows as i64,
        );
        let shards = shards(&logits, vocab, cut);

        // As the ranks do.
        let of_shard = |shard: &Shard<T>| {
            let (x, out) = (
                Buffer::from_slice(&shard.logits),
                Buffer::<f32>::new(3 * rows),
            );
            let (cols, start) = (shard.cols as i64, shard.start as i64);
            launch!(at, stats(out.ptr(), x.ptr(), ids.ptr(), n, cols, start)).unwrap();
            out.read()
        };
        let gathered: Vec<f32> = shards.iter().flat_map(of_shard).collect();
        let [loss, got] = losses(&gathered, &targets, vocab);
        let value = |row: usize| to_f64(&logits[row * vocab..][..vocab]);
        let lse: Vec<f64> = (0..rows)
            .map(|row| value(row).iter().map(|x| x.exp()).sum::<f64>().ln())
            .collect();
        assert_close("log_sum_exp", &got, &lse, 8.0);
        for row in (0..rows).filter(|row| targets[*row] != u32::MAX) {
            let (loss, want) = (
                f64::from(loss[row]),
                lse[row] - value(row)[targets[row] as usize],
            );
            assert!(
                (loss - want).abs() < 1e-5,
                "row {row}: loss {loss}, expected {want}"
            );
        }
        let row_grads = random::<f32>(&mut rng, rows, 1.0);
        check_backward(backward, &shards, &lse, &targets, &row_grads, at);
    }
}

fn check_backward<T: Element>(
    backward: Backward<T>,
    shards: &[Shard<T>],
    lse: &[f64],
    targets: &[u32],
    row_grads: &[f32],
    at: Launch,
) {
    let lse_rounded: Vec<f32> = lse.iter().map(|x| *x as f32).collect();
    let (l, ids, g) = (
        Buffer::from_slice(&lse_rounded),
        Buffer::from_slice(targets),
        Buffer::from_slice(row_grads),
    );
    for Shard {
        start,
        cols,
        logits,
    } in shards
    {
        let want = |grad: &dyn Fn(usize) -> f64| -> Vec<f64> {
            let gradient = |i: usize| {
                let (row, id) = (i / cols, start + i % cols);
                let p = (logits[i].to_f64() - f64::from(lse_rounded[row])).exp();
                let hit = f64::from(targets[row] as usize == id);
                if targets[row] == u32::MAX {
                    0.0
                } else {
                    (p - hit) * grad(row)
                }
            };
            (0..logits.len()).map(gradient).collect()
        };
        let (n, cols, start) = (targets.len() as i64, *cols as i64, *start as i64);
        let (x, out) = (
            Buffer::from_slice(logits),
            Buffer::<T>::shifted(logits.len(), 1),
        );
        let (lse, ids) = (l.ptr(), ids.ptr());
        launch!(
            at,
            backward(
                out.ptr(),
                x.ptr(),
                lse,
                ids,
                g.ptr(),
                f32::NAN,
                n,
                cols,
                start
            )
        )
        .unwrap();
        assert_close(
            "dlogits",
            &out.read(),
            &want(&|row| f64::from(row_grads[row])),
            8.0,
        );
        let none = std::ptr::null();
        launch!(
            at,
            backward(x.ptr(), x.ptr(), lse, ids, none, 0.125, n, cols, start)
        )
        .unwrap();
        assert_close("dlogits in place", &x.read(), &want(&|_| 0.125), 8.0);
    }
}

#[test]
fn f32_equals_the_reference() {
    check(Kernels {
        stats: softmax_stats_f32,
        backward: cross_entropy_backward_f32,
    });
}

#[test]
fn bf16_equals_the_reference() {
    check(Kernels {
        stats: softmax_stats_bf16,
        backward: cross_entropy_backward_bf16,
    });
}

#[test]
fn f16_equals_the_reference() {
    check(Kernels {
        stats: softmax_stats_f16,
        backward: cross_entropy_backward_f16,
    });
}

#[test]
fn a_nan_among_the_logits_is_in_their_sum_wherever_it_is() {
    for at in [0, 1, 50, 96] {
        let mut logits = vec![1f32; 97];
        logits[at] = f32::NAN;
        let (x, out) = (Buffer::from_slice(&logits), Buffer::<f32>::new(3));
        let ids = Buffer::from_slice(&[u32::MAX]);
        launch!(
            Launch::new(1, 64, 128),
            softmax_stats_f32(out.ptr(), x.ptr(), ids.ptr(), 1, 97, 0)
        )
        .unwrap();
        assert!(out.read()[1].is_nan());
    }
}
