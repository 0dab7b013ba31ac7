//! Rank 0's server: it lets the ranks in, answers them, and watches them.
//!
//! One thread per connection reads, another writes from a queue without bound, so that a slow rank stalls nobody. What they read are
//! events of a [`ServedRun`], which has no connections and no threads of its own.

mod admission;
mod exchange;
mod failures;
mod run;
pub(crate) mod strangers;

use std::io::{self, BufReader};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use nix::sys::resource::{Resource, getrlimit, setrlimit};

use super::clock::RunClock;
use super::handshake::{self, Purpose};
use super::message::{FromRank, Hello};
use super::wire::{self, Limits, Outbox, Timed};
use super::{ControlConfig, spawn};
use crate::Secret;
use crate::lock::lock;
use run::ServedRun;
pub(super) use run::rank_list;
pub(super) use strangers::{Serving, Strangers};

/// How long a stranger may take to say who it is.
pub(crate) const HANDSHAKE: Duration = Duration::from_secs(2);

/// Files of the connection of a rank: one to read, one to write.
const FILES_OF_RANK: u64 = 2;

/// Files that a rank opens beside the connections of others: data, checkpoints, what it prints.
const SPARE_FILES: u64 = 16;

/// Rank 0's server. It runs until it is dropped.
pub(super) struct Server {
    hub: Arc<Hub>,
    pub(super) serving: Serving,
}

impl Server {
    /// Serves the ranks that come to `listener`.
    pub(super) fn start(listener: TcpListener, config: &ControlConfig) -> io::Result<Self> {
        let hub = Arc::new(Hub {
            secret: config.secret.clone(),
            clock: RunClock::new(config.rank_timeout),
            run: Mutex::new(ServedRun::new(config)),
            changed: Condvar::new(),
        });
        allow_connections(config.world_size, FILES_OF_RANK)?;
        let (meeting, listening, watching) = (hub.clone(), hub.clone(), hub.clone());
        let serving = Strangers::serve(
            listener,
            config.world_size,
            move |stream| meeting.meet(stream),
            move |admitted| listening.listen(admitted),
        )?;
        spawn("control-watch", move || {
            while let Some(pause) = watching.tick() {
                std::thread::sleep(pause);
            }
        })?;
        Ok(Self { hub, serving })
    }

    /// Blocks until every rank knows why the run ends, or does not start; returns at once if it goes on.
    pub(super) fn wait_until_known(&self, limit: Duration) {
        let (run, changed) = (lock(&self.hub.run), &self.hub.changed);
        drop(changed.wait_timeout_while(run, limit, |run| !run.is_known()));
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.hub.event(|run, _| run.close());
    }
}

/// Lets this process have `num_ranks` connections of ranks open, with as many files each.
///
/// # Errors
/// It may not, beside what it opens by itself.
pub(super) fn allow_connections(num_ranks: usize, files_each: u64) -> io::Result<()> {
    let (now, most) = getrlimit(Resource::RLIMIT_NOFILE)?;
    let num_open = std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count) as u64;
    let needed = num_open + files_each * num_ranks as u64 + SPARE_FILES;
    let wanted = most.min(needed + 2048);
    // Where it is forbidden to ask for more, what there is may do.
    let is_raised = now < wanted && setrlimit(Resource::RLIMIT_NOFILE, wanted, most).is_ok();
    let may = if is_raised { wanted } else { now };
    if may < needed {
        return Err(io::Error::other(format!(
            "it may have {may} files open, expected at least {needed}, {files_each} for each of {num_ranks} ranks and {SPARE_FILES} \
             to spare\nhint: raise the limit on open files (`ulimit -n`)"
        )));
    }
    Ok(())
}

/// A rank that was let in, on the connection of this number.
struct Admitted {
    rank: usize,
    connection: u64,
    reader: BufReader<Timed>,
}

/// What the server's threads share. Nothing is written or read under the lock, only queued.
struct Hub {
    secret: Secret,
    clock: RunClock,
    run: Mutex<ServedRun>,
    changed: Condvar,
}

impl Hub {
    /// Finds out who has connected, and lets it in if that is right.
    fn meet(&self, stream: TcpStream) -> io::Result<Admitted> {
        let mut timed = Timed::new(&stream, HANDSHAKE)?;
        let (version, _) = handshake::as_server(&mut timed, &self.secret, Purpose::Control)?;
        let mut reader = BufReader::new(timed);
        let (hello, _): (Hello, _) = wire::read(&mut reader, Limits::STRANGER)?;
        let rank = hello.rank;
        let outbox = Outbox::start(stream)?;
        let admitted = self.event(|run, now| run.admit(hello, version, outbox, now));
        let Some(connection) = admitted else {
            let message = format!("rank {rank} is not let in");
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, message));
        };
        reader.get_mut().lift()?;
        Ok(Admitted {
            rank,
            connection,
            reader,
        })
    }

    /// Listens to a rank that is in.
    fn listen(&self, mut admitted: Admitted) {
        let rank = admitted.rank;
        let why = loop {
            match wire::read::<FromRank>(&mut admitted.reader, Limits::RANK) {
                Ok((message, body)) => self.event(|run, now| run.hear(rank, message, body, now)),
                Err(error) => break error,
            }
        };
        self.event(|run, now| run.lose(rank, admitted.connection, &why, now));
    }

    fn tick(&self) -> Option<Duration> {
        self.clock.tick();
        self.event(ServedRun::tick)
    }

    fn event<T>(&self, happen: impl FnOnce(&mut ServedRun, Duration) -> T) -> T {
        let now = self.clock.now();
        let outcome = happen(&mut lock(&self.run), now);
        self.changed.notify_all();
        outcome
    }
}
