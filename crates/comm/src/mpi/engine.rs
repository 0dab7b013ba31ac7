//! MPI's thread: it makes all calls to MPI, moves what can move, and sleeps while nothing is under way.

use std::sync::mpsc::{Receiver, RecvTimeoutError};

use super::channels::Channels;
use super::context::{Context, Opened};
use super::messages::Batch;
use super::pause::Pause;
use super::shutdown::Shutdown;
use super::tags;
use crate::Error;
use crate::deadline::Deadline;

type Result<T> = std::result::Result<T, Error>;

/// Operations of one group that move data at once; more would only need more memory.
const NUM_MOVING: usize = 4;

/// An operation of a group on its way.
pub(super) trait Activity: Send {
    /// Sends this rank's first message; `seq` is the operation's number in its group.
    fn begin(&mut self, ctx: &Context, group: usize, seq: u64) -> Result<()>;

    /// Does what can be done now; data move only if `may_move`.
    fn poll(&mut self, ctx: &Context, may_move: bool) -> Result<Progress>;

    /// Whether all ranks were there, and it has begun to move data.
    fn has_met(&self) -> bool;

    /// The world ranks without which it cannot go on.
    fn missing(&self, ctx: &Context) -> Vec<usize>;

    /// Ends it with the error that `error` makes of its call.
    fn fail(&mut self, ctx: &Context, error: &dyn Fn(&str) -> Error);
}

/// What a poll did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Progress {
    /// Nothing.
    None,
    /// Something.
    Some,
    /// Nothing is left to do.
    Over,
}

/// What the rank asks MPI's thread for.
pub(super) enum Job {
    /// Starts an operation of a group.
    Start(usize, Box<dyn Activity>),
    /// Starts messages of a group.
    Messages(usize, Batch),
    /// Opens a group of this number. The other ranks do the same, whenever they do.
    Open(usize, Opened),
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
pub(super) struct Engine {
    ctx: Context,
    jobs: Receiver<Job>,
    /// By group: operations on their way, in their order, with their numbers.
    active: Vec<Vec<(u64, Box<dyn Activity>)>>,
    /// By group: messages on their way.
    channels: Vec<Channels>,
    /// By group: the number of the next operation.
    next_seq: Vec<u64>,
    shutdown: Shutdown,
    /// Why nothing can move any more.
    broken: Option<Error>,
}

impl Engine {
    pub fn new(ctx: Context, jobs: Receiver<Job>) -> Result<Self> {
        Ok(Self {
            shutdown: Shutdown::new(&ctx)?,
            ctx,
            jobs,
            active: Vec::new(),
            channels: Vec::new(),
            next_seq: Vec::new(),
            broken: None,
        })
    }

    /// Works until the rank ends, and gives back what is needed to end MPI.
    pub fn run(mut self) -> (Context, Result<End>) {
        let end = self.work();
        // What is still with MPI is leaked, not freed, when it is dropped here.
        (self.ctx, end)
    }

