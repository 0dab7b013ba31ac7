//! Sums that MPI makes by itself, with [`MpiReduction::Native`](crate::MpiReduction), by its nonblocking reductions.
//!
//! MPI gets copies, as the caller may give its tensors up before MPI is done with them. Sums are made in what ours are accumulated in,
//! and rounded once.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::ops::Range;
use std::sync::mpsc::channel;
use std::thread::Builder;
use std::time::Duration;

use candle_core::{DType, Device, Shape, Tensor};
use mpi::ffi;

use super::in_flight::InFlight;
use super::sys::{Mpi, check};
use crate::element::Element;
use crate::{Error, Operation, ReduceOp};

type Result<T> = std::result::Result<T, Error>;

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

/// One call of MPI that is under way, with its memory; dropped before its end, the memory is leaked, for MPI may still use it.
struct Call<A> {
    request: ffi::MPI_Request,
    /// What it reads, and what it writes.
    memory: Option<(Vec<A>, Vec<A>)>,
    is_over: bool,
}

// SAFETY: the request is only a handle, and every call that uses it takes `Mpi`, which is on MPI's thread only.
unsafe impl<A: Send> Send for Call<A> {}

impl<A: Element> Call<A> {
    /// Starts the reduction of `input` into `len` elements.
    fn start(
        _: &Mpi,
        operation: &Operation,
        group: NativeGroup,
        input: Vec<A>,
        len: usize,
    ) -> Result<Self> {
        let sum = datatype(A::DTYPE)?;
        let mut output = A::zeros(len);
        let (from, to, len) = (
            input.as_ptr().cast(),
            output.as_mut_ptr().cast(),
            len as c_int,
        );
        // SAFETY: `to` has room for `len` elements of the type `sum`, and `from` as many for each rank to which a slice goes. Both stay
        // where they are, untouched, until the request is complete, or are leaked.
        let (name, code, request) = unsafe {
            let mut request = ffi::RSMPI_REQUEST_NULL;
            let (op, out) = (ffi::RSMPI_SUM, &mut request);
            let (name, code) = match operation {
                Operation::ReduceScatter(_) => (
                    "MPI_Ireduce_scatter_block",
                    ffi::MPI_Ireduce_scatter_block(from, to, len, sum, op, group.0, out),
                ),
                _ => (
                    "MPI_Iallreduce",
                    ffi::MPI_Iallreduce(from, to, len, sum, op, group.0, out),
                ),
            };
            (name, code, request)
        };
        let call = Self {
            request,
            memory: Some((input, output)),
            is_over: false,
        };
        // If it failed, the memory is leaked with the call: there is no telling what MPI kept.
        check(name, code)?;
        Ok(call)
    }

    /// Whether it is complete. Also the moment at which MPI makes progress.
    fn poll(&mut self, _: &Mpi) -> Result<bool> {
        if !self.is_over {
            let mut done = 0;
            // SAFETY: the request is this call's own and not complete.
            let code =
                unsafe { ffi::MPI_Test(&mut self.request, &mut done, ffi::RSMPI_STATUS_IGNORE) };
            check("MPI_Test", code)?;
            self.is_over = done != 0;
        }
        Ok(self.is_over)
    }
}

impl<A> Drop for Call<A> {
    fn drop(&mut self) {
        if !self.is_over {
            std::mem::forget(self.memory.take());
        }
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

/// A sum on its way.
pub(super) struct NativeSum<T: Element> {
    dims: Vec<usize>,
    calls: Vec<Call<T::Acc>>,
}

impl<T: Element> NativeSum<T> {
    /// Whether MPI is to make it, if it makes any.
    pub fn is_for(operation: &Operation) -> bool {
        operation.reduce_op() == Some(ReduceOp::Sum)
    }

    /// Starts it, on `num_ranks` ranks with an input of `shape` each.
    pub fn begin(
        mpi: &Mpi,
        (group, num_ranks): (NativeGroup, usize),
        (operation, shape): (&Operation, &Shape),
        in_flight: &InFlight,
    ) -> Result<Self> {
        let dims = operation.output_dims(shape, num_ranks);
        let len: usize = dims.iter().product();
        let num_parts = shape.elem_count() / len.max(1);
        let longest = CALL_BYTES / size_of::<T::Acc>() / num_parts.max(1);
        let calls = ranges(len, longest.max(1)).map(|range| {
            let mut input = Vec::with_capacity(num_parts * range.len());
            for part in 0..num_parts {
                in_flight.read(part * len + range.start, range.len(), |xs: &[T]| {
                    input.extend(xs.iter().map(|x| x.widen()));
                })?;
            }
            Call::start(mpi, operation, group, input, range.len())
        });
        let calls = calls.collect::<Result<_>>()?;
        in_flight.drop_input();
        Ok(Self { dims, calls })
    }

    /// Whether it is complete.
    pub fn poll(&mut self, mpi: &Mpi) -> Result<bool> {
        for call in &mut self.calls {
            if !call.poll(mpi)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The output of this rank.
    pub fn into_output(mut self, in_flight: &InFlight) -> Result<Tensor> {
        let mut sums = Vec::with_capacity(self.dims.iter().product());
        let outputs = self.calls.iter_mut().filter_map(|call| call.memory.take());
        for (_, output) in outputs {
            sums.extend(output.into_iter().map(T::round));
        }
        in_flight.write(0, &sums)?;
        match in_flight.place() {
            Some(place) => Ok(place),
            None => Tensor::from_vec(sums, self.dims, &Device::Cpu).map_err(Error::of_backend),
        }
    }
}

/// `0..len` in ranges of at most `longest`.
fn ranges(len: usize, longest: usize) -> impl Iterator<Item = Range<usize>> {
    (0..len)
        .step_by(longest)
        .map(move |start| start..len.min(start + longest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_follow_each_other_to_the_end() {
        assert_eq!(ranges(0, 3).count(), 0);
        assert_eq!(ranges(7, 3).collect::<Vec<_>>(), [0..3, 3..6, 6..7]);
        assert_eq!(ranges(6, 3).collect::<Vec<_>>(), [0..3, 3..6]);
        let all = 5usize << 30;
        let cut: Vec<_> = ranges(all, CALL_BYTES).collect();
        assert_eq!(cut.iter().map(ExactSizeIterator::len).sum::<usize>(), all);
        assert!(cut.iter().all(|range| c_int::try_from(range.len()).is_ok()));
    }
}
