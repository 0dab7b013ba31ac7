//! Casts: the bits of the CPU's conversion, for every kind of number.

use candle_train_kernel_tests::{Buffer, Launch};
use half::{bf16, f16};
use rand::Rng;

unsafe extern "C" {
    fn round_bf16(dst: *mut bf16, src: *const f32, len: i64);
    fn round_f16(dst: *mut f16, src: *const f32, len: i64);
    fn widen_bf16(dst: *mut f32, src: *const bf16, len: i64);
    fn widen_f16(dst: *mut f32, src: *const f16, len: i64);
}

/// Every upper half with lower halves around the tie, where `dropped` bits are dropped, and random bits: subnormal, infinite and NaN
/// among them.
fn numbers(dropped: u32) -> Vec<f32> {
    let mut rng = super::element::rng(1);
    let half = 1u32 << (dropped - 1);
    let lower = [0, 1, half - 1, half, half + 1, 2 * half - 1];
    let mut bits: Vec<u32> = (0..=u16::MAX)
        .flat_map(|upper| lower.map(|lower| u32::from(upper) << 16 | lower))
        .collect();
    bits.extend((0..1001).map(|_| rng.random::<u32>()));
    bits.extend([
        0x7f7f_ffff,
        0xff7f_8000,
        0x7f80_0001,
        0xffff_ffff,
        0x8000_0000,
    ]);
    bits.into_iter().map(f32::from_bits).collect()
}

fn check_rounding<T: Copy>(
    round: unsafe extern "C" fn(*mut T, *const f32, i64),
    values: &[f32],
    bits: fn(T) -> u16,
    from_f32: fn(f32) -> T,
) {
    for shift in [0, 1] {
        let src = Buffer::shifted(values.len(), shift).with(values);
        let dst = Buffer::<T>::new(values.len());
        let len = values.len() as i64;
        launch!(Launch::new(3, 96, 0), round(dst.ptr(), src.ptr(), len)).unwrap();
        for (got, x) in dst.read().iter().zip(values) {
            assert_eq!(
                bits(*got),
                bits(from_f32(*x)),
                "{x:e} ({:08x})",
                x.to_bits()
            );
        }
    }
}

#[test]
fn f32_is_rounded_as_the_cpu_does() {
    check_rounding(round_bf16, &numbers(16), bf16::to_bits, bf16::from_f32);
    check_rounding(round_f16, &numbers(13), f16::to_bits, f16::from_f32);
}

fn check_widening<T: Copy>(
    widen: unsafe extern "C" fn(*mut f32, *const T, i64),
    from_bits: fn(u16) -> T,
    to_f32: fn(T) -> f32,
) {
    let values: Vec<T> = (0..=u16::MAX).map(from_bits).collect();
    let (src, dst) = (
        Buffer::from_slice(&values),
        Buffer::<f32>::new(values.len()),
    );
    let len = values.len() as i64;
    launch!(Launch::new(5, 64, 0), widen(dst.ptr(), src.ptr(), len)).unwrap();
    for (got, x) in dst.read().iter().zip(&values) {
        let want = to_f32(*x);
        let both_nan = got.is_nan() && want.is_nan();
        assert!(got.to_bits() == want.to_bits() || both_nan, "{want:e}");
    }
}

#[test]
fn widening_is_exact() {
    check_widening(widen_bf16, bf16::from_bits, bf16::to_f32);
    check_widening(widen_f16, f16::from_bits, f16::to_f32);
}
