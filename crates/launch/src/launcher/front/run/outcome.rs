//! What is made of the end of the ranks: how the launcher ends, or what it does next.

use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use super::super::NOT_STARTED_EXIT_CODE;
use super::super::verdict::{HostLoss, describe_host, describe_signal};
use super::RunningRanks;
use crate::launcher::end::{End, LOST_HOST_EXIT_CODE, NEEDS_MPI_EXIT_CODE, NOT_SAVED_EXIT_CODE};
use crate::launcher::outcome::{Outcome, Remedy};
use crate::launcher::wire::ALIVE_INTERVAL;

/// Why ranks are not started again.
pub(super) const SURVIVORS: &str = "processes are left that SIGKILL does not end";
/// Why ranks that ask for MPI are not started through it.
const ASKED_AGAIN: &str = "the ranks ask for MPI, though MPI has started them: the program finds no sign of an MPI that it knows";

impl RunningRanks<'_> {
    pub(super) fn outcome(&self) -> Outcome {
        if let Some((signal, at)) = self.signal {
            return self.outcome_of_signal(signal, at);
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
        let until = |until| self.failures.ending(self.layout, until);
        let Some(outcome) = until(self.stopped_at).or_else(|| until(None)) else {
            return Outcome::last(0, None);
        };
        let needs_mpi = (outcome.own).is_some_and(|end| end.has_code(NEEDS_MPI_EXIT_CODE));
        let remedy = match outcome.own.and_then(End::is_for_good) {
            Some(why) => Remedy::NotAgain(why),
            None if needs_mpi && self.layout.mpi.is_none() => Remedy::ThroughMpi,
            None if needs_mpi => return outcome.with_note(ASKED_AGAIN),
            None => {
                let hosts = self.failures.hosts.iter();
                let (refused, lost): (Vec<_>, Vec<_>) = hosts.partition(|loss| loss.is_refusal);
                let names = |of: &[&HostLoss]| of.iter().map(|loss| self.name_of(loss)).collect();
                Remedy::StartAgain {
                    at: lost.iter().map(|loss| self.is_surely_over(loss)).max(),
                    lost: names(&lost),
                    refused: names(&refused),
                }
            }
        };
        Outcome { remedy, ..outcome }
    }

    /// What failed before the signal, or else that it has ended the ranks.
    fn outcome_of_signal(&self, signal: Signal, at: Instant) -> Outcome {
        if let Some(outcome) = self.failures.ending(self.layout, Some(at)) {
            return outcome;
        }
        let ends = &self.failures.ranks;
        let sentence = match self.is_signalled_again {
            true => format!(
                "stopped by {}, and by a second signal, at which the ranks were killed: what they had not saved by then is lost",
                signal.as_str()
            ),
            false => describe_signal(signal, ends),
        };
        let mut unsaved = ends.iter();
        if let Some(unsaved) = unsaved.find(|rank| rank.end.has_code(NOT_SAVED_EXIT_CODE)) {
            let why = unsaved.last_lines.last().map_or("", String::as_str);
            let sentence = format!("{sentence}; rank {} says: {why}", unsaved.rank);
            return Outcome::last(NOT_SAVED_EXIT_CODE, Some(sentence));
        }
        let is_complete = self.started && self.failures.is_empty() && self.num_asked == 0;
        let code = if is_complete { 0 } else { 128 + signal as u8 };
        Outcome::last(code, Some(sentence))
    }

    /// The hosts that refused, or else that were lost, before the others were told to end.
    fn not_started(&self) -> Outcome {
        let in_time = |at: Instant| self.stopped_at.is_none_or(|stopped| at <= stopped);
        let counts = |loss: &&HostLoss| loss.is_refusal || in_time(loss.lost_at);
        let losses = self.failures.hosts.iter().filter(counts);
        let why = |loss| describe_host(loss, &self.layout.hosts);
        let (sentences, without) = match &self.refusal {
            Some(refusal) => (vec![refusal.clone()], Vec::new()),
            None => losses.map(|loss| (why(loss), self.name_of(loss))).unzip(),
        };
        Outcome {
            remedy: Remedy::Without(without),
            ..Outcome::last(NOT_STARTED_EXIT_CODE, Some(sentences.join("\n")))
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
