//! The agent's way to the front.

use std::io::{Write, stdout};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use super::ALIVE_INTERVAL;
use crate::launcher::wire::{self, GREETING, Report};

/// Stdout, shared by the threads that report.
///
/// Errors are dropped: they mean that the front is gone, and the end of stdin says that too.
#[derive(Clone)]
pub(super) struct ReportPipe {
    // A message and its bytes must stay together.
    turn: Arc<Mutex<()>>,
    posts: Sender<Report>,
}

impl ReportPipe {
    /// Greets the front. The thread writes what is posted, and between posts that the agent lives; it ends with the
    /// last report of a run.
    pub(super) fn open() -> (Self, JoinHandle<()>) {
        let (posts, posted) = mpsc::channel();
        let pipe = Self {
            turn: Arc::default(),
            posts,
        };
        let _ = writeln!(stdout(), "{GREETING}");
        let writer = pipe.clone();
        (
            pipe,
            std::thread::spawn(move || writer.write_posts(&posted)),
        )
    }

    /// Sends a report without waiting, for the thread that must not wait for a front whose terminal is stopped.
    pub(super) fn post(&self, report: Report) {
        let _ = self.posts.send(report);
    }

    /// Sends a report and the bytes it announces; waits while the front does not read.
    pub(super) fn send(&self, report: &Report, bytes: &[u8]) {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = wire::send(&mut stdout(), report, bytes);
    }

    fn write_posts(&self, posted: &Receiver<Report>) {
        loop {
            let report = match posted.recv_timeout(ALIVE_INTERVAL) {
                Ok(report) => report,
                Err(RecvTimeoutError::Timeout) => Report::Alive,
                Err(RecvTimeoutError::Disconnected) => return,
            };
            self.send(&report, &[]);
            if matches!(report, Report::Finished | Report::Refused(_)) {
                return;
            }
        }
    }
}
