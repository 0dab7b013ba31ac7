//! Rank 0's server: it lets the ranks in, answers them, and watches them.
//!
//! One thread per connection reads, another writes from a queue without bound, so that a slow rank stalls nobody. What they read are
//! events of a [`Run`], which has no connections and no threads of its own.

mod admission;
mod exchange;
mod failures;
mod run;
pub(crate) mod strangers;

use std::io::{self, BufReader};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nix::sys::resource::{Resource, getrlimit, setrlimit};

use super::clock::RunClock;
use super::handshake::{self, Purpose};
use super::message::{FromRank, Hello};
use super::wire::{self, Limits, Outbox, Timed};
use super::{ControlConfig, spawn};
use crate::Secret;
use run::Run;
pub(super) use run::rank_list;
pub(super) use strangers::{Serving, Strangers};

/// How long a stranger may take to say who it is.
pub(crate) const HANDSHAKE: Duration = Duration::from_secs(2);

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
            run: Mutex::new(Run::new(config)),
            changed: Condvar::new(),
        });
        allow_connections(config.world_size)?;
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
        let (run, changed) = (self.hub.lock(), &self.hub.changed);
        drop(changed.wait_timeout_while(run, limit, |run| !run.is_known()));
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.hub.event(|run, _| run.close());
    }
}

/// Lets this process have as many files open as connections of ranks take, of which it has three each.
///
/// # Errors
/// It may not, and could not have those of all ranks beside what it opens by itself.
fn allow_connections(world_size: usize) -> io::Result<()> {
    let (now, most) = getrlimit(Resource::RLIMIT_NOFILE)?;
    let wanted = 4 * world_size as u64 + 2048;
    if now < wanted {
        setrlimit(Resource::RLIMIT_NOFILE, wanted.min(most), most)?;
    }
    let num_open = std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count) as u64;
    let needed = num_open + 3 * world_size as u64 + SPARE_FILES;
    if now.max(most) < needed {
        return Err(io::Error::other(format!(
            "it may have {most} files open, expected at least {needed}, three for each of {world_size} ranks and {SPARE_FILES} to \
             spare\nhint: raise the limit on open files (`ulimit -n`)"
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
    run: Mutex<Run>,
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
    fn listen(&self, admitted: Admitted) {
        let Admitted {
            rank,
            connection,
            mut reader,
        } = admitted;
        let why = loop {
            match wire::read::<FromRank>(&mut reader, Limits::RANK) {
                Ok((message, body)) => self.event(|run, now| run.hear(rank, message, body, now)),
                Err(error) => break error,
            }
        };
        self.event(|run, now| run.lose(rank, connection, &why, now));
    }

    fn tick(&self) -> Option<Duration> {
        self.clock.tick();
        self.event(Run::tick)
    }

    fn event<T>(&self, happen: impl FnOnce(&mut Run, Duration) -> T) -> T {
        let now = self.clock.now();
        let outcome = happen(&mut self.lock(), now);
        self.changed.notify_all();
        outcome
    }

    fn lock(&self) -> MutexGuard<'_, Run> {
        self.run.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
