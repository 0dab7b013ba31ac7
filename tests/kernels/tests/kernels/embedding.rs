//! Table look-up and the deterministic scatter-add.

use crate::element::{Element, random, rng};
use candle_train_kernel_tests::{Buffer, Launch};
use half::{bf16, f16};
use rand::Rng;

type Forward<T> = unsafe extern "C" fn(*mut T, *const T, *const u32, i64, i64, u32, u32);
type Backward<T> = unsafe extern "C" fn(*mut f32, *const T, *const u32, *const u32, u32, i64, u32);

unsafe extern "C" {
    fn embedding_forward_f32(
        y: *mut f32,
        table: *const f32,
        ids: *const u32,
        num_ids: i64,
        hidden: i64,
        vocab_start: u32,
        local_vocab: u32,
    );
    fn embedding_forward_bf16(
        y: *mut bf16,
        table: *const bf16,
        ids: *const u32,
        num_ids: i64,
        hidden: i64,
        vocab_start: u32,
        local_vocab: u32,
    );
    fn embedding_forward_f16(
        y: *mut f16,
        table: *const f16,
        ids: *const u32,
        num_ids: i64,
        hidden: i64,
        vocab_start: u32,
        local_vocab: u32,
    );
    fn embedding_backward_f32(
        grad: *mut f32,
        dy: *const f32,
        sorted_rows: *const u32,
        order: *const u32,
        num_ids: u32,
        hidden: i64,
        local_vocab: u32,
    );
    fn embedding_backward_bf16(
        grad: *mut f32,
        dy: *const bf16,
        sorted_rows: *const u32,
        order: *const u32,
        num_ids: u32,
        hidden: i64,
        local_vocab: u32,
    );
    fn embedding_backward_f16(
        grad: *mut f32,
        dy: *const f16,
        sorted_rows: *const u32,
        order: *const u32,
        num_ids: u32,
        hidden: i64,
        local_vocab: u32,
    );
}

/// Ids, hidden, first local id, local ids, ids drawn below this.
const CASES: [[usize; 5]; 7] = [
    [1, 1, 0, 1, 1],
    [2, 33, 0, 5, 5],
    [127, 97, 0, 3, 5],
    [200, 64, 10, 12, 30],
    [127, 512, 100, 7, 120],
    [70, 8, 0, 1, 2],
    [33, 1000, 32000, 1, 32001],
];

/// Ids of this shard, of others, and no ids at all.
fn ids(seed: usize, num_ids: usize, below: usize) -> Vec<u32> {
    let mut rng = rng(seed);
    (0..num_ids)
        .map(|_| match rng.random_range(0..10) {
            0 => u32::MAX,
            1 => below as u32 - 1,
            _ => rng.random_range(0..below as u32),
        })
        .collect()
}

fn local(id: u32, vocab_start: usize, local_vocab: usize) -> Option<usize> {
    let row = (id as usize).checked_sub(vocab_start)?;
    (row < local_vocab).then_some(row)
}

fn check<T: Element>(forward: Forward<T>, backward: Backward<T>) {
    for (seed, [num_ids, hidden, start, vocab, below]) in CASES.into_iter().enumerate() {
        let mut rng = rng(50 + seed);
        let ids = ids(seed, num_ids, below);
        let table = random::<T>(&mut rng, vocab * hidden, 1.0);
        let (id, rows) = (Buffer::from_slice(&ids), Buffer::from_slice(&table));
        let y = Buffer::<T>::shifted(num_ids * hidden, seed % 2);
        let (n, h, first, size) = (num_ids as u32, hidden as i64, start as u32, vocab as u32);
        let at = Launch::new(3, 64, 0);
        launch!(
            at,
            forward(y.ptr(), rows.ptr(), id.ptr(), i64::from(n), h, first, size)
        )
        .unwrap();
        for (y, id) in y.read().chunks_exact(hidden).zip(&ids) {
            match local(*id, start, vocab) {
                Some(row) => assert_eq!(y, &table[row * hidden..][..hidden]),
                None => assert!(y.iter().all(|y| *y == T::default())),
            }
        }
        let mut by_row: Vec<(u32, u32)> = (0..n)
            .map(|i| {
                let row = local(ids[i as usize], start, vocab);
                (row.unwrap_or(vocab) as u32, i)
            })
            .collect();
        by_row.sort_unstable();
        let (rows, positions): (Vec<u32>, Vec<u32>) = by_row.into_iter().unzip();
        let (sorted, order) = (Buffer::from_slice(&rows), Buffer::from_slice(&positions));

        let old = random::<f32>(&mut rng, vocab * hidden, 1.0);
        let dy = random::<T>(&mut rng, num_ids * hidden, 1.0);
        let (grad, d) = (Buffer::from_slice(&old), Buffer::from_slice(&dy));
        let (s, o) = (sorted.ptr(), order.ptr());
        let at = Launch {
            grid: [num_ids, 1 + seed % 2, 1],
            ..Launch::new(0, 32, 0)
        };
        launch!(at, backward(grad.ptr(), d.ptr(), s, o, n, h, size)).unwrap();
        let mut want = old;
        for (i, id) in ids.iter().enumerate() {
            for column in 0..hidden {
                if let Some(row) = local(*id, start, vocab) {
                    want[row * hidden + column] += dy[i * hidden + column].to_f64() as f32;
                }
            }
        }
        assert_eq!(grad.read(), want, "the bits of adding in order");
    }
}

#[test]
fn f32_gives_the_bits_of_the_cpu() {
    check(embedding_forward_f32, embedding_backward_f32);
}

#[test]
fn bf16_gives_the_bits_of_the_cpu() {
    check(embedding_forward_bf16, embedding_backward_bf16);
}

#[test]
fn f16_gives_the_bits_of_the_cpu() {
    check(embedding_forward_f16, embedding_backward_f16);
}
