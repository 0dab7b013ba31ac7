//! One call to MPI on its way, and the memory that it works on.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::sync::Arc;

use mpi::ffi;

use super::Result;
use super::buffer::Buffer;
use super::group::Group;
use super::sys::{Mpi, check};

/// A message that MPI is sending or receiving, or a sum that it is making. It owns the memory, which comes back when the call is
/// complete; dropped before, the memory is leaked, for MPI may still use it.
pub(super) struct Transfer<B> {
    request: ffi::MPI_Request,
    memory: Option<B>,
    /// How many bytes came, of a message received.
    num_bytes: usize,
    is_over: bool,
    is_receive: bool,
}

// SAFETY: the request is only a handle, and every call that uses it takes `Mpi`, which is on MPI's thread only.
unsafe impl<B: Send> Send for Transfer<B> {}

impl<B> Transfer<B> {
    /// Starts the call `name` by `start`, which may use `memory` until the request that it makes is complete, wherever `memory` is
    /// moved.
    pub fn start(
        name: &str,
        memory: B,
        start: impl FnOnce(&mut ffi::MPI_Request) -> c_int,
    ) -> Result<Self> {
        // SAFETY: the constant is initialised C data.
        let mut request = unsafe { ffi::RSMPI_REQUEST_NULL };
        let code = start(&mut request);
        let transfer = Self {
            request,
            memory: Some(memory),
            num_bytes: 0,
            is_over: false,
            is_receive: name == "MPI_Irecv",
        };
        // If it failed, the memory is leaked with the transfer: there is no telling what MPI kept.
        check(name, code)?;
        Ok(transfer)
    }

    /// Whether the call is complete. Also the moment at which MPI makes progress.
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
        self.is_over = done != 0;
        if self.is_over && self.is_receive {
            // SAFETY: the status is that of a complete receive of bytes.
            let code = unsafe { ffi::MPI_Get_count(&status, ffi::RSMPI_UINT8_T, &mut count) };
            check("MPI_Get_count", code)?;
            self.num_bytes = count as usize;
        }
        Ok(self.is_over)
    }

    /// The memory and how many bytes came; `None` before the call is complete.
    pub fn take(mut self) -> Option<(B, usize)> {
        match self.is_over {
            true => Some((self.memory.take()?, self.num_bytes)),
            false => None,
        }
    }
}

impl Transfer<Arc<Buffer>> {
    /// Starts to send `buffer`, of fewer bytes than the 2^31 to which MPI counts, to rank `to` of a group.
    pub fn send(
        mpi: &Mpi,
        group: &Group,
        to: usize,
        tag: c_int,
        buffer: Arc<Buffer>,
    ) -> Result<Self> {
        let (to, tag) = group.address(to, tag);
        let (from, len) = (buffer.as_ptr().cast(), buffer.len() as c_int);
        // SAFETY: a buffer that is shared stays as it is, where it is, until the last clone is dropped, and this one is not before the
        // request is complete.
        Self::start("MPI_Isend", buffer, |request| unsafe {
            let bytes = ffi::RSMPI_UINT8_T;
            ffi::MPI_Isend(from, len, bytes, to, tag, mpi.world(), request)
        })
    }
}

impl Transfer<Buffer> {
    /// Starts to receive from rank `from` of a group into `buffer`: at most as many bytes as it has.
    pub fn receive(
        mpi: &Mpi,
        group: &Group,
        from: usize,
        tag: c_int,
        mut buffer: Buffer,
    ) -> Result<Self> {
        let (from, tag) = (group.address(from, tag).0, group.own_tag(tag));
        let (to, len) = (buffer.as_mut_ptr().cast(), buffer.len() as c_int);
        // SAFETY: the buffer keeps the bytes where they are and everybody else away until it is taken back or dropped, and this struct
        // does neither before the request is complete.
        Self::start("MPI_Irecv", buffer, |request| unsafe {
            let bytes = ffi::RSMPI_UINT8_T;
            ffi::MPI_Irecv(to, len, bytes, from, tag, mpi.world(), request)
        })
    }

    /// Bytes of the memory, as long as that is here.
    pub fn room(&self) -> usize {
        self.memory.as_deref().map_or(0, <[u8]>::len)
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
        if !self.is_over {
            std::mem::forget(self.memory.take());
        }
    }
}
