//! Where the time of a GPU goes, operation by operation.

use candle_core::{Device, Result, bail};
use std::fmt::{Display, Formatter};

/// GPU time of a kernel or product over a profile.
#[derive(Clone, Debug, PartialEq)]
pub struct OpTime {
    /// The kernel's name, or the operation for which cuBLAS multiplied with the product's m x n x k and type: products of
    /// different shapes are kept apart.
    pub op: String,
    /// How often it ran.
    pub num_calls: usize,
    /// Seconds of all calls.
    pub secs: f64,
}

/// GPU time of the operations between [`Profile::start`] and [`Profile::finish`], from CUDA events around each kernel and each
/// product.
///
/// One profile runs at a time in a process. It sees one GPU, whichever thread gives it work. A call lasts from when the GPU has
/// done what came before until it has done the call: if the host is late, waiting for it counts where it happens. Events cost a
/// few microseconds each; while no profile runs there are none.
#[derive(Clone, Debug, PartialEq)]
pub struct Profile {
    /// Seconds from start to end on the GPU.
    pub total_secs: f64,
    /// The longest first.
    pub ops: Vec<OpTime>,
    /// Steps that were profiled, by which [`Display`] divides.
    pub num_steps: usize,
}

impl Profile {
    /// Times what is put on `device` from now on.
    ///
    /// # Errors
    /// On the CPU, and while a profile runs.
    pub fn start(device: &Device) -> Result<()> {
        match device {
            #[cfg(feature = "cuda")]
            Device::Cuda(cuda) => crate::cuda::start_profile(cuda),
            _ => {
                bail!("a profile needs a GPU: it is made of CUDA events, and this runs on the CPU")
            }
        }
    }

    /// The times of `num_steps` steps since the start. Waits for the GPU.
    ///
    /// # Errors
    /// When no profile runs, or the GPU has failed.
    pub fn finish(device: &Device, num_steps: usize) -> Result<Self> {
        match device {
            #[cfg(feature = "cuda")]
            Device::Cuda(cuda) => {
                let (total_secs, ops) = crate::cuda::finish_profile(cuda)?;
                Ok(Self::new(total_secs, ops, num_steps))
            }
            _ => bail!("no profile of {num_steps} steps runs: on the CPU there is none"),
        }
    }

    /// The times of `num_steps` steps that took `total_secs` together, in order.
    pub fn new(total_secs: f64, mut ops: Vec<OpTime>, num_steps: usize) -> Self {
        ops.sort_by(|a, b| b.secs.total_cmp(&a.secs).then_with(|| a.op.cmp(&b.op)));
        Self {
            total_secs,
            ops,
            num_steps,
        }
    }
}

/// A table: operation, calls per step, milliseconds per step, share of the time from start to end.
impl Display for Profile {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        let steps = self.num_steps.max(1) as f64;
        let width = self.ops.iter().map(|time| time.op.len()).max();
        let width = width.unwrap_or(0).max(32);
        let (op, calls, ms, percent) = ("operation", "calls/step", "ms/step", "%");
        writeln!(f, "{op:<width$} {calls:>12} {ms:>12} {percent:>7}")?;
        let mut row = |op: &str, calls: &str, secs: f64| {
            let (ms, percent) = (secs * 1e3 / steps, 100.0 * secs / self.total_secs);
            writeln!(f, "{op:<width$} {calls:>12} {ms:>12.3} {percent:>7.1}")
        };
        let mut known = 0.0;
        for time in &self.ops {
            let calls = format!("{:.1}", time.num_calls as f64 / steps);
            row(&time.op, &calls, time.secs)?;
            known += time.secs;
        }
        // Kernels of candle, copies, and a GPU that waits for the host.
        row("everything else", "", (self.total_secs - known).max(0.0))?;
        row("all", "", self.total_secs)
    }
}
