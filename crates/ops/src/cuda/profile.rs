//! GPU time of each kernel and product, from events on the stream around it. The events are read when the profile ends, so that
//! nothing waits before.

#![allow(unsafe_code)]

use crate::timing::op_times::OpTime;
use crate::timing::op_times::{OpName, OpTimes};
use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::result::event::elapsed;
use candle_core::cuda_backend::cudarc::driver::sys::CUevent_flags::CU_EVENT_DEFAULT;
use candle_core::cuda_backend::cudarc::driver::sys::CUresult;
use candle_core::cuda_backend::cudarc::driver::{CudaEvent, CudaStream};
use candle_core::{CudaDevice, Result, bail};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// No GPU has this number.
const NONE: usize = usize::MAX;

/// The GPU whose work is timed: all that a launch looks at while no profile runs.
static TIMED_GPU: AtomicUsize = AtomicUsize::new(NONE);

/// The profile that runs.
static RUNNING: Mutex<Option<Running>> = Mutex::new(None);

struct Running {
    began: CudaEvent,
    ops: Vec<Op>,
}

struct Op {
    name: OpName,
    span: Span,
}

/// Work between two events of a stream.
pub(crate) struct Span {
    pub start: CudaEvent,
    pub end: CudaEvent,
}

impl Span {
    /// How long it took; waits for its end if it has not come.
    pub(crate) fn secs(&self) -> Result<f64> {
        self.start.context().bind_to_thread().w()?;
        // SAFETY: both events are alive, of the current context, and were recorded with times.
        let millis = match unsafe { elapsed(self.start.cu_event(), self.end.cu_event()) } {
            Err(error) if error.0 == CUresult::CUDA_ERROR_NOT_READY => {
                self.start.elapsed_ms(&self.end).w()?
            }
            millis => millis.w()?,
        };
        Ok(f64::from(millis) / 1e3)
    }
}

/// An event after what is on the device's stream.
pub(crate) fn mark(device: &CudaDevice) -> Result<CudaEvent> {
    now(&device.cuda_stream())
}

fn running() -> MutexGuard<'static, Option<Running>> {
    RUNNING.lock().unwrap_or_else(PoisonError::into_inner)
}

fn now(stream: &Arc<CudaStream>) -> Result<CudaEvent> {
    stream.record_event(Some(CU_EVENT_DEFAULT)).w()
}

/// Puts `work` on the stream; if its GPU is being profiled, between two events under the name `op`.
pub(crate) fn timed<T>(
    op: OpName,
    stream: &Arc<CudaStream>,
    work: impl FnOnce() -> Result<T>,
) -> Result<T> {
    if TIMED_GPU.load(Relaxed) != stream.context().ordinal() {
        return work();
    }
    let start = now(stream)?;
    let result = work()?;
    let end = now(stream)?;
    if let Some(running) = running().as_mut() {
        let span = Span { start, end };
        running.ops.push(Op { name: op, span });
    }
    Ok(result)
}

/// Times what is put on the GPU from now on.
pub(crate) fn start(device: &CudaDevice) -> Result<()> {
    let stream = device.cuda_stream();
    let mut running = running();
    if running.is_some() {
        bail!("a profile runs already: finish it before the next one")
    }
    *running = Some(Running {
        began: now(&stream)?,
        ops: Vec::new(),
    });
    TIMED_GPU.store(stream.context().ordinal(), Relaxed);
    Ok(())
}

/// Ends the profile and waits for the GPU: the seconds from its start to its end, and those of each operation.
pub(crate) fn finish(device: &CudaDevice) -> Result<(f64, Vec<OpTime>)> {
    TIMED_GPU.store(NONE, Relaxed);
    let Some(Running { began, ops: timed }) = running().take() else {
        bail!("no profile runs: start one first")
    };
    let all = Span {
        start: began,
        end: mark(device)?,
    };
    let total_secs = all.secs()?;
    let mut ops = OpTimes::default();
    for Op { name, span } in &timed {
        ops.add(*name, span.secs()?);
    }
    Ok((total_secs, ops.into_vec()))
}
