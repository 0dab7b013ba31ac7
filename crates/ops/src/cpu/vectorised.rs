//! Compiling a loop for the widest vectors that the machine turns out to have.
//!
//! Only the instructions differ, never the arithmetic: the order of operations is that of the source, and a product
//! and a sum are never contracted into one rounding. So every machine gives the same bits here. (The `gemm` crate does
//! contract, and in another order on other machines: results with products are the same on equal machines.)

#![allow(unsafe_code)]

#[cfg(target_arch = "x86_64")]
use super::processor::has_avx512;

/// Calls `f`, compiled for AVX-512 or AVX2 where the processor has them.
///
/// `f` must be a closure marked `#[inline(always)]`, and so must be what it calls: only code inlined here is compiled
/// for the wider vectors.
#[inline(always)]
pub(crate) fn vectorised<R>(f: impl FnOnce() -> R) -> R {
    #[cfg(target_arch = "x86_64")]
    {
        if has_avx512() {
            // SAFETY: the processor has what the function is compiled for.
            return unsafe { with_avx512(f) };
        }
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the processor has what the function is compiled for.
            return unsafe { with_avx2(f) };
        }
    }
    f()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vl,avx512dq,avx512bw")]
fn with_avx512<R>(f: impl FnOnce() -> R) -> R {
    f()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn with_avx2<R>(f: impl FnOnce() -> R) -> R {
    f()
}

#[cfg(test)]
mod tests {
    use crate::cpu::exp::exp;
    use crate::cpu::lanes;

    /// Sums and exponentials of numbers whose roundings show every reordering and contraction.
    #[inline(always)]
    fn kernel(values: &[f32]) -> Vec<u32> {
        let mut results: Vec<f32> = values.iter().map(|x| x / (1.0 + exp(-x)) + 0.1).collect();
        results.push(lanes::dot(values, values));
        results.push(lanes::max(values, |x| x * 0.3));
        let mut exps = values.to_vec();
        results.push(lanes::replace_by_exp(&mut exps, |x| x * 0.7 - 0.1));
        let (sum, dot) = lanes::replace_by_exp_and_dot(&mut exps, values, |x| x * 0.7);
        results.extend([sum, dot]);
        results.extend(exps);
        results.into_iter().map(f32::to_bits).collect()
    }

    #[test]
    fn the_bits_do_not_depend_on_the_instructions() {
        let values: Vec<f32> = (0..1003).map(|i| (i as f32 * 0.731).sin() * 9.0).collect();
        let portable = kernel(&values);
        assert_eq!(super::vectorised(|| kernel(&values)), portable);
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the processor has what the function is compiled for.
            assert_eq!(unsafe { super::with_avx2(|| kernel(&values)) }, portable);
        }
    }
}
