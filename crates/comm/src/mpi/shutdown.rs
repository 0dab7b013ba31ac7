//! How ranks part: each says goodbye to all others when it has returned and nothing of its own is under way.

use std::time::{Duration, Instant};

use super::context::Context;
use super::tags;
use super::transfer::{Transfer, poll_all};
use crate::Error;
use crate::error::rank_list;

type Result<T> = std::result::Result<T, Error>;

/// What a rank sent before its goodbye may be looked for after it, but not this much later.
const GRACE: Duration = Duration::from_secs(1);

/// How often to look for operations that need a rank that has left.
const REPORT_EVERY: Duration = Duration::from_millis(100);

/// Who has said goodbye, and to whom.
pub(super) struct Shutdown {
    /// By world rank; none from this rank itself.
    receives: Vec<Option<Transfer<Vec<u8>>>>,
    sends: Vec<Transfer<Vec<u8>>>,
    left: Vec<Option<Instant>>,
    has_said: bool,
    last_report: Instant,
}

impl Shutdown {
    pub fn new(ctx: &Context) -> Result<Self> {
        let world = &ctx.groups[0];
        let receive = |rank| {
            let transfer =
                Transfer::receive(&ctx.mpi, world.comm, rank, tags::SHUTDOWN, vec![0u8; 1])?;
            Ok(Some(transfer))
        };
        let ranks = 0..world.members.len();
        let receives: Result<_> = ranks
            .map(|rank| match rank == world.rank {
                true => Ok(None),
                false => receive(rank),
            })
            .collect();
        Ok(Self {
            receives: receives?,
            sends: Vec::new(),
            left: vec![None; world.members.len()],
            has_said: false,
            last_report: Instant::now(),
        })
    }

    /// Says goodbye to all others, once.
    pub fn say(&mut self, ctx: &Context) -> Result<()> {
        if std::mem::replace(&mut self.has_said, true) {
            return Ok(());
        }
        let world = &ctx.groups[0];
        for rank in world.others() {
            let goodbye = Transfer::send(&ctx.mpi, world.comm, rank, tags::SHUTDOWN, vec![0u8; 1])?;
            self.sends.push(goodbye);
        }
        Ok(())
    }

    pub fn poll(&mut self, ctx: &Context) -> Result<()> {
        for (receive, left) in self.receives.iter_mut().zip(&mut self.left) {
            if let Some(goodbye) = receive
                && goodbye.poll(&ctx.mpi)?
            {
                *receive = None;
                *left = Some(Instant::now());
            }
        }
        poll_all(&ctx.mpi, &mut self.sends)?;
        Ok(())
    }

    /// Whether all ranks, this one too, have said goodbye.
    pub fn all_said(&self) -> bool {
        self.has_said && self.sends.is_empty() && self.receives.iter().all(Option::is_none)
    }

    /// The world ranks that have left a while ago, now and then.
    pub fn gone_for_a_while(&mut self) -> Vec<usize> {
        if self.last_report.elapsed() < REPORT_EVERY {
            return Vec::new();
        }
        self.last_report = Instant::now();
        let is_long_ago = |left: &Option<Instant>| left.is_some_and(|at| at.elapsed() > GRACE);
        let ranks = 0..self.left.len();
        ranks
            .filter(|rank| is_long_ago(&self.left[*rank]))
            .collect()
    }

    /// The error when the others do not come to their end.
    pub fn overdue(&self, ctx: &Context) -> Error {
        let ranks = 0..self.receives.len();
        let missing: Vec<usize> = ranks
            .filter(|rank| self.receives[*rank].is_some())
            .collect();
        Error::Deadline {
            waiting: ctx.world_rank,
            call: "the end of the run".into(),
            secs: ctx.deadline.as_secs_f64(),
            missing: rank_list(&missing),
            report: ctx.last_calls.report(),
        }
    }
}
