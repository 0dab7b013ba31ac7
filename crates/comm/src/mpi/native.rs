//! Sums that MPI makes by itself, with [`MpiReduction::Native`](crate::MpiReduction), by its nonblocking reductions.
//!
//! MPI gets copies, as the caller may give its tensors up before MPI is done with them. Sums are made in what ours are accumulated in,
//! and rounded once.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread::Builder;
use std::time::Duration;

use candle_core::{DType, Shape, Tensor, WithDType};
use mpi::ffi;

use super::Result;
use super::buffer::Buffer;
use super::collective::Progress;
use super::in_flight::InFlight;
use super::sys::{Mpi, check};
use super::transfer::Transfer;
use crate::bytes;
use crate::element::{Element, with_element};
use crate::{Error, Operation};

/// What one call to MPI reduces at most: it counts to 2^31 only.
const CALL_BYTES: usize = 64 << 20;

/// A communicator of MPI's own for a group: MPI's collectives have no tags.
#[derive(Clone, Copy)]
pub(super) struct NativeGroup(ffi::MPI_Comm);

// SAFETY: it is only a handle, and with MPI_THREAD_MULTIPLE, which whoever makes one has asked for, any thread may use it.
unsafe impl Send for NativeGroup {}
// SAFETY: as above.
unsafe impl Sync for NativeGroup {}

impl NativeGroup {
    /// The group of `world`. All of its ranks must call it, from where MPI was initialised.
    pub fn world(mpi: &Mpi) -> Result<Self> {
        let mut own = mpi.world();
        // SAFETY: the communicator is live, and all of its ranks make the call, in the same order as others.
        check("MPI_Comm_dup", unsafe {
            ffi::MPI_Comm_dup(mpi.world(), &mut own)
        })?;
        Ok(Self(own))
    }

    /// The group of the ranks that say the same `color`, in the order of their keys, on a thread of its own: MPI waits in it for all
    /// ranks of this group, and neither its own thread nor other groups should.
    ///
    /// # Errors
    /// They have not come before the deadline.
    pub fn split(self, color: usize, key: usize, deadline: Duration) -> Result<Self> {
        let (done, split) = channel();
        let thread = Builder::new().name("mpi-split".into()).spawn(move || {
            let whole = self;
            let mut new = whole.0;
            // SAFETY: the communicator is live, MPI allows calls on any thread, and `new` is valid for the call.
            let code =
                unsafe { ffi::MPI_Comm_split(whole.0, color as c_int, key as c_int, &mut new) };
            // Who asked may have given up.
            drop(done.send(check("MPI_Comm_split", code).map(|()| Self(new))));
        });
        thread.map_err(|error| Error::Backend(format!("split: no thread for it: {error}")))?;
        split.recv_timeout(deadline).map_err(|_| {
            let secs = deadline.as_secs_f64();
            Error::Backend(format!(
                "split: not all ranks came to MPI_Comm_split within {secs} s"
            ))
        })?
    }
}

/// MPI's type for `dtype`, in which sums are made.
fn datatype(dtype: DType) -> Result<ffi::MPI_Datatype> {
    // SAFETY: the constants are initialised C data.
    unsafe {
        Ok(match dtype {
            DType::F32 => ffi::RSMPI_FLOAT,
            DType::F64 => ffi::RSMPI_DOUBLE,
            DType::U8 => ffi::RSMPI_UINT8_T,
            DType::U32 => ffi::RSMPI_UINT32_T,
            DType::I16 => ffi::RSMPI_INT16_T,
            DType::I32 => ffi::RSMPI_INT32_T,
            DType::I64 => ffi::RSMPI_INT64_T,
            dtype => return Err(Error::Backend(format!("MPI adds no {}", dtype.as_str()))),
        })
    }
}

