//! What is made of the end of the ranks: how the launcher ends, or what it does next.

use std::time::{Duration, Instant};

use super::super::NOT_STARTED_EXIT_CODE;
use super::super::verdict::{Cause, HostLoss, describe_signal};
use super::Run;
use crate::launcher::end::{End, LOST_HOST_EXIT_CODE, NEEDS_MPI_EXIT_CODE, NOT_SAVED_EXIT_CODE};
use crate::launcher::wire::ALIVE_INTERVAL;

/// Why ranks are not started again.
pub(super) const SURVIVORS: &str = "processes are left that SIGKILL does not end";
/// Why ranks that ask for MPI are not started through it.
const ASKED_AGAIN: &str = "the ranks ask for MPI, though MPI has started them: the program finds no sign of an MPI that it knows";

/// How a start of the ranks ended, or the launcher.
pub(in crate::launcher) struct Outcome {
    /// The code with which the launcher exits if this was the last start.
    pub(in crate::launcher) exit_code: u8,
    /// What it then prints last.
    pub(in crate::launcher) sentence: Option<String>,
    pub(in crate::launcher) remedy: Remedy,
}

/// What can be done about a failure.
pub(in crate::launcher) enum Remedy {
    /// There is none, or need not be one.
    None,
    /// The ranks would fail again, or cannot be started again, as this says.
    NotAgain(String),
    /// All ranks can be started again: at once, or when the ranks of hosts that were lost are over in any case. These hosts have said
    /// that they cannot run theirs, and have ended them.
    StartAgain {
        at: Option<Instant>,
        lost: Vec<String>,
        refused: Vec<String>,
    },
    /// They were stopped as hosts have come or leave, and are started on those that are there.
    ChangeHosts,
    /// The ranks have to be started through MPI.
    ThroughMpi,
    /// The ranks were not started, since these hosts did not answer or cannot run them: others may.
    Without(Vec<String>),
}

impl Outcome {
    /// Of a run that is over.
    pub(in crate::launcher) fn last(exit_code: u8, sentence: Option<String>) -> Self {
        Self {
            exit_code,
            sentence,
            remedy: Remedy::None,
        }
    }

    /// The same with a line below the first one.
    pub(in crate::launcher) fn with_note(self, note: &str) -> Self {
        let sentence = self.sentence.map(|sentence| {
            let end = sentence.find('\n').unwrap_or(sentence.len());
            let (first, rest) = sentence.split_at(end);
            format!("{first}\n{note}{rest}")
        });
        Self { sentence, ..self }
    }
}

impl Run<'_> {
    pub(super) fn outcome(&self) -> Outcome {
        let until = |until| self.failures.cause(self.layout, until);
        if let Some((signal, at)) = self.signal {
            if let Some(cause) = until(Some(at)) {
                return self.outcome_of(&cause, Remedy::None);
            }
            let is_complete = self.started && self.failures.is_empty() && self.num_asked == 0;
            let code = if is_complete { 0 } else { 128 + signal as u8 };
            let ends = &self.failures.ranks;
            let sentence = match self.is_signalled_again {
                true => format!(
                    "stopped by {}, and by a second signal, at which the ranks were killed: what they had not saved by then is lost",
                    signal.as_str()
                ),
                false => describe_signal(signal, ends),
            };
            if let Some(unsaved) = ends
                .iter()
                .find(|rank| rank.end.has_code(NOT_SAVED_EXIT_CODE))
            {
                let why = unsaved.last_lines.last().map_or("", String::as_str);
                let sentence = format!("{sentence}; rank {} says: {why}", unsaved.rank);
                return Outcome::last(NOT_SAVED_EXIT_CODE, Some(sentence));
            }
            return Outcome::last(code, Some(sentence));
        }
        if let Some(change) = &self.change
            && self.num_asked > 0
            && self.failures.is_empty()
        {
            return Outcome {
                remedy: Remedy::ChangeHosts,
                ..Outcome::last(LOST_HOST_EXIT_CODE, Some(change.clone()))
            };
        }
        if !self.started {
            return self.not_started();
        }
        let Some(cause) = until(self.stopped_at).or_else(|| until(None)) else {
            return Outcome::last(0, None);
        };
        let end = cause.own_end();
        let needs_mpi = end.is_some_and(|end| end.has_code(NEEDS_MPI_EXIT_CODE));
        let hosts = self.failures.hosts.iter();
        let (refused, lost): (Vec<_>, Vec<_>) = hosts.partition(|loss| loss.is_refusal);
        let names = |of: &[&HostLoss]| of.iter().map(|loss| self.name_of(loss)).collect();
        let remedy = match end.and_then(End::is_for_good) {
            Some(why) => Remedy::NotAgain(why),
            None if needs_mpi && self.layout.mpi.is_none() => Remedy::ThroughMpi,
            None if needs_mpi => {
                let outcome = self.outcome_of(&cause, Remedy::None);
                return outcome.with_note(ASKED_AGAIN);
            }
            None => Remedy::StartAgain {
                at: lost.iter().map(|loss| self.is_surely_over(loss)).max(),
                lost: names(&lost),
                refused: names(&refused),
            },
        };
        self.outcome_of(&cause, remedy)
    }

    fn outcome_of(&self, cause: &Cause<'_>, remedy: Remedy) -> Outcome {
        Outcome {
            exit_code: cause.exit_code(),
            sentence: Some(cause.describe(&self.layout.hosts)),
            remedy,
        }
    }

    /// The hosts that refused, or else that were lost, before the others were told to end.
    fn not_started(&self) -> Outcome {
        let in_time = |at: Instant| self.stopped_at.is_none_or(|stopped| at <= stopped);
        let counts = |loss: &&HostLoss| loss.is_refusal || in_time(loss.lost_at);
        let losses = self.failures.hosts.iter().filter(counts);
        let describe = |loss| Cause::Host(loss).describe(&self.layout.hosts);
        let (sentences, without) = match &self.refusal {
            Some(refusal) => (vec![refusal.clone()], Vec::new()),
            None => losses
                .map(|loss| (describe(loss), self.name_of(loss)))
                .unzip(),
        };
        Outcome {
            exit_code: NOT_STARTED_EXIT_CODE,
            sentence: Some(sentences.join("\n")),
            remedy: Remedy::Without(without),
        }
    }

    fn name_of(&self, loss: &HostLoss) -> String {
        self.layout.hosts[loss.host].host.clone()
    }

    /// When the ranks of a host that is lost have been ended by its agent, which may live.
    fn is_surely_over(&self, loss: &HostLoss) -> Instant {
        let plan = &self.layout.hosts[loss.host];
        let Some(silence_ms) = plan.silence_ms else {
            return loss.lost_at;
        };
        loss.lost_at + Duration::from_millis(silence_ms + plan.grace_ms) + ALIVE_INTERVAL
    }
}
