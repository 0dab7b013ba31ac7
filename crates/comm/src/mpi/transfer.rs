//! A message between two ranks on its way, and its memory.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::ops::Range;
use std::sync::Arc;

use mpi::ffi;

use super::Result;
use super::buffer::Buffer;
use super::group::MpiGroup;
use super::sys::{Mpi, check};

/// What one call moves at most: MPI counts to 2^31 only.
const CALL_BYTES: usize = 256 << 20;

/// A message that MPI is sending or receiving. It owns the memory, which comes back when the message is complete; dropped before, the
/// memory is leaked, for MPI may still use it.
pub(super) struct Transfer<B> {
    /// The calls that are not complete.
    requests: Vec<ffi::MPI_Request>,
    memory: Option<B>,
    /// How many bytes came, of a message received.
    num_bytes: usize,
    is_receive: bool,
}

// SAFETY: the requests are only handles, and every call that uses them takes `Mpi`, which is on MPI's thread only.
unsafe impl<B: Send> Send for Transfer<B> {}

impl<B> Transfer<B> {
    /// Starts the calls `name` by `start`, each for a part of the `num_bytes` bytes of `memory`, which MPI may use until the request
    /// that the call makes is complete, wherever `memory` is moved.
    fn start(
        name: &str,
        memory: B,
        num_bytes: usize,
        start: impl Fn(Range<usize>, &mut ffi::MPI_Request) -> c_int,
    ) -> Result<Self> {
        let mut transfer = Self {
            requests: Vec::with_capacity(1),
            memory: Some(memory),
            num_bytes: 0,
            is_receive: name == "MPI_Irecv",
        };
        // A message without bytes is one, too.
        for first in (0..num_bytes.max(1)).step_by(CALL_BYTES) {
            // SAFETY: the constant is initialised C data.
            let mut request = unsafe { ffi::RSMPI_REQUEST_NULL };
            let code = start(first..num_bytes.min(first + CALL_BYTES), &mut request);
            transfer.requests.push(request);
            // If it failed, the memory is leaked with the transfer: there is no telling what MPI kept.
            check(name, code)?;
        }
        Ok(transfer)
    }

    /// Whether the message is complete. Also the moment at which MPI makes progress.
    pub fn poll(&mut self, _: &Mpi) -> Result<bool> {
        while let Some(request) = self.requests.last_mut() {
            let (mut done, mut count) = (0, 0);
            // SAFETY: the request is this transfer's own and not complete; a status is plain numbers, for which zeros are fine.
            let (code, status) = unsafe {
                let mut status: ffi::MPI_Status = std::mem::zeroed();
                let code = ffi::MPI_Test(request, &mut done, &mut status);
                (code, status)
            };
            check("MPI_Test", code)?;
            if done == 0 {
                return Ok(false);
            }
            if self.is_receive {
                // SAFETY: the status is that of a complete receive of bytes.
                let code = unsafe { ffi::MPI_Get_count(&status, ffi::RSMPI_UINT8_T, &mut count) };
                check("MPI_Get_count", code)?;
                self.num_bytes += count as usize;
            }
            self.requests.pop();
        }
        Ok(true)
    }

    /// The memory and how many bytes came; `None` before the message is complete.
    pub fn take(mut self) -> Option<(B, usize)> {
        match self.requests.is_empty() {
            true => Some((self.memory.take()?, self.num_bytes)),
            false => None,
        }
    }
}

impl Transfer<Arc<Buffer>> {
    /// Starts to send `buffer` to rank `to` of a group.
    pub fn send(
        mpi: &Mpi,
        group: &MpiGroup,
        to: usize,
        tag: c_int,
        buffer: Arc<Buffer>,
    ) -> Result<Self> {
        let (to, tag) = group.address(to, tag);
        let (from, len) = (buffer.as_ptr(), buffer.len());
        Self::start("MPI_Isend", buffer, len, |part, request| {
            // SAFETY: the part is in the buffer, which, being shared, stays as it is, where it is, until the last clone is dropped, and
            // this one is not before the request is complete.
            unsafe {
                let (bytes, from) = (ffi::RSMPI_UINT8_T, from.add(part.start).cast());
                let len = part.len() as c_int;
                ffi::MPI_Isend(from, len, bytes, to, tag, mpi.world(), request)
            }
        })
    }
}

impl Transfer<Buffer> {
    /// Starts to receive from rank `from` of a group into `buffer`: at most as many bytes as it has.
    pub fn receive(
        mpi: &Mpi,
        group: &MpiGroup,
        from: usize,
        tag: c_int,
        mut buffer: Buffer,
    ) -> Result<Self> {
        let (from, tag) = (group.address(from, tag).0, group.own_tag(tag));
        let (to, len) = (buffer.as_mut_ptr(), buffer.len());
        Self::start("MPI_Irecv", buffer, len, |part, request| {
            // SAFETY: the part is in the buffer, which keeps the bytes where they are and everybody else away until it is taken back or
            // dropped, and this struct does neither before the request is complete.
            unsafe {
                let (bytes, to) = (ffi::RSMPI_UINT8_T, to.add(part.start).cast());
                let len = part.len() as c_int;
                ffi::MPI_Irecv(to, len, bytes, from, tag, mpi.world(), request)
            }
        })
    }

    /// Gives up a receive.
    pub fn cancel(mut self, _: &Mpi) -> Result<()> {
        while let Some(request) = self.requests.last_mut() {
            // SAFETY: the request is this transfer's own and not complete. A receive that is cancelled, or was matched just
            // before by a message that has come, completes without the sender.
            let code = unsafe {
                let code = ffi::MPI_Cancel(request);
                check("MPI_Cancel", code)?;
                ffi::MPI_Wait(request, ffi::RSMPI_STATUS_IGNORE)
            };
            check("MPI_Wait", code)?;
            self.requests.pop();
        }
        Ok(())
    }
}

/// Drops the transfers that are complete; returns whether there was one.
pub(super) fn poll_all<B>(mpi: &Mpi, transfers: &mut Vec<Transfer<B>>) -> Result<bool> {
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
        if !self.requests.is_empty() {
            std::mem::forget(self.memory.take());
        }
    }
}
