//! Vocabulary-parallel cross-entropy: two shards together against the loss and gradient of whole rows.

use crate::element::{Element, assert_close, random, rng, to_f64};
use candle_train_kernel_tests::{Buffer, Launch};
use half::bf16;
use rand::Rng;

type RowMax<T> = unsafe extern "C" fn(*mut f32, *const T, i64, i64);
type SumExp<T> = unsafe extern "C" fn(*mut f32, *const T, *const f32, *const u32, i64, i64, i64);
type Backward<T> =
    unsafe extern "C" fn(*mut T, *const T, *const f32, *const u32, *const f32, f32, i64, i64, i64);

unsafe extern "C" {
    fn row_max_f32(max: *mut f32, logits: *const f32, rows: i64, cols: i64);
    fn row_max_bf16(max: *mut f32, logits: *const bf16, rows: i64, cols: i64);
    fn sum_exp_and_target_logit_f32(
        out: *mut f32,
        logits: *const f32,
        max: *const f32,
        targets: *const u32,
        rows: i64,
        cols: i64,
        vocab_start: i64,
    );
    fn sum_exp_and_target_logit_bf16(
        out: *mut f32,
        logits: *const bf16,
        max: *const f32,
        targets: *const u32,
        rows: i64,
        cols: i64,
        vocab_start: i64,
    );
    fn cross_entropy_loss(
        loss: *mut f32,
        log_sum_exp: *mut f32,
        max: *const f32,
        sums: *const f32,
        targets: *const u32,
        rows: i64,
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
}

#[test]
fn losses_of_rows_with_and_without_targets_and_beyond_the_vocabulary() {
    let rows = 130;
    let mut rng = rng(9);
    let max = random::<f32>(&mut rng, rows, 8.0);
    let sums: Vec<f32> = (0..2 * rows)
        .map(|_| rng.random_range(1f32..90.0))
        .collect();
    let targets: Vec<u32> = (0..rows as u32)
        .map(|row| if row % 4 == 3 { u32::MAX } else { row })
        .collect();
    let vocab = 120;
    let [loss, log_sum_exp] = [(); 2].map(|()| Buffer::<f32>::new(rows));
    let (max_in, sums_in) = (Buffer::from_slice(&max), Buffer::from_slice(&sums));
    let (l, s, ids) = (loss.ptr(), log_sum_exp.ptr(), Buffer::from_slice(&targets));
    launch!(
        Launch::new(2, 32, 0),
        cross_entropy_loss(
            l,
            s,
            max_in.ptr(),
            sums_in.ptr(),
            ids.ptr(),
            rows as i64,
            vocab
        )
    )
    .unwrap();
    for (row, (got, log_sum_exp)) in loss.read().into_iter().zip(log_sum_exp.read()).enumerate() {
        let log_sum = f64::from(sums[row]).ln();
        let want = log_sum + f64::from(max[row]);
        assert!((f64::from(log_sum_exp) - want).abs() < 2e-6, "row {row}");
        match targets[row] {
            u32::MAX => assert_eq!(got, 0.0),
            target if i64::from(target) >= vocab => assert!(got.is_nan(), "row {row}"),
            _ => {
                let want = log_sum - f64::from(sums[rows + row]);
                assert!((f64::from(got) - want).abs() < 2e-5, "row {row}");
            }
        }
    }
}

struct Kernels<T> {
    row_max: RowMax<T>,
    sum_exp: SumExp<T>,
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
    let Kernels {
        row_max,
        sum_exp,
        backward,
    } = kernels;
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

        // As the ranks do: the maximum of the maxima, the sums of the pieces.
        let mut max = vec![f32::NEG_INFINITY; rows];
        for shard in &shards {
            let (x, out) = (Buffer::from_slice(&shard.logits), Buffer::<f32>::new(rows));
            launch!(at, row_max(out.ptr(), x.ptr(), n, shard.cols as i64)).unwrap();
            max.iter_mut()
                .zip(out.read())
                .for_each(|(max, x)| *max = max.max(x));
        }
        let global_max = Buffer::from_slice(&max);
        let mut pieces = vec![0f32; 2 * rows];
        for shard in &shards {
            let (x, out) = (
                Buffer::from_slice(&shard.logits),
                Buffer::<f32>::new(2 * rows),
            );
            let (m, cols, start) = (global_max.ptr(), shard.cols as i64, shard.start as i64);
            launch!(
                at,
                sum_exp(out.ptr(), x.ptr(), m, ids.ptr(), n, cols, start)
            )
            .unwrap();
            pieces
                .iter_mut()
                .zip(out.read())
                .for_each(|(sum, x)| *sum += x);
        }
        let value = |row: usize| to_f64(&logits[row * vocab..][..vocab]);
        let lse: Vec<f64> = (0..rows)
            .map(|row| value(row).iter().map(|x| x.exp()).sum::<f64>().ln())
            .collect();
        let got: Vec<f32> = (0..rows).map(|row| max[row] + pieces[row].ln()).collect();
        assert_close("log_sum_exp", &got, &lse, 8.0);
        for row in (0..rows).filter(|row| targets[*row] != u32::MAX) {
            let loss = f64::from(pieces[row].ln() - pieces[rows + row]);
            let want = lse[row] - value(row)[targets[row] as usize];
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
        row_max: row_max_f32,
        sum_exp: sum_exp_and_target_logit_f32,
        backward: cross_entropy_backward_f32,
    });
}

#[test]
fn bf16_equals_the_reference() {
    check(Kernels {
        row_max: row_max_bf16,
        sum_exp: sum_exp_and_target_logit_bf16,
        backward: cross_entropy_backward_bf16,
    });
}

#[test]
fn a_nan_among_the_logits_is_the_maximum_wherever_it_is() {
    for at in [0, 1, 50, 96] {
        let mut logits = vec![1f32; 97];
        logits[at] = f32::NAN;
        let (x, max) = (Buffer::from_slice(&logits), Buffer::<f32>::new(1));
        launch!(
            Launch::new(1, 64, 128),
            row_max_f32(max.ptr(), x.ptr(), 1, 97)
        )
        .unwrap();
        assert!(max.read()[0].is_nan());
    }
}
