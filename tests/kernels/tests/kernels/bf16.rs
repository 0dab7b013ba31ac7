//! Casts: the bits of the CPU's conversion, for every kind of number.

use candle_train_kernel_tests::{Buffer, Launch};
use half::bf16;
use rand::Rng;

unsafe extern "C" {
    fn cast_f32_to_bf16(dst: *mut bf16, src: *const f32, len: i64);
    fn cast_bf16_to_f32(dst: *mut f32, src: *const bf16, len: i64);
}

#[test]
fn f32_to_bf16_rounds_as_the_cpu_does() {
    let mut rng = super::element::rng(1);
    // Every upper half with lower halves around the tie, and random bits: subnormal, infinite and NaN among them.
    let lower = [0u32, 1, 0x7fff, 0x8000, 0x8001, 0xffff];
    let mut bits: Vec<u32> = (0..=u16::MAX)
        .map(|upper| u32::from(upper) << 16 | lower[rng.random_range(0..6)])
        .collect();
    bits.extend((0..1001).map(|_| rng.random::<u32>()));
    bits.extend([
        0x7f7f_ffff,
        0xff7f_8000,
        0x7f80_0001,
        0xffff_ffff,
        0x8000_0000,
    ]);
    let values: Vec<f32> = bits.into_iter().map(f32::from_bits).collect();
    for shift in [0, 1] {
        let src = Buffer::shifted(values.len(), shift).with(&values);
        let dst = Buffer::<bf16>::new(values.len());
        let len = values.len() as i64;
        launch!(
            Launch::new(3, 96, 0),
            cast_f32_to_bf16(dst.ptr(), src.ptr(), len)
        )
        .unwrap();
        for (got, x) in dst.read().iter().zip(&values) {
            assert_eq!(
                got.to_bits(),
                bf16::from_f32(*x).to_bits(),
                "{x:e} ({:08x})",
                x.to_bits()
            );
        }
    }
}

#[test]
fn bf16_to_f32_is_exact() {
    let values: Vec<bf16> = (0..=u16::MAX).map(bf16::from_bits).collect();
    let (src, dst) = (
        Buffer::from_slice(&values),
        Buffer::<f32>::new(values.len()),
    );
    let len = values.len() as i64;
    launch!(
        Launch::new(5, 64, 0),
        cast_bf16_to_f32(dst.ptr(), src.ptr(), len)
    )
    .unwrap();
    for (got, x) in dst.read().iter().zip(&values) {
        assert_eq!(got.to_bits(), u32::from(x.to_bits()) << 16);
    }
}
