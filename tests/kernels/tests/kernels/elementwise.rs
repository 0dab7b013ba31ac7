//! Fill and add_into: exact, at every length around a pack and every alignment.

use crate::element::{Element, random, rng};
use candle_train_kernel_tests::{Buffer, Launch};
use half::{bf16, f16};

unsafe extern "C" {
    fn fill_f32(dst: *mut f32, value: f32, len: i64);
    fn fill_bf16(dst: *mut bf16, value: f32, len: i64);
    fn fill_f16(dst: *mut f16, value: f32, len: i64);
    fn fill_rows_f32(dst: *mut f32, row: *const f32, rows: i64, cols: i64);
    fn fill_rows_bf16(dst: *mut bf16, row: *const bf16, rows: i64, cols: i64);
    fn fill_rows_f16(dst: *mut f16, row: *const f16, rows: i64, cols: i64);
    fn add_into_f32(dst: *mut f32, src: *const f32, len: i64);
    fn add_into_bf16(dst: *mut f32, src: *const bf16, len: i64);
    fn add_into_f16(dst: *mut f32, src: *const f16, len: i64);
}

const LENGTHS: [usize; 8] = [0, 1, 3, 7, 8, 33, 1000, 4099];

fn check_fill<T: Element>(fill: unsafe extern "C" fn(*mut T, f32, i64)) {
    for (len, shift) in LENGTHS.into_iter().flat_map(|len| [(len, 0), (len, 1)]) {
        let dst = Buffer::<T>::shifted(len, shift);
        launch!(
            Launch::new(2, 64, 0),
            fill(dst.ptr(), 1.0 / 3.0, len as i64)
        )
        .unwrap();
        let want = T::from_f64(f64::from(1.0f32 / 3.0));
        assert!(dst.read().iter().all(|x| *x == want));
    }
}

#[test]
fn fill_writes_each_element() {
    check_fill(fill_f32);
    check_fill(fill_bf16);
    check_fill(fill_f16);
}

fn check_fill_rows<T: Element>(fill_rows: unsafe extern "C" fn(*mut T, *const T, i64, i64)) {
    let mut rng = rng(3);
    for (rows, cols, shift) in [(1, 1, 0), (5, 7, 0), (3, 64, 0), (3, 64, 1), (4, 1001, 0)] {
        let row = random::<T>(&mut rng, cols, 2.0);
        let (dst, src) = (
            Buffer::shifted(rows * cols, shift),
            Buffer::from_slice(&row),
        );
        launch!(
            Launch::new(2, 64, 0),
            fill_rows(dst.ptr(), src.ptr(), rows as i64, cols as i64)
        )
        .unwrap();
        assert_eq!(dst.read(), row.repeat(rows));
    }
}

#[test]
fn fill_rows_repeats_the_row() {
    check_fill_rows(fill_rows_f32);
    check_fill_rows(fill_rows_bf16);
    check_fill_rows(fill_rows_f16);
}

fn check_add<T: Element>(add_into: unsafe extern "C" fn(*mut f32, *const T, i64)) {
    let mut rng = rng(2);
    for (len, shift) in LENGTHS.into_iter().flat_map(|len| [(len, 0), (len, 3)]) {
        let (old, x) = (
            random::<f32>(&mut rng, len, 2.0),
            random::<T>(&mut rng, len, 2.0),
        );
        let dst = Buffer::shifted(len, shift).with(&old);
        let src = Buffer::from_slice(&x);
        launch!(
            Launch::new(3, 32, 0),
            add_into(dst.ptr(), src.ptr(), len as i64)
        )
        .unwrap();
        for ((got, old), x) in dst.read().iter().zip(old).zip(x) {
            assert_eq!(*got, old + x.to_f64() as f32);
        }
    }
}

#[test]
fn add_into_adds_in_f32() {
    check_add(add_into_f32);
    check_add(add_into_bf16);
    check_add(add_into_f16);
}
