//! MPI's thread, the one that called `launch::mpi`: it makes all calls to MPI, moves what can move, and sleeps while nothing is under way.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};

use super::Result;
use super::channels::{Channels, Outgoing};
use super::collective::Collective;
use super::context::Context;
use super::group::{self, MpiGroup};
use super::in_flight::MpiInFlight;
use super::pause::Pause;
use super::shutdown::Shutdown;
use crate::deadline::Deadline;
use crate::{Error, Operation};

/// Operations of one group that move data at once; more would only need more memory.
const NUM_MOVING: usize = 4;

/// What the rank asks MPI's thread for.
pub(super) enum Job {
    /// Opens a group. The other ranks do the same, whenever they do.
    Open(Arc<MpiGroup>),
    /// Starts an operation of a group, with the messages that it sends.
    Start(Arc<MpiGroup>, Arc<MpiInFlight>, Vec<Outgoing>),
    /// Ends MPI with all ranks.
    End,
    /// Ends all ranks now.
    Abort,
}

/// How the work of MPI's thread ended.
pub(super) enum End {
    /// The rank has returned; this many messages were never received.
    Done(u64),
    /// The rank has failed, or is gone.
    Failed,
}

/// The state of MPI's thread.
pub(super) struct Engine<'a> {
    ctx: &'a Context,
    jobs: Receiver<Job>,
    /// By the group's number.
    groups: BTreeMap<usize, Operations>,
    shutdown: Shutdown,
    /// Why nothing can move any more.
    broken: Option<Error>,
}

/// The operations of a group.
struct Operations {
    group: Arc<MpiGroup>,
    /// Those on their way, in their order.
    collectives: Vec<Collective>,
    messages: Channels,
    /// The number of the next collective.
    next_seq: u64,
}

impl<'a> Engine<'a> {
    pub fn new(ctx: &'a Context, world: Arc<MpiGroup>, jobs: Receiver<Job>) -> Result<Self> {
        let shutdown = Shutdown::new(ctx, world.clone())?;
        let mut engine = Self {
            ctx,
            jobs,
            groups: BTreeMap::new(),
            shutdown,
            broken: None,
        };
        engine.group(world);
        Ok(engine)
    }

    /// Works until the rank ends. What is still with MPI is leaked then, not freed.
    pub fn run(&mut self) -> Result<End> {
        let mut pause = Pause::new();
        let mut moved = true;
        loop {
            let job = if !moved && self.is_idle() {
                self.jobs.recv().map_err(|_| RecvTimeoutError::Disconnected)
            } else {
                let sleep = if moved { None } else { pause.next() };
                self.jobs.recv_timeout(sleep.unwrap_or_default())
            };
            moved = match job {
                Ok(Job::End) => return self.finish(),
                Ok(Job::Abort) | Err(RecvTimeoutError::Disconnected) => return Ok(End::Failed),
                Ok(Job::Open(group)) => {
                    self.group(group);
                    true
                }
                Ok(Job::Start(group, in_flight, sends)) => {
                    self.start(group, &in_flight, sends);
                    true
                }
                Err(RecvTimeoutError::Timeout) => self.poll(),
            };
            if moved {
                pause = Pause::new();
            }
        }
    }

    fn group(&mut self, group: Arc<MpiGroup>) -> &mut Operations {
        let new = || Operations {
            group: group.clone(),
            collectives: Vec::new(),
            messages: Channels::default(),
            next_seq: 0,
        };
        self.groups.entry(group.number).or_insert_with(new)
    }

    fn start(&mut self, group: Arc<MpiGroup>, in_flight: &Arc<MpiInFlight>, sends: Vec<Outgoing>) {
        let ctx = self.ctx;
        let started = match &self.broken {
            None => self.group(group).start(ctx, in_flight.clone(), sends),
            Some(error) => Err(error.clone()),
        };
        if let Err(error) = started {
            in_flight.complete(Err(error.clone()));
            self.break_with(error);
        }
    }

