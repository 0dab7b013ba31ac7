//! NCCL's functions for groups, as far as they are used, with sentences for errors.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_int};
use std::mem::ManuallyDrop;
use std::ptr::null_mut;

use cudarc::nccl::sys;

use crate::Error;

type Result<T> = std::result::Result<T, Error>;

/// The oldest version that has everything used here: splits came with it.
const OLDEST: c_int = 21_800;

/// `NCCL_CONFIG_INITIALIZER` of the version whose bindings these are.
const MAGIC: u32 = 0xcafe_beef;
const BINDINGS: u32 = 22_800;
const UNDEFINED: c_int = c_int::MIN;

/// The color of a rank that gets no group.
const NO_COLOR: c_int = -1;

/// Bytes by which the ranks of a world find each other.
pub(super) type UniqueId = [u8; 128];

/// A communicator of NCCL's, which does not block.
#[derive(Clone, Copy)]
pub(super) struct Handle(pub(super) sys::ncclComm_t);

// SAFETY: any thread may use a communicator as long as only one does at a time. `NcclGroup` keeps it under a lock.
unsafe impl Send for Handle {}

/// A number as NCCL has it.
pub(super) fn as_int(number: usize) -> Result<c_int> {
    c_int::try_from(number).map_err(|_| Error::Argument(format!("NCCL cannot count to {number}")))
}

fn text(chars: *const c_char) -> String {
    if chars.is_null() {
        return String::new();
    }
    // SAFETY: NCCL's texts end with a zero, and stay until the next call of this thread.
    let text = unsafe { CStr::from_ptr(chars) };
    text.to_string_lossy().trim().to_string()
}

/// An error unless a call has been accepted: what is under way then ends as [`is_settled`] says.
pub(super) fn accepted(what: &str, code: sys::ncclResult_t) -> Result<()> {
    use sys::ncclResult_t::{ncclInProgress, ncclSuccess};
    if matches!(code, ncclSuccess | ncclInProgress) {
        return Ok(());
    }
    // SAFETY: any code is allowed.
    let meaning = text(unsafe { sys::ncclGetErrorString(code) });
    // SAFETY: the argument is not used.
    let last = text(unsafe { sys::ncclGetLastError(null_mut()) });
    let detail = match last.is_empty() || last == meaning {
        true => String::new(),
        false => format!(": {last}"),
    };
    Err(Error::Backend(format!("NCCL: {what}: {meaning}{detail}")))
}

/// An error unless NCCL is there and new enough.
pub(super) fn check_version() -> Result<()> {
    let hint = "hint: install NCCL, for example by NVIDIA's wheel nvidia-nccl-cu13, and name its folder in LD_LIBRARY_PATH";
    let mut version = 0;
    // SAFETY: the pointer is to a local variable.
    let code = unsafe { sys::ncclGetVersion(&mut version) };
    accepted("its version", code).map_err(|error| {
        Error::Backend(format!("the backend nccl cannot be used: {error}\n{hint}"))
    })?;
    if version < OLDEST {
        return Err(Error::Backend(format!(
            "the backend nccl needs NCCL 2.18 or later, got version code {version}\n{hint}"
        )));
    }
    Ok(())
}

/// A new id, for one rank to make and all to have.
pub(super) fn unique_id() -> Result<UniqueId> {
    let mut id = sys::ncclUniqueId { internal: [0; 128] };
    // SAFETY: the pointer is to a local variable.
    accepted("a unique id", unsafe { sys::ncclGetUniqueId(&mut id) })?;
    Ok(id.internal.map(|byte| byte as u8))
}

