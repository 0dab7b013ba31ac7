//! How a start of the ranks ended, and what can be done about it.

use std::time::Instant;

use super::end::End;

/// How a start of the ranks ended, or the launcher.
pub(super) struct Outcome {
    /// The code with which the launcher exits if this was the last start.
    pub(super) exit_code: u8,
    /// What it then prints last.
    pub(super) sentence: Option<String>,
    /// How ranks have ended that failed by themselves, if that is why.
    pub(super) own: Option<End>,
    pub(super) remedy: Remedy,
}

/// What can be done about a failure.
pub(super) enum Remedy {
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
    pub(super) fn last(exit_code: u8, sentence: Option<String>) -> Self {
        Self {
            exit_code,
            sentence,
            own: None,
            remedy: Remedy::None,
        }
    }

    /// The same with a line below the first one.
    pub(super) fn with_note(self, note: &str) -> Self {
        let sentence = self.sentence.map(|sentence| {
            let end = sentence.find('\n').unwrap_or(sentence.len());
            let (first, rest) = sentence.split_at(end);
            format!("{first}\n{note}{rest}")
        });
        Self { sentence, ..self }
    }
}
