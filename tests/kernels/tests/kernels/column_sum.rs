//! Sums over rows, in one and in several slices.

use crate::element::{Element, assert_close, random, rng};
use candle_train_kernel_tests::{Buffer, Launch};
use half::{bf16, f16};

type ColumnSum<T> = unsafe extern "C" fn(*mut f32, *const T, i64, i64, i32);

unsafe extern "C" {
    fn column_sum_f32(dst: *mut f32, src: *const f32, rows: i64, cols: i64, add: i32);
    fn column_sum_bf16(dst: *mut f32, src: *const bf16, rows: i64, cols: i64, add: i32);
    fn column_sum_f16(dst: *mut f32, src: *const f16, rows: i64, cols: i64, add: i32);
}

fn check<T: Element>(column_sum: ColumnSum<T>) {
    let mut rng = rng(5);
    for (rows, cols, slices) in [
        (1, 1, 1),
        (2, 33, 1),
        (127, 97, 1),
        (127, 512, 4),
        (3, 1000, 5),
        (0, 5, 1),
    ] {
        for add in [0, 1] {
            let x = random::<T>(&mut rng, rows * cols, 1.0);
            let old = random::<f32>(&mut rng, slices * cols, 1.0);
            let (src, dst) = (Buffer::from_slice(&x), Buffer::from_slice(&old));
            let launch = Launch {
                grid: [cols.div_ceil(32), slices, 1],
                ..Launch::new(0, 256, 1024)
            };
            launch!(
                launch,
                column_sum(dst.ptr(), src.ptr(), rows as i64, cols as i64, add)
            )
            .unwrap();
            let mut want: Vec<f64> = old.iter().map(|x| f64::from(*x) * f64::from(add)).collect();
            let slice = rows.div_ceil(slices);
            for (i, x) in x.iter().enumerate() {
                want[i / cols / slice * cols + i % cols] += x.to_f64();
            }
            assert_close("sums", &dst.read(), &want, 16.0);
        }
    }
}

#[test]
fn f32_equals_the_reference() {
    check::<f32>(column_sum_f32);
}

#[test]
fn bf16_equals_the_reference() {
    check::<bf16>(column_sum_bf16);
}

#[test]
fn f16_equals_the_reference() {
    check::<f16>(column_sum_f16);
}
