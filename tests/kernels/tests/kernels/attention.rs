//! Causal attention with grouped heads, forward and the gradients of q, k and v.

use crate::attention_reference::{Sizes, backward, delta, forward};
use crate::element::{Element, assert_close, assert_close_at, from_f64, random, rng, to_f64};
use candle_train_kernel_tests::{Buffer, Launch};
use half::{bf16, f16};

type Forward<T> = unsafe extern "C" fn(
    *mut T,
    *mut f32,
    *mut f32,
    *const T,
    *const T,
    *const T,
    *const u32,
    i32,
    i32,
    i32,
    i32,
    i32,
    i32,
    i32,
    i32,
    f32,
);
type Delta<T> = unsafe extern "C" fn(*mut f32, *const T, *const T, i64, i32, i32, i32);
type BackwardQ<T> = unsafe extern "C" fn(
    *mut T,
    *mut f32,
    *const T,
    *const T,
    *const T,
    *const T,
    *const f32,
    *const f32,
    *const u32,
    i32,
    i32,
    i32,
    i32,
    i32,
    i32,
    i32,
    i32,
    f32,
);
type BackwardKv<T> = unsafe extern "C" fn(
    *mut T,
    *mut T,
    *mut f32,
    *mut f32,
    *const T,
    *const T,
    *const T,
    *const T,
    *const f32,
    *const f32,
    *const u32,
    i32,
    i32,
    i32,
    i32,
    i32,
    i32,
    i32,
    i32,
    f32,
);

/// The kernels of one element type.
macro_rules! declare {
    ($T:ty, $forward:ident, $delta:ident, $q:ident, $kv:ident) => {
        unsafe extern "C" {
            fn $forward(
                o: *mut $T,
                sums: *mut f32,
                log_sum_exp: *mut f32,
                q: *const $T,
                k: *const $T,
                v: *const $T,
                ranges: *const u32,
                t: i32,
                keys: i32,
                heads: i32,
                kv_heads: i32,
                d: i32,
                group_size: i32,
                group_offset: i32,
                window: i32,
                scale: f32,
            );
            fn $delta(
                delta: *mut f32,
                o: *const $T,
                grad: *const $T,
                rows: i64,
                t: i32,
                heads: i32,
                d: i32,
            );
            fn $q(
                dq: *mut $T,
                sums: *mut f32,
                q: *const $T,
                k: *const $T,
                v: *const $T,
                grad: *const $T,
                log_sum_exp: *const f32,
                delta: *const f32,
                ranges: *const u32,
                t: i32,
                keys: i32,
                heads: i32,
                kv_heads: i32,
                d: i32,
                group_size: i32,
                group_offset: i32,
                window: i32,
                scale: f32,
            );
            fn $kv(
                dk: *mut $T,
                dv: *mut $T,
                k_sums: *mut f32,
                v_sums: *mut f32,
                q: *const $T,
                k: *const $T,
                v: *const $T,
                grad: *const $T,
                log_sum_exp: *const f32,
                delta: *const f32,
                ranges: *const u32,
                t: i32,
                keys: i32,
                heads: i32,
                kv_heads: i32,
                d: i32,
                group_size: i32,
                group_offset: i32,
                window: i32,
                scale: f32,
            );
        }
    };
}

declare!(
    f32,
    attention_forward_f32,
    attention_delta_f32,
    attention_backward_q_f32,
    attention_backward_kv_f32
);
declare!(
    bf16,
    attention_forward_bf16,
    attention_delta_bf16,
    attention_backward_q_bf16,
    attention_backward_kv_bf16
);
declare!(
    f16,
    attention_forward_f16,
    attention_delta_f16,
    attention_backward_q_f16,
    attention_backward_kv_f16
);

const TILE: usize = 16;
/// Roundings times the size of what cancels in a gradient: products of output gradients and values, times keys.
const SUMMED: f64 = 8.0 * 16.0 * 4.0;

