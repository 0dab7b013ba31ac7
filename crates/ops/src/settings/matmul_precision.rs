//! How exact products of f32 are.

use super::product_choice::ProductChoice;
use crate::cpu::processor::has_amx;
use candle_core::Device;
use std::cell::Cell;
use std::fmt::{Display, Formatter};

/// How a rank multiplies matrices of f32 in linear layers, with the names that PyTorch has for it
/// (`torch.set_float32_matmul_precision`). Products of bf16 and f16 do not depend on it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
pub enum MatmulPrecision {
    /// All bits of each number.
    ///
    /// On a CPU with AMX as sums of three bf16, which takes parts below 2^-126 for 0, but for small products ([`ProductChoice::fastest`]).
    #[default]
    Highest,
    /// 16 bits of each number on CPUs with AMX, 11 on GPUs (TF32); other CPUs do as for highest.
    ///
    /// On a CPU with AMX each number is the sum of two bf16.
    High,
}

thread_local! {
    static OF_THREAD: Cell<MatmulPrecision> = const { Cell::new(MatmulPrecision::Highest) };
}

impl MatmulPrecision {
    /// That of this thread: what was set last, else [`Self::Highest`].
    pub fn get() -> Self {
        OF_THREAD.get()
    }

    /// Makes it that of this rank from the next product on: of all threads of the pool that this thread works in, or of this thread alone.
    pub fn set(self) {
        on_threads_of_rank(|| OF_THREAD.set(self));
    }

    /// Calls `run` as if this were it on this thread.
    pub fn during<R>(self, run: impl FnOnce() -> R) -> R {
        let before = OF_THREAD.replace(self);
        let result = run();
        OF_THREAD.set(before);
        result
    }

    /// Whether products on `device` depend on it: not where the environment has a [`ProductChoice`].
    pub fn matters_on(device: &Device) -> bool {
        match device {
            Device::Cpu => has_amx() && matches!(ProductChoice::from_env(), Ok(None)),
            device => device.is_cuda(),
        }
    }
}

/// Runs `set` on all threads of the pool that this thread works in, or on this thread alone.
pub(crate) fn on_threads_of_rank(set: impl Fn() + Sync) {
    match rayon::current_thread_index() {
        Some(_) => drop(rayon::broadcast(|_| set())),
        None => set(),
    }
}

impl Display for MatmulPrecision {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Highest => "highest",
            Self::High => "high",
        })
    }
}