/// Starts a sum: `memory` has the input, and behind it room for the result of `len` values of `dtype`.
fn start(
    operation: &Operation,
    group: NativeGroup,
    (dtype, len): (DType, usize),
    mut memory: Buffer,
) -> Result<Transfer<Buffer>> {
    let sum = datatype(dtype)?;
    let input_bytes = memory.len() - len * dtype.size_in_bytes();
    let (input, output) = memory.split_at_mut(input_bytes);
    let (from, to) = (input.as_ptr().cast(), output.as_mut_ptr().cast());
    let len = len as c_int;
    let (name, is_scattered) = match operation {
        Operation::ReduceScatter(_) => ("MPI_Ireduce_scatter_block", true),
        _ => ("MPI_Iallreduce", false),
    };
    // SAFETY: `to` has room for `len` elements of the type `sum`, and `from` has as many for each rank to which a slice goes. Both stay
    // where they are, untouched, until the request is complete, or are leaked.
    Transfer::start(name, memory, |request| unsafe {
        let op = ffi::RSMPI_SUM;
        match is_scattered {
            true => ffi::MPI_Ireduce_scatter_block(from, to, len, sum, op, group.0, request),
            false => ffi::MPI_Iallreduce(from, to, len, sum, op, group.0, request),
        }
    })
}

/// A sum on its way.
pub(super) struct NativeSum {
    in_flight: Arc<InFlight>,
    dtype: DType,
    dims: Vec<usize>,
    /// With the number of values that each gives.
    calls: Vec<(Transfer<Buffer>, usize)>,
}

impl NativeSum {
    /// Starts it, on `num_ranks` ranks with an input of `shape` each.
    pub fn begin(
        in_flight: Arc<InFlight>,
        (group, num_ranks): (NativeGroup, usize),
        (shape, dtype): (&Shape, DType),
    ) -> Result<Self> {
        let dims = in_flight.call.operation.output_dims(shape, num_ranks);
        let num_parts = shape.elem_count() / dims.iter().product::<usize>().max(1);
        let calls = with_element!(dtype, begin_calls(&in_flight, group, &dims, num_parts))?;
        in_flight.drop_input();
        Ok(Self {
            in_flight,
            dtype,
            dims,
            calls,
        })
    }

    /// Whether it is complete, and the output of this rank then.
    pub fn poll(&mut self, mpi: &Mpi) -> Result<Progress> {
        for (call, _) in &mut self.calls {
            if !call.poll(mpi)? {
                return Ok(Progress::None);
            }
        }
        let calls = std::mem::take(&mut self.calls);
        let output = with_element!(self.dtype, output(&self.in_flight, calls, &self.dims));
        Ok(Progress::Over(output?))
    }
}

/// Starts all calls of a sum, of inputs of so many parts of the output's dims.
fn begin_calls<T: Element>(
    in_flight: &InFlight,
    group: NativeGroup,
    dims: &[usize],
    num_parts: usize,
) -> Result<Vec<(Transfer<Buffer>, usize)>> {
    let (all, acc) = (dims.iter().product::<usize>(), T::Acc::DTYPE);
    let longest = (CALL_BYTES / acc.size_in_bytes() / num_parts.max(1)).max(1);
    let calls = (0..all).step_by(longest).map(|start_of| {
        let len = longest.min(all - start_of);
        let mut memory = T::Acc::zeros((num_parts + 1) * len);
        for part in 0..num_parts {
            let place = memory[part * len..][..len].iter_mut();
            in_flight.read(part * all + start_of, len, |xs: &[T]| {
                place.zip(xs).for_each(|(place, x)| *place = x.widen());
            })?;
        }
        let (operation, memory) = (&in_flight.call.operation, Buffer::new(memory));
        Ok((start(operation, group, (acc, len), memory)?, len))
    });
    calls.collect()
}

/// The output that these calls have given.
fn output<T: Element>(
    in_flight: &InFlight,
    calls: Vec<(Transfer<Buffer>, usize)>,
    dims: &[usize],
) -> Result<Vec<Tensor>> {
    let mut sums = Vec::with_capacity(dims.iter().product());
    for (call, len) in calls {
        if let Some((memory, _)) = call.take() {
            let values = bytes::elements::<T::Acc>(&memory);
            let given = &values[values.len() - len..];
            sums.extend(given.iter().map(|sum| T::round(*sum)));
        }
    }
    in_flight.result(sums, dims)
}