fn sizes(
    [
        b,
        t,
        heads,
        kv_heads,
        d,
        group_size,
        group_offset,
        window,
        document,
    ]: [usize; 9],
) -> Sizes {
    let scale = f64::from((1.0 / (d as f64).sqrt()) as f32);
    Sizes {
        b,
        t,
        heads,
        kv_heads,
        d,
        group_size,
        group_offset,
        window,
        document,
        of: 1,
        which: 0,
        scale,
    }
}

fn cases() -> impl Iterator<Item = (usize, Sizes)> {
    [
        [1, 1, 1, 1, 16, 1, 0, 1, 0],
        [2, 2, 4, 2, 48, 2, 0, 2, 0],
        [1, 127, 2, 1, 64, 2, 0, 127, 0],
        [1, 33, 3, 3, 128, 1, 0, 33, 0],
        [2, 16, 2, 1, 5, 2, 0, 16, 0],
        [1, 17, 2, 1, 256, 2, 0, 17, 0],
        // Tensor parallelism cut the groups; nobody reads the last key/value head.
        [1, 40, 5, 3, 16, 4, 3, 40, 0],
        // Windows of one position, shorter than a tile, as long, longer, and of all positions but one.
        [1, 33, 2, 1, 16, 2, 0, 1, 0],
        [1, 50, 2, 1, 16, 2, 0, 2, 0],
        [1, 70, 2, 2, 32, 1, 0, 16, 0],
        [2, 65, 2, 1, 5, 2, 0, 17, 0],
        [1, 127, 5, 3, 16, 4, 3, 37, 0],
        [1, 33, 2, 1, 64, 2, 0, 32, 0],
        // Documents of one token, shorter than a tile, as long, longer; with a window.
        [2, 33, 2, 1, 16, 2, 0, 33, 1],
        [2, 50, 4, 2, 48, 2, 0, 50, 7],
        [1, 70, 2, 2, 32, 1, 0, 70, 16],
        [3, 127, 5, 3, 16, 4, 3, 127, 45],
        [2, 90, 2, 1, 5, 2, 0, 11, 40],
    ]
    .map(sizes)
    .into_iter()
    .chain(
        [
            (2, 1, [1, 33, 2, 1, 16, 2, 0, 33, 0]),
            (3, 2, [2, 50, 4, 2, 48, 2, 0, 50, 0]),
            (2, 0, [2, 45, 5, 3, 16, 4, 3, 45, 7]),
            (5, 3, [1, 70, 2, 1, 5, 2, 0, 11, 40]),
            // No query sees a key.
            (9, 8, [1, 8, 2, 1, 5, 2, 0, 8, 0]),
        ]
        .map(|(of, which, of_all)| Sizes {
            of,
            which,
            ..sizes(of_all)
        }),
    )
    .enumerate()
}

fn arguments(s: Sizes) -> [i32; 8] {
    [
        s.t,
        s.keys(),
        s.heads,
        s.kv_heads,
        s.d,
        s.group_size,
        s.group_offset,
        s.window,
    ]
    .map(|x| x as i32)
}

/// What each query sees, and by which queries each tile of keys may be seen; none where that follows from the window.
fn ranges(s: Sizes) -> Option<Buffer<u32>> {
    let positions = (0..s.b).flat_map(|sequence| (0..s.t).map(move |i| (sequence, i)));
    let seen: Vec<_> = positions.map(|(sequence, i)| s.seen(sequence, i)).collect();
    let tiles =
        (0..s.b).flat_map(|sequence| (0..s.keys().div_ceil(TILE)).map(move |i| (sequence, i)));
    let by_tile: Vec<_> = tiles
        .map(|(sequence, tile)| {
            let sees = |i: &usize| {
                let seen = &seen[sequence * s.t + i];
                !seen.is_empty() && seen.start < (tile + 1) * TILE && seen.end > tile * TILE
            };
            let queries = (0..s.t).filter(sees);
            queries.clone().min().unwrap_or(0)..queries.max().map_or(0, |last| last + 1)
        })
        .collect();
    let table = [seen, by_tile].into_iter().flat_map(|ranges| {
        let firsts: Vec<usize> = ranges.iter().map(|range| range.start).collect();
        firsts
            .into_iter()
            .chain(ranges.into_iter().map(|range| range.end))
    });
    let table: Vec<u32> = table.map(|x| x as u32).collect();
    (s.document > 0 || s.of > 1).then(|| Buffer::from_slice(&table))
}

