//! What a rank does when: spans of time that its thread records from [`start`] to [`stop`]. At other times a span costs a look at a
//! variable of the thread.
//!
//! Spans are times of the host. While a thread records, the host waits for a GPU at the end of each span and of each wait for an
//! operation, so that what the GPU does is in the span that asked for it; steps take longer then, and give the same bits. An
//! operation begins when it is called, if the GPU begins with it later.

use std::cell::RefCell;
use std::time::Instant;

use candle_core::{Device, Result};

/// What a span of time was spent on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SpanKind {
    /// An optimizer step with all its parts.
    Step,
    /// Getting the batches of a step.
    Data,
    /// A pass of a micro-batch through a stage.
    Pass {
        /// Which pass.
        pass: PassKind,
        /// Which stage of the pipeline, from 0.
        stage: usize,
        /// Which micro-batch of the step, from 0.
        micro_batch: usize,
    },
    /// Reduction, norm, clipping and update.
    Optimizer,
    /// An evaluation.
    Evaluation,
    /// What a checkpoint takes of the training's time.
    Checkpoint,
    /// Waiting for an operation.
    Idle(OpSpan),
    /// An operation in flight, whether the rank waits for it or not.
    Communication(OpSpan),
}

/// A pass of a micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PassKind {
    /// The forward pass.
    Forward,
    /// The whole backward pass.
    Backward,
    /// Its input half.
    InputGrad,
    /// Its weight half.
    WeightGrad,
}

impl PassKind {
    /// For people.
    pub fn name(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::Backward => "backward",
            Self::InputGrad => "input gradient",
            Self::WeightGrad => "weight gradient",
        }
    }
}

/// An operation of a group of ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct OpSpan {
    /// [Its name](crate::Operation::name).
    pub operation: &'static str,
    /// The axis of the mesh along which the group lies, or `world`.
    pub group: &'static str,
    /// Number of ranks in the group.
    pub num_ranks: usize,
    /// What this rank sends, as in [`Counters`](crate::Counters).
    pub bytes: u64,
}

/// A span of time of a rank. Spans of all kinds but [`SpanKind::Communication`] lie within each other or apart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    /// What it was spent on.
    pub kind: SpanKind,
    /// The step that was last [set](set_step) when it ended.
    pub step: usize,
    /// Its beginning.
    pub start: Instant,
    /// Its end.
    pub end: Instant,
}

/// What a thread has recorded.
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct Recording {
    /// In the order of their ends.
    pub spans: Vec<Span>,
    /// How many more there were than there was room for.
    pub num_dropped: usize,
    step: usize,
    max_spans: usize,
}

thread_local! {
    static RECORDING: RefCell<Option<Recording>> = const { RefCell::new(None) };
}

/// Records the spans of the calling thread from now on, `max_spans` at most: later ones are counted. What it has recorded before is forgotten.
pub fn start(max_spans: usize) {
    RECORDING.set(Some(Recording {
        max_spans,
        ..Recording::default()
    }));
}

/// Ends the recording of the calling thread; nothing if there was none.
pub fn stop() -> Recording {
    RECORDING.take().unwrap_or_default()
}

/// Tells at which training step the calling thread is, from 0.
pub fn set_step(step: usize) {
    RECORDING.with_borrow_mut(|recording| {
        if let Some(recording) = recording {
            recording.step = step;
        }
    });
}

/// Does `work`, which is on `device`, and records the time that it takes, whether it ends in an error or not.
///
/// # Errors
/// Those of `work`, and of a GPU that has failed.
pub fn record<T>(kind: SpanKind, device: &Device, work: impl FnOnce() -> Result<T>) -> Result<T> {
    if !is_on() {
        return work();
    }
    let start = Instant::now();
    let result = work().and_then(|value| device.synchronize().map(|()| value));
    push(kind, start, Instant::now());
    result
}

pub(crate) fn is_on() -> bool {
    RECORDING.with_borrow(Option::is_some)
}

fn push(kind: SpanKind, start: Instant, end: Instant) {
    RECORDING.with_borrow_mut(|recording| {
        let Some(recording) = recording else { return };
        if recording.spans.len() >= recording.max_spans {
            recording.num_dropped += 1;
            return;
        }
        recording.spans.push(Span {
            kind,
            step: recording.step,
            start,
            end,
        });
    });
}

/// Records that an operation was in flight from `started` to `completed`, or if nobody knows when that was to the end of the wait, and
/// that the thread waited for it.
pub(crate) fn push_waited(
    op: OpSpan,
    started: Instant,
    completed: Option<Instant>,
    (start, end): (Instant, Instant),
) {
    // Else it was there before anybody waited.
    if completed.is_none_or(|at| at > start) {
        push(SpanKind::Idle(op.clone()), start, end);
    }
    let completed = completed.map_or(end, |at| at.min(end));
    push(SpanKind::Communication(op), started, completed.max(started));
}