    /// MPI has failed: every operation does, now and later.
    fn break_with(&mut self, error: Error) {
        for operations in self.groups.values_mut() {
            for mut collective in std::mem::take(&mut operations.collectives) {
                collective.fail(self.ctx, &|_| error.clone());
            }
            operations.messages.fail(&error);
        }
        self.broken.get_or_insert(error);
    }

    /// Moves everything that can move; returns whether something did.
    fn poll(&mut self) -> bool {
        self.try_poll().unwrap_or_else(|error| {
            self.break_with(error);
            true
        })
    }

    fn try_poll(&mut self) -> Result<bool> {
        let mut moved = false;
        for operations in self.groups.values_mut() {
            moved |= operations.poll(self.ctx)?;
        }
        if !self.is_idle() {
            self.shutdown.poll(self.ctx)?;
            for left in self.shutdown.gone_for_a_while() {
                self.fail_those_that_need(left);
            }
        }
        Ok(moved)
    }

    fn fail_those_that_need(&mut self, left: usize) {
        let ctx = self.ctx;
        let error = |call: &str| Error::PeerLeft {
            waiting: ctx.shared.world_rank,
            call: call.to_string(),
            rank: left,
            report: ctx.shared.report(),
        };
        for operations in self.groups.values_mut() {
            for collective in &mut operations.collectives {
                if collective.missing().contains(&left) {
                    collective.fail(ctx, &error);
                }
            }
            let (group, messages) = (&operations.group, &mut operations.messages);
            messages.fail_those_that_need(ctx, group, left, &error);
        }
    }

    fn is_idle(&self) -> bool {
        let mut groups = self.groups.values();
        groups.all(|group| group.collectives.is_empty() && group.messages.is_idle())
    }

    /// Lets all that is under way come to its end, with all other ranks; takes in messages that nobody asked for, for
    /// their senders wait.
    fn finish(&mut self) -> Result<End> {
        let mut pause = Pause::new();
        let mut num_undelivered = 0;
        let mut deadline = Deadline::new(self.ctx.shared.deadline);
        loop {
            if deadline.is_over() {
                return Err(self.shutdown.overdue(self.ctx));
            }
            let all_said = self.shutdown.all_said();
            let mut moved = self.poll();
            if let Some(error) = &self.broken {
                return Err(error.clone());
            }
            for operations in self.groups.values_mut() {
                let (group, messages) = (&operations.group, &mut operations.messages);
                let taken = messages.take_in(self.ctx, group)?;
                num_undelivered += taken;
                moved |= taken > 0;
            }
            if self.is_idle() {
                self.shutdown.say(self.ctx)?;
            }
            self.shutdown.poll(self.ctx)?;
            if all_said && !moved && self.is_idle() {
                return Ok(End::Done(num_undelivered));
            }
            if moved {
                pause = Pause::new();
            } else if let Some(sleep) = pause.next() {
                deadline.sleep(sleep);
            }
        }
    }
}

impl Operations {
    fn start(
        &mut self,
        ctx: &Context,
        in_flight: Arc<MpiInFlight>,
        sends: Vec<Outgoing>,
    ) -> Result<()> {
        if let Operation::Messages { .. } = &in_flight.call.operation {
            return self.messages.start(ctx, &self.group, in_flight, sends);
        }
        let number = (self.group.clone(), self.next_seq);
        self.next_seq += 1;
        self.collectives
            .push(Collective::begin(ctx, number, in_flight)?);
        Ok(())
    }

    /// Moves everything that can move; returns whether something did.
    fn poll(&mut self, ctx: &Context) -> Result<bool> {
        let (mut moved, mut index) = (false, 0);
        while let Some(oldest) = self.collectives.first().map(|oldest| oldest.seq)
            && let Some(collective) = self.collectives.get_mut(index)
        {
            // Data of two operations with the same tags would be mistaken for each other.
            let may_move = index < NUM_MOVING && collective.seq - oldest < group::NUM_SEQS;
            moved |= collective.poll(ctx, may_move)?;
            match collective.is_over() {
                true => drop(self.collectives.remove(index)),
                false => index += 1,
            }
        }
        Ok(moved | self.messages.poll(ctx, &self.group)?)
    }
}