    fn work(&mut self) -> Result<End> {
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
                Ok(job) => {
                    self.start(job);
                    true
                }
                Err(RecvTimeoutError::Timeout) => self.poll(),
            };
            if moved {
                pause = Pause::new();
            }
        }
    }

    fn start(&mut self, job: Job) {
        let group = match &job {
            Job::Start(group, _) | Job::Messages(group, _) | Job::Open(group, ..) => *group,
            Job::End | Job::Abort => return,
        };
        self.open_groups(group + 1);
        match job {
            Job::Start(_, mut activity) => {
                let seq = self.next_seq[group];
                self.next_seq[group] += 1;
                let begun = match &self.broken {
                    None => activity.begin(&self.ctx, group, seq),
                    Some(error) => Err(error.clone()),
                };
                match begun {
                    Ok(()) => self.active[group].push((seq, activity)),
                    Err(error) => self.break_with(Some(activity), error),
                }
            }
            Job::Messages(_, batch) => {
                let started = match &self.broken {
                    None => self.channels[group].start(&self.ctx, group, batch),
                    Some(error) => {
                        batch.fail(error.clone());
                        Ok(())
                    }
                };
                if let Err(error) = started {
                    self.break_with(None, error);
                }
            }
            Job::Open(_, opened) => self.ctx.open(group, opened),
            Job::End | Job::Abort => {}
        }
    }

    fn open_groups(&mut self, num_groups: usize) {
        while self.active.len() < num_groups {
            self.active.push(Vec::new());
            self.channels.push(Channels::default());
            self.next_seq.push(0);
        }
    }

    /// MPI has failed: every operation does, now and later.
    fn break_with(&mut self, activity: Option<Box<dyn Activity>>, error: Error) {
        let activities = self.active.iter_mut().flat_map(std::mem::take);
        let activities = activities.map(|(_, activity)| activity);
        for mut activity in activities.chain(activity) {
            activity.fail(&self.ctx, &|_| error.clone());
        }
        for channels in &mut self.channels {
            channels.fail(&error);
        }
        self.broken.get_or_insert(error);
    }

    /// Moves everything that can move; returns whether something did.
    fn poll(&mut self) -> bool {
        match self.try_poll() {
            Ok(moved) => moved,
            Err(error) => {
                self.break_with(None, error);
                true
            }
        }
    }

    fn try_poll(&mut self) -> Result<bool> {
        let mut moved = false;
        for group in 0..self.active.len() {
            let (mut index, mut in_order) = (0, true);
            while let Some((oldest, _)) = self.active[group].first()
                && let oldest = *oldest
                && let Some((seq, activity)) = self.active[group].get_mut(index)
            {
                // Data of two operations with the same tags would be mistaken for each other. In order, for so MPI wants its own.
                let may_move = index < NUM_MOVING && in_order && *seq - oldest < tags::NUM_SEQS;
                let progress = activity.poll(&self.ctx, may_move)?;
                in_order &= activity.has_met();
                match progress {
                    Progress::None => index += 1,
                    Progress::Some => {
                        moved = true;
                        index += 1;
                    }
                    Progress::Over => {
                        moved = true;
                        drop(self.active[group].remove(index));
                    }
                }
            }
            moved |= self.channels[group].poll(&self.ctx, group)?;
        }
        if !self.is_idle() {
            self.shutdown.poll(&self.ctx)?;
            for left in self.shutdown.gone_for_a_while() {
                self.fail_those_that_need(left);
            }
        }
        Ok(moved)
    }

    fn fail_those_that_need(&mut self, left: usize) {
        let ctx = &self.ctx;
        let error = |call: &str| Error::PeerLeft {
            waiting: ctx.world_rank,
            call: call.to_string(),
            rank: left,
            report: ctx.last_calls.report(),
        };
        for (_, activity) in self.active.iter_mut().flatten() {
            if activity.missing(ctx).contains(&left) {
                activity.fail(ctx, &error);
            }
        }
        for (group, channels) in self.channels.iter_mut().enumerate() {
            channels.fail_those_that_need(ctx, group, left, &error);
        }
    }

    fn is_idle(&self) -> bool {
        self.active.iter().all(Vec::is_empty) && self.channels.iter().all(Channels::is_idle)
    }

    /// Lets all that is under way come to its end, with all other ranks; takes in messages that nobody asked for, for
    /// their senders wait.
    fn finish(&mut self) -> Result<End> {
        self.open_groups(self.ctx.groups.len());
        let mut pause = Pause::new();
        let mut num_undelivered = 0;
        let mut deadline = Deadline::new(self.ctx.deadline);
        loop {
            if deadline.is_over() {
                return Err(self.shutdown.overdue(&self.ctx));
            }
            let all_said = self.shutdown.all_said();
            let mut moved = self.poll();
            if let Some(error) = &self.broken {
                return Err(error.clone());
            }
            for group in 0..self.channels.len() {
                let taken = self.channels[group].take_in(&self.ctx, group)?;
                num_undelivered += taken;
                moved |= taken > 0;
            }
            if self.is_idle() {
                self.shutdown.say(&self.ctx)?;
            }
            self.shutdown.poll(&self.ctx)?;
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
