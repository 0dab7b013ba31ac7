//! What a run tells while it goes on, and who listens.

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use candle_comm::message_of;
use candle_core::Result;
use candle_trainer::{Progress, TrainEvent};

use crate::output::{print_line, print_message, print_note};

/// What happens in a run.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum RunEvent<'a> {
    /// Something to know, in a line or a few.
    Note(&'a str),
    /// Something that may not be what is wanted.
    Warning(&'a str),
    /// Something that went wrong at the end of a run that has left what it could.
    Failure(&'a str),
    /// The steps begin, of which the run has so many.
    Begin {
        /// Steps of the whole run.
        num_steps: usize,
    },
    /// What happens between its first and its last step.
    Train(TrainEvent<'a>),
    /// The steps have ended.
    End,
    /// What the model wrote.
    Sample {
        /// When: before or after training.
        title: &'a str,
        /// The prompt, and what follows it.
        text: &'a str,
    },
}

/// Who is told what happens, on the first rank of a run.
///
/// A closure is one:
///
/// ```
/// use std::ops::ControlFlow;
/// use candle_train_run::{Observers, RunEvent};
/// use candle_trainer::TrainEvent;
///
/// // Ends the run as soon as the loss is below 1.
/// let until = |event: &RunEvent| match event {
///     RunEvent::Train(TrainEvent::Step(step)) if step.loss < 1.0 => ControlFlow::Break(()),
///     _ => ControlFlow::Continue(()),
/// };
/// let observers = Observers::console().and(until);
/// # let _ = observers;
/// ```
pub trait Observer: Send {
    /// Is told; `Break` stops the run after the current step, with a checkpoint or its model saved, as a signal does.
    ///
    /// # Errors
    /// What keeps it from observing: it is told no more, and a warning says why.
    fn observe(&mut self, event: &RunEvent) -> Result<ControlFlow<()>>;
}

impl<F: FnMut(&RunEvent) -> ControlFlow<()> + Send> Observer for F {
    fn observe(&mut self, event: &RunEvent) -> Result<ControlFlow<()>> {
        Ok(self(event))
    }
}

/// Those who are told, in their order.
pub struct Observers<'o> {
    all: Mutex<Vec<Box<dyn Observer + 'o>>>,
    asks_to_stop: Arc<AtomicBool>,
    numbers: Mutex<Numbers>,
}

/// The last numbers of a run.
#[derive(Clone, Copy, Default)]
pub(crate) struct Numbers {
    pub steps: usize,
    pub loss: Option<f64>,
    pub eval_loss: Option<f64>,
}

impl<'o> Observers<'o> {
    /// Nobody: the run is silent, but for what takes long before its first step.
    pub fn none() -> Self {
        Self {
            all: Mutex::default(),
            asks_to_stop: Arc::default(),
            numbers: Mutex::default(),
        }
    }

    /// [`Console`] alone.
    pub fn console() -> Self {
        Self::none().and(Console::default())
    }

    /// And this one.
    pub fn and(self, observer: impl Observer + 'o) -> Self {
        self.push(Box::new(observer));
        self
    }

    pub(crate) fn push(&self, observer: Box<dyn Observer + 'o>) {
        let mut all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        all.push(observer);
    }

    /// Tells all of them.
    pub(crate) fn tell(&self, event: &RunEvent) {
        if let RunEvent::Train(event) = event {
            self.keep(event);
        }
        let mut all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        let mut warnings = Vec::new();
        all.retain_mut(|observer| match observer.observe(event) {
            Ok(flow) => {
                self.asks_to_stop
                    .fetch_or(flow.is_break(), Ordering::Relaxed);
                true
            }
            // What was trained is worth more than a line about it.
            Err(err) => {
                warnings.push(message_of(&err));
                false
            }
        });
        drop(all);
        for warning in warnings {
            self.warn(&warning);
        }
    }

    fn keep(&self, event: &TrainEvent) {
        let mut numbers = self.numbers.lock().unwrap_or_else(PoisonError::into_inner);
        match event {
            TrainEvent::Step(step) => {
                numbers.steps = step.global_step;
                numbers.loss = Some(step.loss);
            }
            TrainEvent::Evaluation(evaluation) => numbers.eval_loss = Some(evaluation.eval_loss),
            _ => {}
        }
    }

    pub(crate) fn numbers(&self) -> Numbers {
        *self.numbers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn note(&self, line: impl AsRef<str>) {
        self.tell(&RunEvent::Note(line.as_ref()));
    }

    pub(crate) fn warn(&self, warning: impl AsRef<str>) {
        self.tell(&RunEvent::Warning(warning.as_ref()));
    }

    /// Whether one of them has asked to stop the run.
    pub(crate) fn ask_to_stop(&self) -> Arc<AtomicBool> {
        self.asks_to_stop.clone()
    }
}

/// Shows a run on stdout, its warnings and the progress of its steps on stderr: a bar on a terminal, else a line now and then.
#[derive(Default)]
pub struct Console {
    progress: Option<Progress>,
}

impl Observer for Console {
    fn observe(&mut self, event: &RunEvent) -> Result<ControlFlow<()>> {
        match (*event, &mut self.progress) {
            (RunEvent::Begin { num_steps }, progress) => *progress = Some(Progress::new(num_steps)),
            (RunEvent::Train(TrainEvent::Step(step)), Some(progress)) => progress.update(step),
            (RunEvent::Train(TrainEvent::Begin(what)), Some(progress)) => {
                progress.between_steps(what);
            }
            (RunEvent::Train(TrainEvent::Evaluation(evaluation)), Some(progress)) => {
                progress.println(&evaluation.in_words());
            }
            (RunEvent::End, progress) => {
                if let Some(mut progress) = progress.take() {
                    progress.finish();
                }
            }
            (RunEvent::Note(line), Some(progress)) => progress.println(line),
            (RunEvent::Note(line), None) => print_line(line),
            (RunEvent::Warning(warning), Some(progress)) => {
                progress.println(&format!("warning: {warning}"));
            }
            (RunEvent::Warning(warning), None) => print_note(&format!("warning: {warning}")),
            (RunEvent::Failure(failure), _) => print_message(failure),
            (RunEvent::Sample { title, text }, _) => {
                print_line(&format!("--- {title}\n{text}\n---"));
            }
            _ => {}
        }
        Ok(ControlFlow::Continue(()))
    }
}
