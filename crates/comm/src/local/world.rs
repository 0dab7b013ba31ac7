//! What all ranks of a process share: groups, operations in flight, who failed, who left.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::atomic::AtomicI64;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::ThreadId;
use std::time::Duration;

use candle_core::Device;
use candle_launch::circle;
use rayon::{ThreadPool, ThreadPoolBuilder};

use super::LocalConfig;
use super::channel::Channel;
use super::slot::{Polled, Slot};
use crate::cores::num_cores;
use crate::deadline::Deadline;
use crate::error::rank_list;
use crate::memory::device::make_current;
use crate::operation::call::Call;
use crate::{Error, Request, message_of};

/// What all ranks share. One lock guards all bookkeeping, so there is no lock order to keep; each rank sleeps on a
/// condition variable of its own, so that an operation wakes the ranks of its group only.
pub(crate) struct World {
    pub(super) config: LocalConfig,
    /// One for each rank.
    devices: Vec<Device>,
    /// Beside that of all ranks.
    pub(super) num_groups: AtomicI64,
    state: Mutex<WorldState>,
    wake: Vec<Condvar>,
    /// Wakes who waits for the ends of ranks.
    pub(super) ended: Condvar,
    /// Threads for the work of large operations. Not those of a rank's own pool: a rank may be blocked in a wait on them.
    /// `None` if the system gives no more threads.
    jobs: OnceLock<Option<ThreadPool>>,
}

pub(super) struct WorldState {
    /// The first rank that failed.
    failure: Option<Failure>,
    ranks: Vec<RankState>,
    pub slots: HashMap<SlotId, Slot>,
    /// By group, source and destination, group ranks.
    pub channels: HashMap<(i64, usize, usize), Channel>,
}

/// A group, and the number of a collective there.
pub(super) type SlotId = (i64, u64);

struct Failure {
    rank: usize,
    message: String,
    /// Ranks that failed with this message, each by itself.
    num_ranks: usize,
}

#[derive(Default)]
struct RankState {
    last: Option<Call>,
    /// Whether the rank has returned.
    left: bool,
    /// Whether it has returned or failed.
    ended: bool,
    /// Its threads that sleep until an operation is complete.
    num_waiting: usize,
    /// The collective that the last of these sleeps for, if it is one.
    waits_for: Option<SlotId>,
    /// The thread that starts its operations.
    thread: Option<ThreadId>,
    /// Whether several threads do: what one of them waits for another may bring about.
    has_threads: bool,
    num_delays: u64,
}

impl WorldState {
    /// What `look` finds at a collective, which is forgotten when none of the ranks wants anything more from it.
    pub fn look_at<T>(&mut self, id: SlotId, look: impl FnOnce(&mut Slot) -> T) -> Option<T> {
        let slot = self.slots.get_mut(&id)?;
        let found = look(slot);
        if slot.is_over() {
            self.slots.remove(&id);
        }
        Some(found)
    }

    /// Notes what a rank starts. An error if a rank has failed: nothing new starts after that.
    pub fn begin(&mut self, world_rank: usize, request: &Request<'_>) -> Result<(), Error> {
        self.check_alive(world_rank, &request.call)?;
        self.ranks[world_rank].last = Some(request.call.clone());
        self.note_thread(world_rank);
        Ok(())
    }

    /// Notes that this thread works for a rank.
    fn note_thread(&mut self, rank: usize) {
        let rank = &mut self.ranks[rank];
        let thread = std::thread::current().id();
        rank.has_threads |= *rank.thread.get_or_insert(thread) != thread;
    }

    /// The collective that a rank waits for, if all that its one thread does is to wait for it.
    fn only_waits_for(&self, rank: usize) -> Option<SlotId> {
        let state = &self.ranks[rank];
        let waits_for = state.waits_for.filter(|_| state.num_waiting == 1);
        waits_for.filter(|_| !state.has_threads)
    }

    /// The ranks that a rank waits for, if all that it does is to wait, and which do nothing else either.
    fn awaited(&self, rank: usize) -> Vec<usize> {
        let slot = self.only_waits_for(rank).and_then(|id| self.slots.get(&id));
        let missing = slot.map(Slot::missing).unwrap_or_default().into_iter();
        missing
            .filter(|rank| self.only_waits_for(*rank).is_some())
            .collect()
    }

    /// Ranks that wait for each other in a circle, and the collectives that they wait for, if this one is among them and the
    /// search from it finds no other circle first, whose own ranks report it.
    fn cycle(&self, rank: usize) -> Option<Vec<(usize, SlotId)>> {
        let ranks = circle([rank], self.ranks.len(), |rank| self.awaited(rank))?;
        let waits = ranks.contains(&rank).then(|| ranks.into_iter())?;
        waits
            .map(|rank| Some((rank, self.only_waits_for(rank)?)))
            .collect()
    }

