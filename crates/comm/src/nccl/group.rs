//! One of NCCL's communicators, with its stream.

use std::fmt::Display;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

use candle_core::cuda_backend::cudarc::driver::CudaStream;

use super::rank_run::RankRun;
use super::sys::{self, Handle, UniqueId, as_int};
use crate::Error;
use crate::deadline::Deadline;
use crate::error::group_name;

type Result<T> = std::result::Result<T, Error>;

/// Polls of a state that changes within microseconds most of the time, before they become rare.
const QUICK_POLLS: u32 = 200;
const LONGEST_SLEEP: Duration = Duration::from_millis(1);

/// One rank's end of one of NCCL's communicators, and the stream on which its operations run.
pub(super) struct NcclGroup {
    /// World ranks, by group rank.
    pub members: Arc<[usize]>,
    /// This rank in the group.
    pub rank: usize,
    pub stream: Arc<CudaStream>,
    state: Mutex<GroupState>,
}

pub(super) struct GroupState {
    /// None once the group was freed.
    handle: Option<Handle>,
    /// A split of it that the run's failure has interrupted.
    interrupted: Option<sys::Split>,
}

impl NcclGroup {
    /// The group of all ranks: returns when all are there.
    pub fn world(
        (rank, world_size): (usize, usize),
        id: &UniqueId,
        stream: Arc<CudaStream>,
        run: &RankRun,
    ) -> Result<Self> {
        let handle = sys::init(as_int(rank)?, as_int(world_size)?, id)?;
        let group = Self::new((0..world_size).collect(), rank, stream, handle);
        group.settled(handle, run)?;
        Ok(group)
    }

    fn new(members: Arc<[usize]>, rank: usize, stream: Arc<CudaStream>, handle: Handle) -> Self {
        let state = GroupState {
            handle: Some(handle),
            interrupted: None,
        };
        Self {
            members,
            rank,
            stream,
            state: Mutex::new(state),
        }
    }

    /// Its state, for one thread at a time.
    pub fn lock(&self) -> MutexGuard<'_, GroupState> {
        // No code panics while it holds the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The name that messages have for it.
    pub fn name(&self) -> String {
        group_name(&self.members)
    }

    /// The members of a new group, with this rank at `rank` among them; none for a rank that is to be alone. All ranks of this
    /// group must call it, with the color of their new group.
    pub fn split(
        &self,
        color: usize,
        (members, rank): (Arc<[usize]>, usize),
        stream: Arc<CudaStream>,
        run: &RankRun,
    ) -> Result<Option<Self>> {
        let mut state = self.lock();
        let parent = state.handle()?;
        let color = match members.len() {
            1 => None,
            _ => Some(as_int(color)?),
        };
        let split = sys::Split::start(parent, color, as_int(rank)?)?;
        if let Err(error) = wait_settled(parent, run, &format_args!("a split of {}", self.name())) {
            state.interrupted = Some(split);
            return Err(error);
        }
        let Some(child) = split.finish() else {
            return Ok(None);
        };
        let group = Self::new(members, rank, stream, child);
        group.settled(child, run)?;
        Ok(Some(group))
    }

    /// Waits for a new group; aborts it if it does not come to be.
    fn settled(&self, handle: Handle, run: &RankRun) -> Result<()> {
        let call = format!("joining {}", self.name());
        wait_settled(handle, run, &call).inspect_err(|_| self.abort())
    }

    /// An error that has come up on the GPU or in the network; none while another thread uses the group, which sees it.
    pub fn async_error(&self) -> Option<Error> {
        let state = match self.state.try_lock() {
            Ok(state) => state,
            Err(TryLockError::Poisoned(state)) => state.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        let handle = state.handle?;
        sys::is_settled(handle).err()
    }

    /// Ends its operations, done or not, and frees it, with the child that an interrupted split may have made.
    pub fn abort(&self) {
        let mut state = self.lock();
        let Some(handle) = state.handle.take() else {
            return;
        };
        let interrupted = state.interrupted.take();
        let aborted = sys::abort(handle).and_then(|()| {
            // Nothing is under way on the host any more, so what there is of the child is final.
            let child = interrupted.and_then(sys::Split::finish);
            child.map_or(Ok(()), sys::abort)
        });
        if let Err(error) = aborted {
            tracing::warn!("{} could not be aborted: {error}", self.name());
        }
    }

    /// Completes its operations.
    pub fn finalize(&self, run: &RankRun) -> Result<()> {
        let state = self.lock();
        let Some(handle) = state.handle else {
            return Ok(());
        };
        sys::finalize(handle)?;
        wait_settled(handle, run, &format_args!("the end of {}", self.name()))
    }

    /// Frees it after [`finalize`](Self::finalize).
    pub fn destroy(&self) -> Result<()> {
        let handle = self.lock().handle.take();
        handle.map_or(Ok(()), sys::destroy)
    }
}

impl GroupState {
    /// NCCL's handle; an error once the group was freed.
    pub fn handle(&self) -> Result<Handle> {
        self.handle.ok_or_else(|| {
            Error::Backend("this group is closed: its run over NCCL has ended".into())
        })
    }
}

/// Waits until the host's part of `call` is done, or the run fails, or the deadline.
pub(super) fn wait_settled(handle: Handle, run: &RankRun, call: &dyn Display) -> Result<()> {
    let mut deadline = Deadline::new(run.deadline);
    let mut polls = 0u32;
    while !sys::is_settled(handle)? {
        run.check(call)?;
        if deadline.is_over() {
            return Err(run.late(call));
        }
        polls += 1;
        match polls {
            ..QUICK_POLLS => std::thread::yield_now(),
            _ => deadline.sleep(LONGEST_SLEEP),
        }
    }
    Ok(())
}
