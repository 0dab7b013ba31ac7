//! One message on its way, and the memory it is in.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::sync::Arc;

use mpi::ffi;

use super::addresses::own_tag;
use super::part::Part;
use super::place::Place;
use super::sys::{Comm, Mpi, check};
use crate::Error;
use crate::bytes;
use crate::element::Element;

type Result<T> = std::result::Result<T, Error>;

/// Memory that MPI may read while its owner is moved around.
///
/// # Safety
/// The bytes stay in place when `self` is moved, and nobody writes to them as long as `self` is neither borrowed nor dropped.
pub(super) unsafe trait Lend {
    /// The bytes to send.
    fn bytes(&self) -> &[u8];
}

/// Memory that MPI may write to while its owner is moved around.
///
/// # Safety
/// As for [`Lend`], and nobody else reads the bytes either.
pub(super) unsafe trait LendMut: Lend {
    /// The bytes to receive into.
    fn bytes_mut(&mut self) -> &mut [u8];
}

// SAFETY: a vector's elements are on the heap and its own.
unsafe impl<T: Element> Lend for Vec<T> {
    fn bytes(&self) -> &[u8] {
        bytes::of(self)
    }
}

// SAFETY: as above.
unsafe impl<T: Element> LendMut for Vec<T> {
    fn bytes_mut(&mut self) -> &mut [u8] {
        bytes::of_mut(self)
    }
}

// SAFETY: a part's elements are in its region's vector and in no other part.
unsafe impl<T: Element> Lend for Part<T> {
    fn bytes(&self) -> &[u8] {
        bytes::of(self)
    }
}

// SAFETY: as above.
unsafe impl<T: Element> LendMut for Part<T> {
    fn bytes_mut(&mut self) -> &mut [u8] {
        bytes::of_mut(self)
    }
}

// SAFETY: as for a part or a vector, one of which it is.
unsafe impl<T: Element> Lend for Place<T> {
    fn bytes(&self) -> &[u8] {
        bytes::of(self)
    }
}

// SAFETY: as above.
unsafe impl<T: Element> LendMut for Place<T> {
    fn bytes_mut(&mut self) -> &mut [u8] {
        bytes::of_mut(self)
    }
}

// SAFETY: what is shared cannot be written to, and stays where it is as long as a clone lives.
unsafe impl<B: Lend> Lend for Arc<B> {
    fn bytes(&self) -> &[u8] {
        (**self).bytes()
    }
}

/// A message that MPI is sending or receiving. It owns the memory, which comes back when the message is complete; dropped
/// before, the memory is leaked, for MPI may still use it.
pub(super) struct Transfer<B> {
    request: ffi::MPI_Request,
    buffer: Option<B>,
    /// How many bytes came or, of a message sent, went.
    num_bytes: usize,
    is_over: bool,
    is_receive: bool,
}

// SAFETY: the request is only a handle, and every call that uses it takes `Mpi`, which is on MPI's thread only.
unsafe impl<B: Send> Send for Transfer<B> {}

fn length(bytes: usize) -> Result<c_int> {
    c_int::try_from(bytes).map_err(|_| {
        Error::Backend(format!(
            "a message of {bytes} bytes is more than MPI can count: it should have been cut"
        ))
    })
}

impl<B: Lend> Transfer<B> {
    /// Starts to send `buffer` to rank `to`.
    pub fn send(mpi: &Mpi, comm: Comm, to: usize, tag: c_int, buffer: B) -> Result<Self> {
        let (to, tag) = mpi.addresses(comm).of(to, tag);
        let len = length(buffer.bytes().len())?;
        // SAFETY: `Lend` keeps the bytes where they are, unchanged, until the buffer is taken back or dropped, and this
        // struct does neither before the request is complete.
        let (code, request) = unsafe {
            let mut request = ffi::RSMPI_REQUEST_NULL;
            let (from, bytes) = (buffer.bytes().as_ptr().cast(), ffi::RSMPI_UINT8_T);
            let code = ffi::MPI_Isend(from, len, bytes, to, tag, mpi.world(), &mut request);
            (code, request)
        };
        Self::started("MPI_Isend", code, request, buffer, len)
    }