fn config() -> sys::ncclConfig_t {
    sys::ncclConfig_t {
        size: size_of::<sys::ncclConfig_t>(),
        magic: MAGIC,
        version: BINDINGS,
        blocking: 0,
        cgaClusterSize: UNDEFINED,
        minCTAs: UNDEFINED,
        maxCTAs: UNDEFINED,
        netName: std::ptr::null(),
        splitShare: UNDEFINED,
        trafficClass: UNDEFINED,
        commName: std::ptr::null(),
        collnetEnable: UNDEFINED,
        CTAPolicy: UNDEFINED,
        shrinkShare: UNDEFINED,
        nvlsCTAs: UNDEFINED,
        nChannelsPerNetPeer: UNDEFINED,
        nvlinkCentricSched: UNDEFINED,
    }
}

/// Starts to join the world, on the GPU that is current.
pub(super) fn init(rank: c_int, world_size: c_int, id: &UniqueId) -> Result<Handle> {
    let internal = id.map(|byte| byte as c_char);
    let (mut comm, mut config) = (null_mut(), config());
    let id = sys::ncclUniqueId { internal };
    // SAFETY: the pointers are to local variables, which NCCL uses during the call only: the handle it fills at once.
    let code = unsafe { sys::ncclCommInitRankConfig(&mut comm, world_size, id, rank, &mut config) };
    accepted("joining the other ranks", code)?;
    Ok(Handle(comm))
}

/// A group on its way out of another one. NCCL fills in its handle until the parent has settled or was aborted; the place of a split
/// that is dropped before is never freed.
pub(super) struct Split {
    child: ManuallyDrop<Box<Handle>>,
}

impl Split {
    /// Starts to split `parent`: ranks with the same color, if they have one, form a group, in the order of the keys.
    pub fn start(parent: Handle, color: Option<c_int>, key: c_int) -> Result<Self> {
        let mut child = ManuallyDrop::new(Box::new(Handle(null_mut())));
        let mut config = config();
        let color = color.unwrap_or(NO_COLOR);
        // SAFETY: the config is used during the call only. The child's place is on the heap, where it stays for as long as NCCL
        // may write to it.
        let code = unsafe { sys::ncclCommSplit(parent.0, color, key, &mut child.0, &mut config) };
        accepted("a split", code)?;
        Ok(Self { child })
    }

    /// The child, to be called when the parent has settled or was aborted; none for a rank without a color.
    pub fn finish(self) -> Option<Handle> {
        let child = *ManuallyDrop::into_inner(self.child);
        (!child.0.is_null()).then_some(child)
    }
}

/// Whether nothing is under way on the host any more; an error if something has failed, on the GPU too.
pub(super) fn is_settled(comm: Handle) -> Result<bool> {
    let mut state = sys::ncclResult_t::ncclSuccess;
    // SAFETY: the handle is alive, and the pointer is to a local variable.
    let code = unsafe { sys::ncclCommGetAsyncError(comm.0, &mut state) };
    accepted("the state of a group", code)?;
    accepted("a group has failed", state)?;
    Ok(state == sys::ncclResult_t::ncclSuccess)
}

/// Starts to complete what is under way.
pub(super) fn finalize(comm: Handle) -> Result<()> {
    // SAFETY: the handle is alive.
    accepted("the end of a group", unsafe {
        sys::ncclCommFinalize(comm.0)
    })
}

/// Frees a finalized group, whose handle must not be used any more.
pub(super) fn destroy(comm: Handle) -> Result<()> {
    // SAFETY: the handle is alive; `NcclGroup` has taken it out, so nobody uses it again.
    accepted("freeing a group", unsafe { sys::ncclCommDestroy(comm.0) })
}

/// Ends all operations of a group, done or not, and frees it. Its handle must not be used any more.
pub(super) fn abort(comm: Handle) -> Result<()> {
    // SAFETY: as for `destroy`.
    accepted("aborting a group", unsafe { sys::ncclCommAbort(comm.0) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nccl_is_there_or_is_named() {
        let Err(error) = check_version() else {
            assert_eq!(unique_id().map(|id| id.len()).ok(), Some(128));
            return;
        };
        let expected = "the backend nccl cannot be used: NCCL: its version: libnccl.so.2 could not be loaded\nhint: install NCCL, ";
        assert!(error.to_string().starts_with(expected), "{error}");
    }
}
