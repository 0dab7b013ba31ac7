//! The ranks of a run beside the backend that moves their tensors: they meet, exchange small things, and notice when one
//! of them is gone.
//!
//! A star over TCP: rank 0 serves, every rank is a client, rank 0 too. A rank that dies, fails or hangs ends the run on all
//! others within seconds, with a message that names it and says what it did last.

mod activity;
mod clock;
mod config;
mod failure;
pub(crate) mod handshake;
mod joining;
mod link;
pub(crate) mod listening;
mod message;
mod operation;
mod peers;
pub(crate) mod server;
mod sigterm;
pub(crate) mod wire;

use std::net::{TcpListener, ToSocketAddrs};
use std::panic::Location;
use std::sync::Arc;
use std::thread::Builder;
use std::time::Duration;

pub use config::ControlConfig;
pub use failure::{Failure, FailureKind, end_process, print_aside, print_in_time};
pub use message::Verdict;
pub use operation::{Operation, RankGroup, Ticket};

use crate::{Error, Result};
use link::Link;
use message::{Answer, Question};
use server::Server;

/// Between the name of a rank that ends and why: because of which other one.
pub(crate) const STOPS: &str = " stops: ";

/// The stack of a thread that moves messages.
const STACK_BYTES: usize = 256 << 10;

/// The longest time between two beats of a rank.
const BEAT: Duration = Duration::from_millis(500);

/// How long a rank's word that it cannot start, or that it failed, waits for others that may say the same. Less than [`FAREWELL`].
const SAME_WORDS: Duration = Duration::from_secs(1);

/// How long rank 0 stays to tell the others why the run ends.
const FAREWELL: Duration = Duration::from_secs(2);

/// A thread that moves messages.
pub(crate) fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
    let thread = Builder::new().name(name.to_string());
    thread.stack_size(STACK_BYTES).spawn(run).map(drop)
}

/// One rank's connection to the other ranks of its run.
///
/// Dropping it without [`leave`](Self::leave) is a failure of this rank.
pub struct Control {
    link: Arc<Link>,
    world: Arc<RankGroup>,
    /// On rank 0. After the link: it must hear how that one ends.
    server: Option<Server>,
}

impl Control {
    /// Joins the run: returns when all ranks are there. Rank 0 serves at the meeting point.
    ///
    /// # Errors
    /// Ranks that do not come in time, and ranks that do not belong together: two with the same number, or one with another
    /// world size, fingerprint or version than rank 0, which ends the start of the run on all ranks.
    pub fn join(config: &ControlConfig) -> Result<Arc<Self>> {
        Self::join_at(config, None)
    }

    /// A listener for rank 0 at a free port of what `host`, its own name, means to the other ranks.
    ///
    /// # Errors
    /// The name has no address; no port is free.
    pub fn listen(host: &str, is_one_host: bool) -> Result<TcpListener> {
        let addresses = (host, 0).to_socket_addrs().map(Iterator::collect::<Vec<_>>);
        addresses
            .and_then(|addresses| listening::listen(host, &addresses, is_one_host))
            .map_err(|error| Error::Join(format!("rank 0 cannot listen on {host}: {error}")))
    }

    /// Joins; with a listener as rank 0 that serves there, whose address the other ranks get in any way as their `master`.
    ///
    /// # Errors
    /// As [`join`](Self::join).
    pub fn join_at(config: &ControlConfig, listener: Option<TcpListener>) -> Result<Arc<Self>> {
        let (link, server) = joining::join(config, listener)?;
        let control = Arc::new(Self {
            link,
            world: Arc::new(RankGroup::world(config.world_size)),
            server,
        });
        if config.ends_process {
            sigterm::watch(&control);
        }
        Ok(control)
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.link.config.rank
    }

    /// The group of all ranks.
    pub fn world(&self) -> &Arc<RankGroup> {
        &self.world
    }