    fn started(
        call: &str,
        code: c_int,
        request: ffi::MPI_Request,
        buffer: B,
        len: c_int,
    ) -> Result<Self> {
        let transfer = Self {
            request,
            buffer: Some(buffer),
            num_bytes: len as usize,
            is_over: false,
            is_receive: call == "MPI_Irecv",
        };
        // If it failed, the buffer is leaked with the transfer: there is no telling what MPI kept.
        check(call, code)?;
        Ok(transfer)
    }

    /// How many bytes came or, as long as it is not complete, may come.
    pub fn num_bytes(&self) -> usize {
        self.num_bytes
    }

    /// Whether the message is complete. Also the moment at which MPI makes progress.
    pub fn poll(&mut self, _: &Mpi) -> Result<bool> {
        if self.is_over {
            return Ok(true);
        }
        let (mut done, mut count) = (0, 0);
        // SAFETY: the request is this transfer's own and not complete; a status is plain numbers, for which zeros are fine.
        let (code, status) = unsafe {
            let mut status: ffi::MPI_Status = std::mem::zeroed();
            let code = ffi::MPI_Test(&mut self.request, &mut done, &mut status);
            (code, status)
        };
        check("MPI_Test", code)?;
        if done == 0 {
            return Ok(false);
        }
        self.is_over = true;
        if self.is_receive {
            // SAFETY: the status is that of a complete receive of bytes.
            let code = unsafe { ffi::MPI_Get_count(&status, ffi::RSMPI_UINT8_T, &mut count) };
            check("MPI_Get_count", code)?;
            self.num_bytes = count as usize;
        }
        Ok(true)
    }

    /// The buffer and how many bytes came; `None` before the message is complete.
    pub fn take(mut self) -> Option<(B, usize)> {
        match self.is_over {
            true => Some((self.buffer.take()?, self.num_bytes)),
            false => None,
        }
    }
}

impl<B: LendMut> Transfer<B> {
    /// Starts to receive from rank `from` into `buffer`: at most as many bytes as it has.
    pub fn receive(mpi: &Mpi, comm: Comm, from: usize, tag: c_int, mut buffer: B) -> Result<Self> {
        let (from, tag) = (mpi.addresses(comm).of(from, tag).0, own_tag(comm, tag));
        let len = length(buffer.bytes().len())?;
        // SAFETY: `LendMut` keeps the bytes where they are and everybody else away until the buffer is taken back or
        // dropped, and this struct does neither before the request is complete.
        let (code, request) = unsafe {
            let mut request = ffi::RSMPI_REQUEST_NULL;
            let (to, bytes) = (buffer.bytes_mut().as_mut_ptr().cast(), ffi::RSMPI_UINT8_T);
            let code = ffi::MPI_Irecv(to, len, bytes, from, tag, mpi.world(), &mut request);
            (code, request)
        };
        Self::started("MPI_Irecv", code, request, buffer, len)
    }

    /// Gives up a receive.
    pub fn cancel(mut self, _: &Mpi) -> Result<()> {
        if self.is_over {
            return Ok(());
        }
        // SAFETY: the request is this transfer's own and not complete. A receive that is cancelled, or was matched just
        // before by a message that has come, completes without the sender.
        let code = unsafe {
            let code = ffi::MPI_Cancel(&mut self.request);
            check("MPI_Cancel", code)?;
            ffi::MPI_Wait(&mut self.request, ffi::RSMPI_STATUS_IGNORE)
        };
        check("MPI_Wait", code)?;
        self.is_over = true;
        Ok(())
    }
}

/// Drops the messages that are complete; returns whether there was one.
pub(super) fn poll_all<B: Lend>(mpi: &Mpi, transfers: &mut Vec<Transfer<B>>) -> Result<bool> {
    let (mut index, num_transfers) = (0, transfers.len());
    while index < transfers.len() {
        match transfers[index].poll(mpi)? {
            true => drop(transfers.swap_remove(index)),
            false => index += 1,
        }
    }
    Ok(transfers.len() < num_transfers)
}

impl<B> Drop for Transfer<B> {
    fn drop(&mut self) {
        if !self.is_over {
            std::mem::forget(self.buffer.take());
        }
    }
}
