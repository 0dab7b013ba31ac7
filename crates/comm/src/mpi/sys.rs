//! The calls to MPI that set up, split and end: safe functions over the C interface.
//!
//! All of MPI happens on one thread, the one that holds [`Mpi`], which cannot be sent to another.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_int};
use std::marker::PhantomData;
use std::ptr::null_mut;

use mpi::ffi;

use crate::Error;

type Result<T> = std::result::Result<T, Error>;

/// MPI, initialised on this thread.
pub(super) struct Mpi {
    world: Comm,
    /// With a pointer inside it is neither `Send` nor `Sync`.
    _this_thread: PhantomData<*const ()>,
}

/// One of MPI's communicators: an own copy, so that tags collide with nobody's.
#[derive(Clone, Copy)]
pub(super) struct Comm(pub(super) ffi::MPI_Comm);

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

impl Mpi {
    /// Initialises MPI. Errors return from here on, where MPI's default is to end the process.
    ///
    /// # Errors
    /// MPI has been initialised before, or cannot be.
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
            world: Comm(own),
            _this_thread: PhantomData,
        })
    }

    /// The communicator of all ranks.
    pub fn world(&self) -> Comm {
        self.world
    }

    /// This rank in `comm`.
    pub fn rank(&self, comm: Comm) -> Result<usize> {
        let mut rank = 0;
        // SAFETY: `comm` is a live communicator, `rank` is valid for the call.
        check("MPI_Comm_rank", unsafe {
            ffi::MPI_Comm_rank(comm.0, &mut rank)
        })?;
        Ok(rank as usize)
    }

    /// The number of ranks of `comm`.
    pub fn size(&self, comm: Comm) -> Result<usize> {
        let mut size = 0;
        // SAFETY: `comm` is a live communicator, `size` is valid for the call.
        check("MPI_Comm_size", unsafe {
            ffi::MPI_Comm_size(comm.0, &mut size)
        })?;
        Ok(size as usize)
    }

    /// Splits `comm`; returns once all of its ranks have called it. Ranks beyond `c_int` cannot occur.
    pub fn split(&self, comm: Comm, color: usize, key: usize) -> Result<Comm> {
        let mut new = comm.0;
        // SAFETY: `comm` is a live communicator, `new` is valid for the call.
        let code = unsafe { ffi::MPI_Comm_split(comm.0, color as c_int, key as c_int, &mut new) };
        check("MPI_Comm_split", code)?;
        Ok(Comm(new))
    }

    /// A communicator of the ranks of the world that share memory with this one. All ranks of the world must call it.
    pub fn host(&self) -> Result<Comm> {
        let mut host = self.world.0;
        // SAFETY: the communicator is live, the constants are initialised C data, `host` is valid for the call.
        check("MPI_Comm_split_type", unsafe {
            let (kind, info) = (ffi::RSMPI_COMM_TYPE_SHARED, ffi::RSMPI_INFO_NULL);
            ffi::MPI_Comm_split_type(self.world.0, kind, 0, info, &mut host)
        })?;
        Ok(Comm(host))
    }

    /// Each value that a rank of `comm` passes. All of them must call it.
    pub fn gather(&self, comm: Comm, value: u64) -> Result<Vec<u64>> {
        let mut values = vec![0u64; self.size(comm)?];
        // SAFETY: one u64 is read from `value`, and one for each rank of `comm` written to `values`, which has as many.
        check("MPI_Allgather", unsafe {
            let (u64s, from) = (ffi::RSMPI_UINT64_T, (&raw const value).cast());
            ffi::MPI_Allgather(from, 1, u64s, values.as_mut_ptr().cast(), 1, u64s, comm.0)
        })?;
        Ok(values)
    }

    /// The source of a message with `tag` that can be received.
    pub fn probe(&self, comm: Comm, tag: c_int) -> Result<Option<usize>> {
        let mut found = 0;
        // SAFETY: a status is plain numbers, for which zeros are fine; both pointers are valid for the call.
        let (code, status) = unsafe {
            let mut status: ffi::MPI_Status = std::mem::zeroed();
            let anybody = ffi::RSMPI_ANY_SOURCE;
            let code = ffi::MPI_Iprobe(anybody, tag, comm.0, &mut found, &mut status);
            (code, status)
        };
        check("MPI_Iprobe", code)?;
        Ok((found != 0).then_some(status.MPI_SOURCE as usize))
    }

    /// Frees a communicator that is used no more. All of its ranks must call it.
    pub fn free(&self, comm: Comm) -> Result<()> {
        let mut comm = comm.0;
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
        unsafe { ffi::MPI_Abort(self.world.0, code) };
    }
}