fn ranges_of(ranges: &Option<Buffer<u32>>) -> *const u32 {
    ranges
        .as_ref()
        .map_or(std::ptr::null(), |ranges| ranges.ptr())
}

/// Minus infinity, which a query without keys has, as a number that can be compared.
fn finite(numbers: &[f64]) -> Vec<f64> {
    numbers.iter().map(|x| x.max(-1e3)).collect()
}

/// A block per tile of the heads, with room for some tiles of rows and some of scores.
fn launch(
    s: Sizes,
    [rows, heads]: [usize; 2],
    row_tiles: usize,
    score_tiles: usize,
    seed: usize,
) -> Launch {
    Launch {
        grid: [rows.div_ceil(TILE), heads, s.b],
        block: TILE * TILE,
        shared_bytes: 4 * TILE * (row_tiles * (s.d | 1) + score_tiles * (TILE + 1)),
        seed: seed as u64,
    }
}

fn check_forward<T: Element>(kernel: Forward<T>) {
    for (seed, s) in cases() {
        let mut rng = rng(seed);
        let inputs = [s.q_len(), s.kv_len(), s.kv_len()].map(|len| random::<T>(&mut rng, len, 2.0));
        let exact = inputs.each_ref().map(|x| to_f64(x));
        let (want, lse_want) = forward(s, exact.each_ref().map(|x| &x[..]));
        let [q, k, v] = inputs.each_ref().map(|x| Buffer::from_slice(x));
        let (o, lse) = (
            Buffer::<T>::new(s.q_len()),
            Buffer::<f32>::new(lse_want.len()),
        );
        let [t, keys, h, kv, d, g, off, window] = arguments(s);
        let ranges = ranges(s);
        let (at, scale) = (launch(s, [s.t, s.heads], 2, 1, seed), s.scale as f32);
        let null = std::ptr::null_mut();
        let sums = Buffer::<f32>::new(s.q_len());
        for (to, to_sums) in [(o.ptr(), null), (std::ptr::null_mut(), sums.ptr())] {
            launch!(
                at,
                kernel(
                    to,
                    to_sums,
                    lse.ptr(),
                    q.ptr(),
                    k.ptr(),
                    v.ptr(),
                    ranges_of(&ranges),
                    t,
                    keys,
                    h,
                    kv,
                    d,
                    g,
                    off,
                    window,
                    scale
                )
            )
            .unwrap();
        }
        assert_close("o", &o.read(), &want, 32.0);
        assert_close("sums", &sums.read(), &want, 32.0);
        let lse: Vec<f32> = lse.read().iter().map(|x| x.max(-1e3)).collect();
        assert_close("log_sum_exp", &lse, &finite(&lse_want), 32.0);
    }
}

