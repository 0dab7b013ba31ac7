//! GPU time of each kernel and product, from events on the stream around it. The events are read when the profile ends, so that
//! nothing waits before.

use crate::OpTime;
use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::sys::CUevent_flags::CU_EVENT_DEFAULT;
use candle_core::cuda_backend::cudarc::driver::{CudaEvent, CudaStream};
use candle_core::{CudaDevice, Result, bail};
use std::collections::BTreeMap;
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
    spans: Vec<Span>,
}

struct Span {
    op: &'static str,
    start: CudaEvent,
    end: CudaEvent,
}

fn running() -> MutexGuard<'static, Option<Running>> {
    RUNNING.lock().unwrap_or_else(PoisonError::into_inner)
}

fn now(stream: &Arc<CudaStream>) -> Result<CudaEvent> {
    stream.record_event(Some(CU_EVENT_DEFAULT)).w()
}

/// Puts `work` on the stream; if its GPU is being profiled, between two events under the name `op`.
pub(super) fn timed<T>(
    op: &'static str,
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
        running.spans.push(Span { op, start, end });
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
        spans: Vec::new(),
    });
    TIMED_GPU.store(stream.context().ordinal(), Relaxed);
    Ok(())
}

/// Ends the profile and waits for the GPU: the seconds from its start to its end, and those of each operation.
pub(crate) fn finish(device: &CudaDevice) -> Result<(f64, Vec<OpTime>)> {
    TIMED_GPU.store(NONE, Relaxed);
    let Some(Running { began, spans }) = running().take() else {
        bail!("no profile runs: start one first")
    };
    let ended = now(&device.cuda_stream())?;
    let total_secs = secs(&began, &ended)?;
    let mut ops: BTreeMap<&'static str, OpTime> = BTreeMap::new();
    for span in &spans {
        let time = ops.entry(span.op).or_insert(OpTime {
            op: span.op,
            num_calls: 0,
            secs: 0.0,
        });
        time.num_calls += 1;
        time.secs += secs(&span.start, &span.end)?;
    }
    Ok((total_secs, ops.into_values().collect()))
}

fn secs(start: &CudaEvent, end: &CudaEvent) -> Result<f64> {
    Ok(f64::from(start.elapsed_ms(end).w()?) / 1e3)
}
