//! The calls to MPI that set up and end: safe functions over the C interface.
//!
//! MPI happens on one thread, the one that holds [`Mpi`], which cannot be sent to another.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_int};
use std::marker::PhantomData;
use std::ptr::null_mut;

use mpi::ffi;

use super::Result;
use crate::Error;

/// MPI, initialised on this thread.
pub(super) struct Mpi {
    world: ffi::MPI_Comm,
    /// With a pointer inside it is neither `Send` nor `Sync`.
    _this_thread: PhantomData<*const ()>,
}

/// An error that says what MPI says, unless `code` is success.
pub(super) fn check(call: &str, code: c_int) -> Result<()> {
    if code == ffi::MPI_SUCCESS as c_int {
        return Ok(());
    }
    // Longer than any implementation's MPI_MAX_ERROR_STRING.
    let mut text = [0u8; 8192];
    let mut length = 0;
    // SAFETY: `text` has room for what MPI_Error_string writes, which it ends with a zero, and lives through the call.
    unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr().cast(), &mut length) };
    let text = CStr::from_bytes_until_nul(&text).map_or("".into(), CStr::to_string_lossy);
    Err(Error::Backend(format!(
        "{call} failed: {text} (code {code})"
    )))
}

/// The number of ranks of `comm`.
pub(super) fn size(comm: ffi::MPI_Comm) -> Result<usize> {
    let mut size = 0;
    // SAFETY: `comm` is a live communicator, `size` is valid for the call.
    check("MPI_Comm_size", unsafe {
        ffi::MPI_Comm_size(comm, &mut size)
    })?;
    Ok(size as usize)
}

impl Mpi {
    /// Initialises MPI. Errors return from here on, where MPI's default is to end the process.
    ///
    /// # Errors
    /// MPI has been initialised before, or cannot be, or was built without threads.
    pub fn init() -> Result<Self> {
        let mut initialized = 0;
        // SAFETY: MPI_Initialized may be called at any time; the pointer is valid for the call.
        let code = unsafe { ffi::MPI_Initialized(&mut initialized) };
        check("MPI_Initialized", code)?;
        if initialized != 0 {
            return Err(Error::Argument(
                "MPI has been initialised in this process already, and it can be only once\n\
                 hint: call launch::mpi once per process, with all the work inside"
                    .into(),
            ));
        }
        let mut provided = 0;
        // SAFETY: MPI allows null for both arguments of main; `provided` is valid for the call. The constants are
        // initialised C data.
        let (code, needed) = unsafe {
            // Serialized, so that a program may call MPI itself while nothing of this library's is under way.
            let wanted = ffi::RSMPI_THREAD_SERIALIZED;
            let code = ffi::MPI_Init_thread(null_mut(), null_mut(), wanted, &mut provided);
            (code, ffi::RSMPI_THREAD_FUNNELED)
        };
        check("MPI_Init_thread", code)?;
        if provided < needed {
            return Err(Error::Backend(
                "this MPI was built without threads (MPI_THREAD_FUNNELED), which communication in the background needs"
                    .into(),
            ));
        }
        // SAFETY: MPI is initialised, and the constants are initialised C data. Copies inherit the error handler.
        let (code, world) = unsafe {
            let world = ffi::RSMPI_COMM_WORLD;
            (
                ffi::MPI_Comm_set_errhandler(world, ffi::RSMPI_ERRORS_RETURN),
                world,
            )
        };
        check("MPI_Comm_set_errhandler", code)?;
        let mut own = world;
        // SAFETY: every rank of the world duplicates it here, in its first call on a communicator.
        check("MPI_Comm_dup", unsafe {
            ffi::MPI_Comm_dup(world, &mut own)
        })?;
        Ok(Self {
            world: own,
            _this_thread: PhantomData,
        })
    }

    /// The communicator of all ranks and groups: an own copy, so that tags collide with nobody's.
    pub fn world(&self) -> ffi::MPI_Comm {
        self.world
    }

