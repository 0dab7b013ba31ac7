//! How ranks part: each says goodbye to all others when it has returned and nothing of its own is under way.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Result;
use super::buffer::Buffer;
use super::context::Context;
use super::group::{self, MpiGroup};
use super::transfer::{Transfer, poll_all};
use crate::Error;
use crate::error::rank_list;

/// What a rank sent before its goodbye may be looked for after it, but not this much later.
const GRACE: Duration = Duration::from_secs(1);

/// How often to look for operations that need a rank that has left.
const REPORT_EVERY: Duration = Duration::from_millis(100);

/// Who has said goodbye, and to whom.
pub(super) struct Shutdown {
    world: Arc<MpiGroup>,
    /// By world rank; none from this rank itself.
    receives: Vec<Option<Transfer<Buffer>>>,
    sends: Vec<Transfer<Arc<Buffer>>>,
    left: Vec<Option<Instant>>,
    has_said: bool,
    last_report: Instant,
}

impl Shutdown {
    pub fn new(ctx: &Context, world: Arc<MpiGroup>) -> Result<Self> {
        let mut receives: Vec<_> = world.members.iter().map(|_| None).collect();
        for rank in world.others() {
            let goodbye = Buffer::zeros(1);
            let receive = Transfer::receive(&ctx.mpi, &world, rank, group::SHUTDOWN, goodbye)?;
            receives[rank] = Some(receive);
        }
        Ok(Self {
            left: vec![None; receives.len()],
            world,
            receives,
            sends: Vec::new(),
            has_said: false,
            last_report: Instant::now(),
        })
    }

    /// Says goodbye to all others, once.
    pub fn say(&mut self, ctx: &Context) -> Result<()> {
        if std::mem::replace(&mut self.has_said, true) {
            return Ok(());
        }
        let goodbye = Arc::new(Buffer::zeros(1));
        for rank in self.world.others() {
            let (world, goodbye) = (&self.world, goodbye.clone());
            let send = Transfer::send(&ctx.mpi, world, rank, group::SHUTDOWN, goodbye)?;
            self.sends.push(send);
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
            waiting: ctx.shared.world_rank,
            call: "the end of the run".into(),
            secs: ctx.shared.deadline.as_secs_f64(),
            missing: rank_list(&missing),
            report: ctx.shared.report(),
        }
    }
}