    fn check_alive(&self, waiting: usize, call: &Call) -> Result<(), Error> {
        match &self.failure {
            None => Ok(()),
            Some(Failure { rank, message, .. }) => Err(Error::PeerFailed {
                waiting,
                call: call.to_string(),
                rank: *rank,
                message: message.clone(),
            }),
        }
    }

    /// Those of the first `num_ranks` that have not ended.
    pub fn running(&self, num_ranks: usize) -> Vec<usize> {
        let ranks = 0..num_ranks;
        ranks.filter(|rank| !self.ranks[*rank].ended).collect()
    }

    pub fn has_failed(&self) -> bool {
        self.failure.is_some()
    }

    /// What failed first, in words; nothing if nothing has.
    pub fn first_failure(&self) -> String {
        let failure = self.failure.as_ref();
        failure.map_or_else(String::new, |Failure { rank, message, .. }| {
            let (rank, message) = (*rank, message.clone());
            Error::RankFailed { rank, message }.to_string()
        })
    }

    /// One line per rank: its last operation.
    pub fn last_operations(&self) -> String {
        let line = |(rank, state): (usize, &RankState)| {
            let last = state.last.as_ref().map(Call::in_group);
            let last = last.unwrap_or_else(|| "has started no operation".into());
            let left = if state.left { ", then left" } else { "" };
            format!("  rank {rank}: {last}{left}")
        };
        let lines: Vec<String> = self.ranks.iter().enumerate().map(line).collect();
        lines.join("\n")
    }
}

/// How long ranks must be seen to wait for each other: another thread of one of them may be about to bring what they
/// wait for, and is not known before its first operation.
const GRACE: Duration = Duration::from_millis(1500);

impl World {
    /// What the ranks of a run share.
    ///
    /// # Errors
    /// Devices that the ranks cannot have.
    pub(crate) fn new(config: LocalConfig) -> candle_core::Result<Arc<Self>> {
        let devices = config.device_of_each()?;
        let ranks = 0..config.world_size;
        let state = WorldState {
            failure: None,
            ranks: ranks.clone().map(|_| RankState::default()).collect(),
            slots: HashMap::new(),
            channels: HashMap::new(),
        };
        Ok(Arc::new(Self {
            config,
            devices,
            num_groups: AtomicI64::new(0),
            state: Mutex::new(state),
            wake: ranks.map(|_| Condvar::new()).collect(),
            ended: Condvar::new(),
            jobs: OnceLock::new(),
        }))
    }

    pub(super) fn world_size(&self) -> usize {
        self.devices.len()
    }

    /// The device of a rank.
    pub(crate) fn device(&self, rank: usize) -> &Device {
        &self.devices[rank]
    }

    /// Makes this thread's calls to CUDA go to a rank's device, as they did before the thread worked or cleaned up for
    /// ranks on other GPUs.
    pub(crate) fn make_current(&self, rank: usize) -> candle_core::Result<()> {
        make_current(&self.devices[rank])
    }

    /// Runs `job` in the background.
    pub(super) fn spawn(&self, job: impl FnOnce() + Send + 'static) {
        let jobs = self.jobs.get_or_init(|| {
            let pool = ThreadPoolBuilder::new().num_threads(num_cores());
            pool.thread_name(|index| format!("comm-{index}"))
                .build()
                .ok()
        });
        match jobs {
            Some(jobs) => jobs.spawn(job),
            None => job(),
        }
    }

    /// The bookkeeping. No code panics while it holds the lock, so a poisoned lock still guards a sound state.
    pub(super) fn lock(&self) -> MutexGuard<'_, WorldState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes these ranks poll again.
    pub(super) fn notify(&self, ranks: &[usize]) {
        for rank in ranks {
            self.wake[*rank].notify_all();
        }
    }

    /// Records that a rank failed, which ends the waits of all others. Only the first failure counts: later ones are
    /// its consequences.
    pub(crate) fn fail(&self, rank: usize, error: &candle_core::Error) {
        let message = message_of(error);
        let mut state = self.lock();
        let first = state.failure.get_or_insert_with(|| Failure {
            rank,
            message: message.clone(),
            num_ranks: 0,
        });
        first.num_ranks += usize::from(first.message == message);
        self.end(rank, state);
    }

    /// Records that a rank has returned, which ends the waits of those that need it.
    pub(crate) fn leave(&self, rank: usize) {
        let mut state = self.lock();
        state.ranks[rank].left = true;
        self.end(rank, state);
    }