fn check_backward<T: Element>(row_products: Delta<T>, of_q: BackwardQ<T>, of_kv: BackwardKv<T>) {
    for (seed, s) in cases() {
        let mut rng = rng(seed);
        let inputs = [s.q_len(), s.kv_len(), s.kv_len(), s.q_len()]
            .map(|len| random::<T>(&mut rng, len, 2.0));
        let exact = inputs.each_ref().map(|x| to_f64(x));
        let [q64, k64, v64, grad64] = exact.each_ref().map(|x| &x[..]);
        let (output, lse) = forward(s, [q64, k64, v64]);
        // The backward pass sees the output as it was stored.
        let output: Vec<T> = from_f64(&output);
        let delta_want = delta(s, &to_f64(&output), grad64);
        let want = backward(s, [q64, k64, v64], grad64, &delta_want);

        let [q, k, v, grad] = inputs.each_ref().map(|x| Buffer::from_slice(x));
        let (o, lse) = (
            Buffer::from_slice(&output),
            Buffer::from_slice(&from_f64::<f32>(&lse)),
        );
        let products = Buffer::<f32>::new(delta_want.len());
        let [t, keys, h, kv, d, g, off, window] = arguments(s);
        let ranges = ranges(s);
        let (rows, at) = (delta_want.len() as i64, Launch::new(3, 64, 0));
        launch!(
            at,
            row_products(products.ptr(), o.ptr(), grad.ptr(), rows, t, h, d)
        )
        .unwrap();
        assert_close("delta", &products.read(), &delta_want, 32.0);

        let [dq, dk, dv] = [s.q_len(), s.kv_len(), s.kv_len()].map(Buffer::<T>::new);
        let null = std::ptr::null_mut();
        let [q, k, v, grad] = [q.ptr(), k.ptr(), v.ptr(), grad.ptr()];
        let (lse, delta, scale) = (lse.ptr(), products.ptr(), s.scale as f32);
        let at = launch(s, [s.t, s.heads], 4, 1, seed);
        launch!(
            at,
            of_q(
                dq.ptr(),
                null,
                q,
                k,
                v,
                grad,
                lse,
                delta,
                ranges_of(&ranges),
                t,
                keys,
                h,
                kv,
                d,
                g,
                off,
                window,
                scale
            )
        )
        .unwrap();
        let at = launch(s, [s.keys(), s.kv_heads], 4, 2, seed);
        launch!(
            at,
            of_kv(
                dk.ptr(),
                dv.ptr(),
                null,
                null,
                q,
                k,
                v,
                grad,
                lse,
                delta,
                ranges_of(&ranges),
                t,
                keys,
                h,
                kv,
                d,
                g,
                off,
                window,
                scale
            )
        )
        .unwrap();
        for (what, (got, want)) in ["dq", "dk", "dv"]
            .iter()
            .zip([dq, dk, dv].iter().zip(&want))
        {
            assert_close_at(what, &got.read(), want, SUMMED);
        }
        // The same added to what is there.
        let nothing = std::ptr::null_mut();
        let sums =
            [s.q_len(), s.kv_len(), s.kv_len()].map(|len| Buffer::from_slice(&vec![1f32; len]));
        let at = launch(s, [s.t, s.heads], 4, 1, seed);
        launch!(
            at,
            of_q(
                nothing,
                sums[0].ptr(),
                q,
                k,
                v,
                grad,
                lse,
                delta,
                ranges_of(&ranges),
                t,
                keys,
                h,
                kv,
                d,
                g,
                off,
                window,
                scale
            )
        )
        .unwrap();
        let at = launch(s, [s.keys(), s.kv_heads], 4, 2, seed);
        launch!(
            at,
            of_kv(
                nothing,
                nothing,
                sums[1].ptr(),
                sums[2].ptr(),
                q,
                k,
                v,
                grad,
                lse,
                delta,
                ranges_of(&ranges),
                t,
                keys,
                h,
                kv,
                d,
                g,
                off,
                window,
                scale
            )
        )
        .unwrap();
        for (sum, want) in sums.iter().zip(&want) {
            let want: Vec<f64> = want.iter().map(|x| x + 1.0).collect();
            assert_close_at("sums", &sum.read(), &want, SUMMED);
        }
    }
}

#[test]
fn f32_forward_equals_the_reference() {
    check_forward(attention_forward_f32);
}

#[test]
fn bf16_forward_equals_the_reference() {
    check_forward(attention_forward_bf16);
}

#[test]
fn f16_forward_equals_the_reference() {
    check_forward(attention_forward_f16);
}

#[test]
fn f32_backward_equals_the_reference() {
    check_backward(
        attention_delta_f32,
        attention_backward_q_f32,
        attention_backward_kv_f32,
    );
}

#[test]
fn bf16_backward_equals_the_reference() {
    check_backward(
        attention_delta_bf16,
        attention_backward_q_bf16,
        attention_backward_kv_bf16,
    );
}

#[test]
fn f16_backward_equals_the_reference() {
    check_backward(
        attention_delta_f16,
        attention_backward_q_f16,
        attention_backward_kv_f16,
    );
}