    /// The bytes that the ranks pass for `key`, by rank. All ranks must call it.
    ///
    /// # Errors
    /// A rank failed, died or left; more than 1 GiB in all.
    #[track_caller]
    pub fn gather(&self, key: &str, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        let call = format!("gather({key:?})");
        let _ticket = self.begin(Operation {
            group: self.world.clone(),
            seq: None,
            call: call.clone(),
            site: Location::caller(),
        });
        let key = key.to_string();
        match self.link.ask(Question::Gather { key }, bytes)? {
            (Answer::Gathered { lens }, body) => {
                let mut rest = body.as_slice();
                let part = |len: usize| {
                    let (part, after) = rest.split_at_checked(len)?;
                    rest = after;
                    Some(part.to_vec())
                };
                let parts: Option<Vec<Vec<u8>>> = lens.into_iter().map(part).collect();
                parts.ok_or_else(|| Error::Control(format!("{call}: fewer bytes than announced")))
            }
            (Answer::Verdict(Verdict::Left { rank, .. }), _) => Err(Error::Control(format!(
                "{call}: rank {rank} has left the run without taking part"
            ))),
            (answer, _) => Err(unexpected(&call, &answer)),
        }
    }

    /// Says that an operation begins and that this rank is blocked in it, until the ticket is dropped.
    pub fn begin(&self, operation: Operation) -> Ticket {
        Ticket::new(self.link.clone(), operation)
    }

    /// Says which training step this rank is at, and what it does there: the first one at once, later ones with the next
    /// beat.
    pub fn set_step(&self, step: u64, phase: &str) {
        let step = Some((step, phase.to_string()));
        let before = (self.link).update(|activity, _| std::mem::replace(&mut activity.step, step));
        if before.is_none() {
            self.link.tell();
        }
    }

    /// Says what this rank does in the step that it is at.
    pub fn set_phase(&self, phase: String) {
        self.link.update(|activity, _| {
            if let Some((_, known)) = &mut activity.step {
                *known = phase;
            }
        });
    }

    /// Compares the call across the group: returns when all members have called it with this number.
    ///
    /// # Errors
    /// A rank failed or died; an operation without a number.
    pub fn check(&self, operation: &Operation) -> Result<Verdict> {
        let Some(seq) = operation.seq else {
            return Err(Error::Control(format!(
                "{operation} has no number to compare it by"
            )));
        };
        let question = Question::Check {
            group: (*operation.group).clone(),
            seq,
            call: operation.call.clone(),
            site: operation.site.to_string(),
        };
        match self.link.ask(question, &[])? {
            (Answer::Verdict(verdict), _) => Ok(verdict),
            (answer, _) => Err(unexpected(&operation.call, &answer)),
        }
    }

    /// Why the run ends, once it does. What is here has been printed, or is this rank's own failure.
    pub fn failure(&self) -> Option<Failure> {
        self.link.failure()
    }

    /// Says that this rank failed. Returns when the others are told, or after 2 s, with the reason for which the run ends:
    /// this one, or another that was there first and has been printed.
    pub fn fail(&self, message: &str) -> Option<Failure> {
        self.end(FailureKind::Failed, message, FAREWELL)
    }

    fn end(&self, kind: FailureKind, message: &str, limit: Duration) -> Option<Failure> {
        let failure = self.link.fail(kind, message.to_string(), limit);
        if let Some(server) = &self.server {
            server.wait_until_known(limit);
        }
        failure
    }

    /// Leaves the run: the end of this rank is no failure from now on. Rank 0 waits until all others have left.
    ///
    /// # Errors
    /// A rank failed or died.
    pub fn leave(&self) -> Result<()> {
        self.link.leave()
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        if !self.link.has_left() {
            let message = if std::thread::panicking() {
                "it panicked"
            } else {
                "it ended before the run was over"
            };
            self.fail(message);
        }
        self.link.close();
    }
}

fn unexpected(call: &str, answer: &Answer) -> Error {
    Error::Control(format!("{call}: expected another answer than {answer:?}"))
}