    /// This rank in the world.
    pub fn rank(&self) -> Result<usize> {
        let mut rank = 0;
        // SAFETY: the communicator is live, `rank` is valid for the call.
        check("MPI_Comm_rank", unsafe {
            ffi::MPI_Comm_rank(self.world, &mut rank)
        })?;
        Ok(rank as usize)
    }

    /// The highest tag that MPI allows.
    pub fn max_tag(&self) -> Result<c_int> {
        let (mut found, mut tag) = (0, null_mut::<c_int>());
        // SAFETY: the communicator is live, and the attribute is a pointer to a number, which is written to `tag`.
        let code = unsafe {
            let (world, name) = (ffi::RSMPI_COMM_WORLD, ffi::MPI_TAG_UB as c_int);
            ffi::MPI_Comm_get_attr(world, name, (&raw mut tag).cast(), &mut found)
        };
        check("MPI_Comm_get_attr", code)?;
        // What every MPI allows.
        const LEAST: c_int = 32767;
        match found != 0 && !tag.is_null() {
            // SAFETY: MPI keeps the number as long as it is initialised.
            true => Ok(LEAST.max(unsafe { *tag })),
            false => Ok(LEAST),
        }
    }

    /// A communicator of the ranks of the world that share memory with this one. All ranks of the world must call it.
    pub fn host(&self) -> Result<ffi::MPI_Comm> {
        let mut host = self.world;
        // SAFETY: the communicator is live, the constants are initialised C data, `host` is valid for the call.
        check("MPI_Comm_split_type", unsafe {
            let (kind, info) = (ffi::RSMPI_COMM_TYPE_SHARED, ffi::RSMPI_INFO_NULL);
            ffi::MPI_Comm_split_type(self.world, kind, 0, info, &mut host)
        })?;
        Ok(host)
    }

    /// The values that each rank of `comm` passes. All of them must call it.
    pub fn gather<const N: usize>(
        &self,
        comm: ffi::MPI_Comm,
        values: [u64; N],
    ) -> Result<Vec<[u64; N]>> {
        let mut all = vec![[0u64; N]; size(comm)?];
        // SAFETY: `N` u64 are read from `values`, and as many for each rank of `comm` written to `all`, which has room for them.
        check("MPI_Allgather", unsafe {
            let (u64s, from, len) = (ffi::RSMPI_UINT64_T, values.as_ptr().cast(), N as c_int);
            ffi::MPI_Allgather(from, len, u64s, all.as_mut_ptr().cast(), len, u64s, comm)
        })?;
        Ok(all)
    }

    /// The world rank that has sent a message with `tag` that can be received.
    pub fn probe(&self, tag: c_int) -> Result<Option<usize>> {
        let mut found = 0;
        // SAFETY: a status is plain numbers, for which zeros are fine; both pointers are valid for the call.
        let (code, status) = unsafe {
            let mut status: ffi::MPI_Status = std::mem::zeroed();
            let anybody = ffi::RSMPI_ANY_SOURCE;
            let code = ffi::MPI_Iprobe(anybody, tag, self.world, &mut found, &mut status);
            (code, status)
        };
        check("MPI_Iprobe", code)?;
        Ok((found != 0).then_some(status.MPI_SOURCE as usize))
    }

    /// Frees a communicator that is used no more. All of its ranks must call it.
    pub fn free(&self, mut comm: ffi::MPI_Comm) -> Result<()> {
        // SAFETY: the communicator is live, and the caller has no request on it.
        check("MPI_Comm_free", unsafe { ffi::MPI_Comm_free(&mut comm) })
    }

    /// Ends MPI. All ranks must call it.
    pub fn finalize(self) -> Result<()> {
        self.free(self.world)?;
        // SAFETY: this is the thread that initialised MPI, and no call follows as `self` is gone.
        check("MPI_Finalize", unsafe { ffi::MPI_Finalize() })
    }

    /// Ends all ranks of the run.
    pub fn abort(&self, code: i32) {
        // SAFETY: MPI is initialised and has not been finalised, as `self` lives.
        unsafe { ffi::MPI_Abort(self.world, code) };
    }
}
