//! SwiGLU forward and backward.

use crate::element::{Element, assert_close, random, rng};
use candle_train_kernel_tests::{Buffer, Launch};
use half::{bf16, f16};

type Forward<T> = unsafe extern "C" fn(*mut T, *const T, *const T, i64);
type Backward<T> = unsafe extern "C" fn(*mut T, *mut T, *const T, *const T, *const T, i64);

unsafe extern "C" {
    fn swiglu_forward_f32(y: *mut f32, gate: *const f32, up: *const f32, len: i64);
    fn swiglu_forward_bf16(y: *mut bf16, gate: *const bf16, up: *const bf16, len: i64);
    fn swiglu_forward_f16(y: *mut f16, gate: *const f16, up: *const f16, len: i64);
    fn swiglu_backward_f32(
        dgate: *mut f32,
        dup: *mut f32,
        gate: *const f32,
        up: *const f32,
        dy: *const f32,
        len: i64,
    );
    fn swiglu_backward_bf16(
        dgate: *mut bf16,
        dup: *mut bf16,
        gate: *const bf16,
        up: *const bf16,
        dy: *const bf16,
        len: i64,
    );
    fn swiglu_backward_f16(
        dgate: *mut f16,
        dup: *mut f16,
        gate: *const f16,
        up: *const f16,
        dy: *const f16,
        len: i64,
    );
}

fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

/// Its derivative, by central differences: the kernel's formula is not repeated here.
fn silu_slope(x: f64) -> f64 {
    (silu(x + 1e-5) - silu(x - 1e-5)) / 2e-5
}

fn check<T: Element>(forward: Forward<T>, backward: Backward<T>) {
    let mut rng = rng(3);
    for (len, shift) in [(1, 0), (2, 1), (97, 0), (1000, 0), (1003, 5), (127 * 33, 0)] {
        let [gate, up, dy] = [8.0, 2.0, 2.0].map(|size| random::<T>(&mut rng, len, size));
        let launch = Launch::new(3, 64, 0);
        let (g, u) = (
            Buffer::shifted(len, shift).with(&gate),
            Buffer::from_slice(&up),
        );
        let y = Buffer::<T>::new(len);
        launch!(launch, forward(y.ptr(), g.ptr(), u.ptr(), len as i64)).unwrap();
        let value = |i: usize| [gate[i].to_f64(), up[i].to_f64(), dy[i].to_f64()];
        let of = |f: fn([f64; 3]) -> f64| (0..len).map(|i| f(value(i))).collect::<Vec<_>>();
        assert_close("y", &y.read(), &of(|[g, u, _]| silu(g) * u), 8.0);
        let want_gate = of(|[g, u, dy]| dy * u * silu_slope(g));
        let want_up = of(|[g, _, dy]| dy * silu(g));
        let d = Buffer::from_slice(&dy);
        let (dg, du) = (Buffer::<T>::shifted(len, shift), Buffer::<T>::new(len));
        let n = len as i64;
        launch!(
            launch,
            backward(dg.ptr(), du.ptr(), g.ptr(), u.ptr(), d.ptr(), n)
        )
        .unwrap();
        assert_close("dgate", &dg.read(), &want_gate, 16.0);
        assert_close("dup", &du.read(), &want_up, 8.0);
        launch!(
            launch,
            backward(g.ptr(), u.ptr(), g.ptr(), u.ptr(), d.ptr(), n)
        )
        .unwrap();
        assert_eq!((g.read(), u.read()), (dg.read(), du.read()), "in place");
    }
}

#[test]
fn f32_equals_the_reference() {
    check(swiglu_forward_f32, swiglu_backward_f32);
}

#[test]
fn bf16_equals_the_reference() {
    check(swiglu_forward_bf16, swiglu_backward_bf16);
}

#[test]
fn f16_equals_the_reference() {
    check(swiglu_forward_f16, swiglu_backward_f16);
}

#[test]
fn large_gates_saturate() {
    let gate = [-200.0f32, -89.0, -88.0, 88.0, 200.0];
    let (g, u) = (Buffer::from_slice(&gate), Buffer::from_slice(&[1.0f32; 5]));
    let y = Buffer::new(5);
    launch!(
        Launch::new(1, 32, 0),
        swiglu_forward_f32(y.ptr(), g.ptr(), u.ptr(), 5)
    )
    .unwrap();
    let want: Vec<f64> = gate.iter().map(|&g| silu(f64::from(g))).collect();
    assert_close("y", &y.read(), &want, 1.0);
}