    fn end(&self, rank: usize, mut state: MutexGuard<'_, WorldState>) {
        state.ranks[rank].ended = true;
        // When all ranks end, most find nobody asleep: a wake of all by each would be as many calls as there are pairs of ranks.
        let waiting = (0..state.ranks.len()).filter(|rank| state.ranks[*rank].num_waiting > 0);
        let waiting: Vec<usize> = waiting.collect();
        drop(state);
        self.notify(&waiting);
        self.ended.notify_all();
    }

    /// The first failure, if any rank failed. To be called once, when all ranks have ended.
    pub(crate) fn take_failure(&self) -> Option<Error> {
        let failure = self.lock().failure.take()?;
        let (rank, message) = (failure.rank, failure.message);
        Some(match failure.num_ranks == self.wake.len() {
            true => Error::AllRanksFailed { message },
            false => Error::RankFailed { rank, message },
        })
    }

    /// The number of messages that were sent and never asked for.
    pub(crate) fn num_undelivered(&self) -> usize {
        let state = self.lock();
        (state.channels.values())
            .map(|channel| channel.sent.len())
            .sum()
    }

    /// Blocks world rank `rank` until `poll` is ready, a rank fails, a rank that is needed leaves, ranks are seen to
    /// wait for each other, or the deadline. `slot` is the collective that is waited for, if it is one.
    pub(super) fn wait<T>(
        &self,
        rank: usize,
        call: &Call,
        slot: Option<SlotId>,
        mut poll: impl FnMut(&mut WorldState) -> Result<Polled<T>, Error>,
    ) -> Result<T, Error> {
        let mut deadline = Deadline::new(self.config.deadline);
        let mut state = self.lock();
        state.note_thread(rank);
        // Ranks that are seen to wait for each other, and how long this wait had lasted then.
        let mut seen: Option<(Vec<(usize, SlotId)>, Duration)> = None;
        let found = loop {
            let missing = match poll(&mut state) {
                Ok(Polled::Ready(value)) => break Ok(value),
                Ok(Polled::Missing(missing)) => missing,
                Err(error) => break Err(error),
            };
            if let Err(error) = state.check_alive(rank, call) {
                break Err(error);
            }
            if let Some(left) = missing.iter().find(|rank| state.ranks[**rank].left) {
                break Err(Error::PeerLeft {
                    waiting: rank,
                    call: call.to_string(),
                    rank: *left,
                    report: state.last_operations(),
                });
            }
            if deadline.is_over() {
                break Err(Error::Deadline {
                    waiting: rank,
                    call: call.to_string(),
                    secs: self.config.deadline.as_secs_f64(),
                    missing: rank_list(&missing),
                    report: state.last_operations(),
                });
            }
            state.ranks[rank].num_waiting += 1;
            state.ranks[rank].waits_for = slot;
            let cycle = state.cycle(rank);
            seen = cycle.map(|cycle| match seen.take() {
                Some((earlier, since)) if earlier == cycle => (earlier, since),
                _ => (cycle, deadline.waited()),
            });
            let is_over = |(_, since): &&(_, Duration)| deadline.waited() - *since >= GRACE;
            if let Some((cycle, _)) = seen.as_ref().filter(is_over) {
                let ranks: Vec<usize> = cycle.iter().map(|(rank, _)| *rank).collect();
                state.ranks[rank].num_waiting -= 1;
                break Err(Error::Deadlock {
                    waiting: rank,
                    call: call.to_string(),
                    ranks: rank_list(&ranks),
                    report: state.last_operations(),
                });
            }
            let longest = seen.as_ref().map_or(Duration::MAX, |(_, since)| {
                GRACE.saturating_sub(deadline.waited() - *since)
            });
            state = deadline.wait_at_most(longest, &self.wake[rank], state);
            state.ranks[rank].num_waiting -= 1;
        };
        drop(state);
        // Other ranks' inputs may have been freed here, on their GPUs.
        self.make_current(rank)
            .map_err(|error| Error::Argument(format!("{call}: {error}")))?;
        found
    }

    /// Sleeps for 0 to 2 ms if delays are injected. The same seed gives each rank the same delays.
    pub(super) fn delay(&self, rank: usize) {
        let Some(seed) = self.config.delays else {
            return;
        };
        let number = {
            let mut state = self.lock();
            state.ranks[rank].num_delays += 1;
            state.ranks[rank].num_delays
        };
        let mut random = DefaultHasher::new();
        (seed, rank, number).hash(&mut random);
        std::thread::sleep(Duration::from_micros(random.finish() % 2000));
    }
}
