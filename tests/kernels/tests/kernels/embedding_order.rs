//! The radix sort of positions by id, pass by pass, against a sort on the host.

use crate::element::rng;
use candle_train_kernel_tests::{Buffer, Launch};
use rand::Rng;

unsafe extern "C" {
    fn order_start(
        rows: *mut u32,
        order: *mut u32,
        ids: *const u32,
        num_ids: u32,
        vocab_start: u32,
        local_vocab: u32,
    );
    fn order_count(counts: *mut u32, rows: *const u32, num_ids: u32, shift: u32);
    fn order_sum(counts: *mut u32, len: u32);
    fn order_move(
        rows_to: *mut u32,
        order_to: *mut u32,
        rows: *const u32,
        order: *const u32,
        starts: *const u32,
        num_ids: u32,
        shift: u32,
    );
}

/// As the launch code does, with `num_threads` summing the counts.
fn sorted(ids: &[u32], vocab_start: u32, local_vocab: u32, num_threads: usize) -> Vec<(u32, u32)> {
    let (n, num_tiles) = (ids.len() as u32, ids.len().div_ceil(256));
    let ids = Buffer::from_slice(ids);
    let mut from = [(); 2].map(|()| Buffer::<u32>::new(n as usize));
    let mut to = [(); 2].map(|()| Buffer::<u32>::new(n as usize));
    let counts = Buffer::<u32>::new(256 * num_tiles);
    let (rows, order) = (from[0].ptr(), from[1].ptr());
    launch!(
        Launch::new(3, 64, 0),
        order_start(rows, order, ids.ptr(), n, vocab_start, local_vocab)
    )
    .unwrap();
    let tiles = Launch::new(num_tiles, 256, 1024);
    for shift in (0..u32::BITS - local_vocab.leading_zeros()).step_by(8) {
        let (rows, order, c) = (from[0].ptr(), from[1].ptr(), counts.ptr());
        launch!(tiles, order_count(c, rows, n, shift)).unwrap();
        let sum = Launch::new(1, num_threads, 4 * num_threads);
        launch!(sum, order_sum(c, 256 * num_tiles as u32)).unwrap();
        let (rows_to, order_to) = (to[0].ptr(), to[1].ptr());
        launch!(
            tiles,
            order_move(rows_to, order_to, rows, order, c, n, shift)
        )
        .unwrap();
        std::mem::swap(&mut from, &mut to);
    }
    from[0].read().into_iter().zip(from[1].read()).collect()
}

#[test]
fn positions_come_by_row_and_those_of_a_row_in_order() {
    // Ids, first local id, local ids, ids drawn below this; vocabularies of one, two and three digits.
    for (seed, [num_ids, start, vocab, below]) in [
        [1, 0, 1, 1],
        [255, 0, 5, 9],
        [256, 10, 255, 300],
        [257, 0, 256, 300],
        [1000, 100, 3000, 4000],
        [2000, 0, 1, 1],
        [1500, 64_000, 64_256, 128_256],
    ]
    .into_iter()
    .enumerate()
    {
        let mut rng = rng(seed);
        let ids: Vec<u32> = (0..num_ids)
            .map(|_| match rng.random_range(0..8) {
                0 => u32::MAX,
                _ => rng.random_range(0..below),
            })
            .collect();
        let mut want: Vec<(u32, u32)> = (0..)
            .zip(&ids)
            .map(|(position, &id)| {
                let row = id.checked_sub(start).filter(|row| *row < vocab);
                (row.unwrap_or(vocab), position)
            })
            .collect();
        want.sort_unstable();
        for num_threads in [32, 1024] {
            assert_eq!(
                sorted(&ids, start, vocab, num_threads),
                want,
                "{num_ids} ids"
            );
        }
    }
}
