//! What the processor multiplies with: vectors of 256 or 512 bits, pairs of bf16, tiles (Intel AMX).

#![allow(unsafe_code)]

/// Whether it has the vectors.
#[cfg(target_arch = "x86_64")]
#[inline]
pub(crate) fn has_avx512() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512dq")
}

/// Whether it has vectors of 256 bits, multiply-adds of them, and makes f32 of f16.
#[cfg(target_arch = "x86_64")]
pub(crate) fn has_avx2() -> bool {
    is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c")
}

/// Whether it multiplies pairs of bf16.
#[cfg(target_arch = "x86_64")]
pub(crate) fn has_avx512_bf16() -> bool {
    has_avx512() && is_x86_feature_detected!("avx512bf16")
}

/// Whether the processor has AMX for bf16, and the system lets this process use it.
pub(crate) fn has_amx() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        static HAS_AMX: std::sync::LazyLock<bool> =
            std::sync::LazyLock::new(|| x86_64::is_in_processor() && x86_64::is_permitted());
        *HAS_AMX
    }
    #[cfg(not(target_arch = "x86_64"))]
    false
}

#[cfg(target_arch = "x86_64")]
mod x86_64 {
    use raw_cpuid::CpuId;

    pub(super) fn is_in_processor() -> bool {
        let features = CpuId::new().get_extended_feature_info();
        let has_tiles = features.is_some_and(|x| x.has_amx_tile() && x.has_amx_bf16());
        has_tiles && super::has_avx512_bf16()
    }

    /// Asks Linux for the tiles, which it gives a process only then; an answer other than 0 is an error.
    pub(super) fn is_permitted() -> bool {
        #[cfg(target_os = "linux")]
        {
            const ARCH_PRCTL: i64 = 158;
            const ARCH_REQ_XCOMP_PERM: i64 = 0x1023;
            const XFEATURE_XTILEDATA: i64 = 18;
            let mut answer = ARCH_PRCTL;
            // SAFETY: the call reads and writes no memory of ours; the kernel changes rcx and r11.
            unsafe {
                std::arch::asm!(
                    "syscall",
                    inlateout("rax") answer,
                    in("rdi") ARCH_REQ_XCOMP_PERM,
                    in("rsi") XFEATURE_XTILEDATA,
                    lateout("rcx") _,
                    lateout("r11") _,
                    options(nostack)
                );
            }
            answer == 0
        }
        #[cfg(not(target_os = "linux"))]
        false
    }
}
