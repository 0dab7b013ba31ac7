//! What all ranks of a process share: groups, operations in flight, who failed, who left.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use candle_core::Device;
use rayon::{ThreadPool, ThreadPoolBuilder};

use super::messages::Channel;
use super::slot::Slot;
use super::{LocalCommunicator, LocalConfig};
use crate::call::Call;
use crate::cores::num_cores;
use crate::deadline::Deadline;
use crate::device::make_current;
use crate::error::{group_name, rank_list};
use crate::{Error, message_of};

/// What all ranks share. One lock guards all bookkeeping, so there is no lock order to keep; each rank sleeps on a
/// condition variable of its own, so that an operation wakes the ranks of its group only.
pub(crate) struct World {
    deadline: Duration,
    delays: Option<u64>,
    devices: Vec<Device>,
    state: Mutex<State>,
    wake: Vec<Condvar>,
    /// Threads for the work of large operations. Not those of a rank's own pool: a rank may be blocked in a wait on them.
    /// `None` if the system gives no more threads.
    jobs: OnceLock<Option<ThreadPool>>,
}

pub(super) struct State {
    /// The first rank that failed.
    failure: Option<Failure>,
    ranks: Vec<RankState>,
    pub groups: Vec<Group>,
    /// Groups that were split off, by their parent, the number of collectives there before, and their members.
    subgroups: HashMap<(usize, u64, Arc<[usize]>), usize>,
}

struct Failure {
    rank: usize,
    message: String,
    /// Ranks that failed with this message, each by itself.
    num_ranks: usize,
}

#[derive(Default)]
struct RankState {
    last: Option<LastCall>,
    /// Whether the rank has returned.
    left: bool,
    num_delays: u64,
}

struct LastCall {
    members: Arc<[usize]>,
    /// The number among the group's collectives; messages have none.
    seq: Option<u64>,
    call: Call,
}

impl std::fmt::Display for RankState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.last {
            None => f.write_str("has started no operation")?,
            Some(LastCall { members, seq, call }) => {
                write!(f, "{call} ({}", group_name(members))?;
                if let Some(seq) = seq {
                    write!(f, ", operation number {seq}")?;
                }
                f.write_str(")")?;
            }
        }
        f.write_str(if self.left { ", then left" } else { "" })
    }
}

pub(super) struct Group {
    /// The world ranks, by group rank.
    pub members: Arc<[usize]>,
    /// The number of each rank's next collective.
    pub next_seq: Vec<u64>,
    pub slots: HashMap<u64, Slot>,
    /// By (source, destination), group ranks.
    pub channels: HashMap<(usize, usize), Channel>,
}

impl Group {
    pub fn new(members: Arc<[usize]>) -> Self {
        let next_seq = vec![0; members.len()];
        Self {
            members,
            next_seq,
            slots: HashMap::new(),
            channels: HashMap::new(),
        }
    }

    /// What `look` finds at a collective, which is forgotten when none of the ranks wants anything more from it.
    pub fn look_at<T>(&mut self, seq: u64, look: impl FnOnce(&mut Slot) -> T) -> Option<T> {
        let slot = self.slots.get_mut(&seq)?;
        let found = look(slot);
        if slot.is_over() {
            self.slots.remove(&seq);
        }
        Some(found)
    }
}

