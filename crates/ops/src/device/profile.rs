//! Where the time of a device goes, operation by operation.

use crate::timing::op_times::OpTime;
use candle_core::{Device, Result, bail};
use std::fmt::{Display, Formatter};

/// Time of the operations between [`Profile::start`] and [`Profile::finish`].
///
/// On a GPU it is made of CUDA events around each kernel and each product. One profile runs at a time in a process. It sees one
/// GPU, whichever thread gives it work. A call lasts from when the GPU has done what came before until it has done the call: if
/// the host is late, waiting for it counts where it happens. Events cost a few microseconds each; while no profile runs there are
/// none.
///
/// On the CPU it sees the operations of this crate that the thread asks for which started it: where ranks are threads, those of one
/// rank. A call lasts as long as that thread waits for it, whichever threads compute, with the conversion of what it reads and the
/// rounding of what it gives; an operation that another one calls is part of that one, so products of attention count in
/// attention. Each thread can have a profile of its own.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Profile {
    /// Seconds from start to end, on a GPU by its clock.
    pub total_secs: f64,
    /// The longest first.
    pub ops: Vec<OpTime>,
    /// Steps that were profiled, by which [`Display`] divides.
    pub num_steps: usize,
}

impl Profile {
    /// Times what is put on `device` from now on, and on the CPU what this thread puts there.
    ///
    /// # Errors
    /// While a profile runs, or if `device` is neither the CPU nor a GPU of CUDA.
    pub fn start(device: &Device) -> Result<()> {
        match device {
            #[cfg(feature = "cuda")]
            Device::Cuda(cuda) => crate::cuda::profile::start(cuda),
            Device::Cpu => crate::timing::op_timer::start_profile(),
            device => bail!("no profile can be made on {:?}", device.location()),
        }
    }

    /// The times of `num_steps` steps since the start. Waits for a GPU; on the CPU the thread must be that of the start.
    ///
    /// # Errors
    /// When no profile runs, or the GPU has failed.
    pub fn finish(device: &Device, num_steps: usize) -> Result<Self> {
        let (total_secs, ops) = match device {
            #[cfg(feature = "cuda")]
            Device::Cuda(cuda) => crate::cuda::profile::finish(cuda)?,
            Device::Cpu => crate::timing::op_timer::finish_profile()?,
            device => bail!("no profile can be made on {:?}", device.location()),
        };
        Ok(Self::new(total_secs, ops, num_steps))
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
        // What candle itself does, copies, allocation, communication, and a GPU that waits for the host.
        row("everything else", "", (self.total_secs - known).max(0.0))?;
        row("all", "", self.total_secs)
    }
}
