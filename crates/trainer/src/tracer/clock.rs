//! One clock for all ranks: that of rank 0.

use std::hash::{BuildHasher, RandomState};
use std::sync::OnceLock;
use std::time::Instant;

use candle_comm::ProcessGroup;
use candle_core::{Result, bail};
use candle_parallel::gather;
use serde::{Deserialize, Serialize};

use super::{receive, send};

/// How often a rank asks rank 0 for the time; the fastest answer counts.
const NUM_ROUND_TRIPS: usize = 16;

/// Moments on this rank in nanoseconds since `zero` of rank 0.
pub(super) struct Clock {
    epoch: Instant,
    offset: i64,
    /// How far it may be off: half of the fastest round trip to rank 0. 0 in rank 0's process, whose ranks have one clock.
    pub error: i64,
}

/// What a process calls itself, and its clock's beginning.
struct Process {
    token: u64,
    epoch: Instant,
}

fn process() -> &'static Process {
    static PROCESS: OnceLock<Process> = OnceLock::new();
    PROCESS.get_or_init(|| Process {
        token: RandomState::new().hash_one(std::process::id()),
        epoch: Instant::now(),
    })
}

/// What a rank tells the others.
#[derive(Serialize, Deserialize)]
struct Told {
    token: u64,
    zero: i64,
}

impl Clock {
    /// The clock whose zero is the moment `zero` of rank 0, by messages between rank 0 and ranks of other processes, one after the other. Every rank
    /// must call it.
    pub fn aligned(world: &ProcessGroup, zero: Instant) -> Result<Self> {
        let process = process();
        let own = Self {
            epoch: process.epoch,
            offset: 0,
            error: 0,
        };
        let told = Told {
            token: process.token,
            zero: own.nanos(zero),
        };
        let all: Vec<Told> = gather(world, &told)?;
        let Some(first) = all.first() else {
            bail!("no rank said when the trace begins");
        };
        let own = Self {
            offset: -first.zero,
            ..own
        };
        if world.rank() == 0 {
            let others = all.iter().enumerate();
            for (rank, _) in others.filter(|(_, told)| told.token != first.token) {
                own.answer(world, rank)?;
            }
            Ok(own)
        } else if process.token == first.token {
            Ok(own)
        } else {
            own.ask(world)
        }
    }

    /// Nanoseconds from zero to a moment.
    pub fn nanos(&self, at: Instant) -> i64 {
        let nanos = |duration: std::time::Duration| duration.as_nanos() as i64;
        let after = at.checked_duration_since(self.epoch);
        let after = after.map(nanos);
        after.unwrap_or_else(|| -nanos(self.epoch.duration_since(at))) + self.offset
    }

    /// Tells a rank the time.
    fn answer(&self, world: &ProcessGroup, rank: usize) -> Result<()> {
        for _ in 0..NUM_ROUND_TRIPS {
            time_of(world, rank)?;
            send(world, rank, vec![self.nanos(Instant::now())])?;
        }
        Ok(())
    }

    /// The clock that goes as rank 0's.
    fn ask(self, world: &ProcessGroup) -> Result<Self> {
        let own = Self { offset: 0, ..self };
        let mut best = Self {
            error: i64::MAX,
            ..own
        };
        for _ in 0..NUM_ROUND_TRIPS {
            let asked = own.nanos(Instant::now());
            send(world, 0, vec![asked])?;
            let theirs = time_of(world, 0)?;
            let answered = own.nanos(Instant::now());
            let error = (answered - asked) / 2;
            if error < best.error {
                best = Self {
                    offset: theirs - (asked + error),
                    error,
                    ..own
                };
            }
        }
        Ok(best)
    }
}

/// The time that a rank sends.
fn time_of(world: &ProcessGroup, src: usize) -> Result<i64> {
    match receive(world, src, 1)?.as_slice() {
        [time] => Ok(*time),
        other => bail!("expected the time of rank {src}, got {other:?}"),
    }
}

/// Notes the beginning of this process's clock, before which no span should begin.
pub(super) fn begin() {
    process();
}