impl State {
    /// Notes what a rank starts, with its number among the group's collectives if it is one. An error if a rank has failed:
    /// nothing new starts after that.
    pub fn begin(
        &mut self,
        comm: &LocalCommunicator,
        call: &Call,
        seq: Option<u64>,
    ) -> Result<(), Error> {
        let world_rank = comm.world_rank();
        self.check_alive(world_rank, call)?;
        let (members, call) = (comm.members.clone(), call.clone());
        self.ranks[world_rank].last = Some(LastCall { members, seq, call });
        Ok(())
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

    /// One line per rank: its last operation.
    fn last_operations(&self) -> String {
        let ranks = self.ranks.iter().enumerate();
        let lines = ranks.map(|(rank, state)| format!("  rank {rank}: {state}"));
        lines.collect::<Vec<_>>().join("\n")
    }
}

/// What a wait found when it looked.
pub(super) enum Polled<T> {
    Ready(T),
    /// Not complete; these world ranks have not arrived.
    Missing(Vec<usize>),
}

impl World {
    /// What the ranks of a run share.
    ///
    /// # Errors
    /// Devices that the ranks cannot have.
    pub(crate) fn new(config: &LocalConfig) -> candle_core::Result<Arc<Self>> {
        let devices = config.device_of_each()?;
        let ranks = 0..config.world_size;
        let state = State {
            failure: None,
            ranks: ranks.clone().map(|_| RankState::default()).collect(),
            groups: vec![Group::new(ranks.clone().collect())],
            subgroups: HashMap::new(),
        };
        Ok(Arc::new(Self {
            deadline: config.deadline,
            delays: config.delays,
            devices,
            state: Mutex::new(state),
            wake: ranks.map(|_| Condvar::new()).collect(),
            jobs: OnceLock::new(),
        }))
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

    pub(super) fn members(&self, group: usize) -> Arc<[usize]> {
        self.lock().groups[group].members.clone()
    }

    /// The number of the group of these world ranks that `rank` of the group `parent` has split off: the first of them makes it.
    pub(super) fn subgroup(&self, parent: usize, rank: usize, members: &Arc<[usize]>) -> usize {
        let mut state = self.lock();
        let State {
            groups, subgroups, ..
        } = &mut *state;
        let split = (parent, groups[parent].next_seq[rank], members.clone());
        *subgroups.entry(split).or_insert_with(|| {
            groups.push(Group::new(members.clone()));
            groups.len() - 1
        })
    }

    /// The bookkeeping. No code panics while it holds the lock, so a poisoned lock still guards a sound state.
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
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
        drop(state);
        self.wake.iter().for_each(Condvar::notify_all);
    }

    /// Records that a rank has returned, which ends the waits of those that need it.
    pub(crate) fn leave(&self, rank: usize) {
        self.lock().ranks[rank].left = true;
        self.wake.iter().for_each(Condvar::notify_all);
    }

    /// The first failure, if any rank failed. To be called once, when all ranks have ended.
    pub(crate) fn take_failure(&self) -> Option<Error> {
        let Failure {
            rank,
            message,
            num_ranks,
        } = self.lock().failure.take()?;
        Some(match num_ranks == self.wake.len() {
            true => Error::AllRanksFailed { message },
            false => Error::RankFailed { rank, message },
        })
    }

    /// The number of messages that were sent and never asked for.
    pub(crate) fn num_undelivered(&self) -> usize {
        let state = self.lock();
        state
            .groups
            .iter()
            .flat_map(|group| group.channels.values())
            .map(Channel::num_undelivered)
            .sum()
    }

    /// Blocks world rank `rank` until `poll` is ready, a rank fails, a rank that is needed leaves, or the deadline.
    pub(super) fn wait<T>(
        &self,
        rank: usize,
        call: &Call,
        poll: impl FnMut(&mut State) -> Result<Polled<T>, Error>,
    ) -> Result<T, Error> {
        let found = self.wait_until(rank, call, poll);
        // Other ranks' inputs may have been freed here, on their GPUs.
        self.make_current(rank)
            .map_err(|error| Error::Argument(format!("{call}: {error}")))?;
        found
    }

    fn wait_until<T>(
        &self,
        rank: usize,
        call: &Call,
        mut poll: impl FnMut(&mut State) -> Result<Polled<T>, Error>,
    ) -> Result<T, Error> {
        let mut deadline = Deadline::new(self.deadline);
        let mut state = self.lock();
        loop {
            let missing = match poll(&mut state)? {
                Polled::Ready(value) => return Ok(value),
                Polled::Missing(missing) => missing,
            };
            state.check_alive(rank, call)?;
            if let Some(left) = missing.iter().find(|missing| state.ranks[**missing].left) {
                return Err(Error::PeerLeft {
                    waiting: rank,
                    call: call.to_string(),
                    rank: *left,
                    report: state.last_operations(),
                });
            }
            if deadline.is_over() {
                return Err(Error::Deadline {
                    waiting: rank,
                    call: call.to_string(),
                    secs: self.deadline.as_secs_f64(),
                    missing: rank_list(&missing),
                    report: state.last_operations(),
                });
            }
            state = deadline.wait(&self.wake[rank], state);
        }
    }

    /// Sleeps for 0 to 2 ms if delays are injected. The same seed gives each rank the same delays.
    pub(super) fn delay(&self, rank: usize) {
        let Some(seed) = self.delays else { return };
        let number = {
            let mut state = self.lock();
            state.ranks[rank].num_delays += 1;
            state.ranks[rank].num_delays
        };
        let random = mix(mix(mix(seed) ^ rank as u64) ^ number);
        std::thread::sleep(Duration::from_micros(random % 2000));
    }
}

/// The finaliser of splitmix64 (Steele, Lea and Flood, OOPSLA 2014): every input bit changes half of the output bits.
fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}
