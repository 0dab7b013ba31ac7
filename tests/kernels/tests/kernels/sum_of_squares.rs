//! Sum of squares in two passes.

use crate::element::{Element, random, rng};
use candle_train_kernel_tests::{Buffer, Launch};
use half::{bf16, f16};

type Partials<T> = unsafe extern "C" fn(*mut f64, *const T, i64);

unsafe extern "C" {
    fn sum_of_squares_f32(partials: *mut f64, src: *const f32, len: i64);
    fn sum_of_squares_bf16(partials: *mut f64, src: *const bf16, len: i64);
    fn sum_of_squares_f16(partials: *mut f64, src: *const f16, len: i64);
    fn sum_partials_f64(dst: *mut f64, partials: *const f64, num_partials: i32, add: i32);
}

/// The sum for `values`, added to `old` if there is one.
fn sum<T: Element>(kernel: Partials<T>, values: &[T], old: Option<f64>, seed: u64) -> f64 {
    let src = Buffer::from_slice(values);
    let num_blocks = 5;
    let (partials, dst) = (
        Buffer::<f64>::new(num_blocks),
        Buffer::from_slice(&[old.unwrap_or(f64::NAN)]),
    );
    let launch = |blocks| Launch {
        seed,
        ..Launch::new(blocks, 64, 256)
    };
    launch!(
        launch(num_blocks),
        kernel(partials.ptr(), src.ptr(), values.len() as i64)
    )
    .unwrap();
    let (count, add) = (num_blocks as i32, i32::from(old.is_some()));
    launch!(
        launch(1),
        sum_partials_f64(dst.ptr(), partials.ptr(), count, add)
    )
    .unwrap();
    dst.read()[0]
}

fn check<T: Element>(kernel: Partials<T>) {
    let mut rng = rng(6);
    for len in [0, 1, 33, 1000, 4099] {
        let x = random::<T>(&mut rng, len, 3.0);
        let want: f64 = x.iter().map(|x| x.to_f64().powi(2)).sum();
        let got = sum(kernel, &x, None, 1);
        assert!((got - want).abs() <= 1e-13 * want, "{got} {want}");
        assert_eq!(
            got.to_bits(),
            sum(kernel, &x, None, 2).to_bits(),
            "another order of threads"
        );
        assert!((sum(kernel, &x, Some(7.5), 1) - want - 7.5).abs() <= 1e-12 * (want + 7.5));
        for broken in [f64::NAN, f64::INFINITY].map(T::from_f64) {
            if let Some(at) = len.checked_sub(1) {
                let mut x = x.clone();
                x[at / 2] = broken;
                assert!(!sum(kernel, &x, None, 1).is_finite());
            }
        }
    }
}

#[test]
fn f32_equals_the_reference() {
    check::<f32>(sum_of_squares_f32);
}

#[test]
fn bf16_equals_the_reference() {
    check::<bf16>(sum_of_squares_bf16);
}

#[test]
fn f16_equals_the_reference() {
    check::<f16>(sum_of_squares_f16);
}

#[test]
fn large_gradients_do_not_overflow() {
    assert_eq!(
        sum(sum_of_squares_f32, &[1e30; 4], None, 1),
        4.0 * f64::from(1e30f32).powi(2)
    );
}
