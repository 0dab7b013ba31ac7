//! The same by plain calls of MPI, which sums in an order of its own.
//!
//! Calls are made on the rank's thread, while MPI's own thread makes none.

use std::ffi::{c_int, c_void};
use std::thread::yield_now;
use std::time::Instant;

use mpi::ffi;

use crate::operation::Operation;

/// MPI's call of an operation, with its buffers.
pub struct Bare {
    operation: Operation,
    rank: usize,
    num_ranks: usize,
    input: Vec<f32>,
    output: Vec<f32>,
}

/// The tag of messages there and back.
const TAG: c_int = 1;

impl Bare {
    pub fn new(
        operation: Operation,
        (rank, num_ranks): (usize, usize),
        input: Vec<f32>,
        output_len: usize,
    ) -> Self {
        Self {
            operation,
            rank,
            num_ranks,
            input,
            output: vec![0.; output_len],
        }
    }

    /// Of the larger of input and output.
    pub fn num_bytes(&self) -> usize {
        self.input.len().max(self.output.len()) * size_of::<f32>()
    }

    pub fn output(&self) -> &[f32] {
        &self.output
    }

    /// Seconds for one of `calls` calls.
    pub fn run(&mut self, calls: usize, nonblocking: bool) -> f64 {
        if self.operation == Operation::Broadcast && self.rank == 0 {
            self.output.copy_from_slice(&self.input);
        }
        let start = Instant::now();
        for _ in 0..calls {
            match (self.operation, nonblocking) {
                (Operation::PingPong, _) => self.ping_pong(),
                (_, true) => self.poll(),
                (_, false) => self.call(),
            }
        }
        start.elapsed().as_secs_f64() / calls as f64 / self.operation.ways()
    }

    /// Where to read and to write, and the elements of input and output that one rank has of another.
    fn buffers(&mut self) -> (*const c_void, *mut c_void, c_int, c_int) {
        let part = |len: usize| (len / self.num_ranks) as c_int;
        let counts = match self.operation {
            Operation::AllGather => (self.input.len() as c_int, self.input.len() as c_int),
            Operation::ReduceScatter => (self.output.len() as c_int, self.output.len() as c_int),
            Operation::AllToAll => (part(self.input.len()), part(self.output.len())),
            _ => (self.input.len() as c_int, self.output.len() as c_int),
        };
        let (from, to) = (self.input.as_ptr().cast(), self.output.as_mut_ptr().cast());
        (from, to, counts.0, counts.1)
    }

    fn call(&mut self) {
        let (from, to, sent, got) = self.buffers();
        // SAFETY: both buffers have as many elements as the call's counts say, for as many ranks as there are. All ranks call it,
        // and no other thread calls MPI meanwhile.
        let code = unsafe {
            let (f32s, sum, world) = (ffi::RSMPI_FLOAT, ffi::RSMPI_SUM, ffi::RSMPI_COMM_WORLD);
            match self.operation {
                Operation::AllGather => ffi::MPI_Allgather(from, sent, f32s, to, got, f32s, world),
                Operation::ReduceScatter => {
                    ffi::MPI_Reduce_scatter_block(from, to, got, f32s, sum, world)
                }
                Operation::Broadcast => ffi::MPI_Bcast(to, got, f32s, 0, world),
                Operation::AllToAll => ffi::MPI_Alltoall(from, sent, f32s, to, got, f32s, world),
                _ => ffi::MPI_Allreduce(from, to, sent, f32s, sum, world),
            }
        };
        assert_eq!(code, ffi::MPI_SUCCESS as c_int);
    }

    fn poll(&mut self) {
        let (from, to, sent, got) = self.buffers();
        // SAFETY: as in `call`; the buffers are not touched before the request is complete.
        let (code, mut request) = unsafe {
            let mut request = ffi::RSMPI_REQUEST_NULL;
            let out = &mut request;
            let (f32s, sum, world) = (ffi::RSMPI_FLOAT, ffi::RSMPI_SUM, ffi::RSMPI_COMM_WORLD);
            let code = match self.operation {
                Operation::AllGather => {
                    ffi::MPI_Iallgather(from, sent, f32s, to, got, f32s, world, out)
                }
                Operation::ReduceScatter => {
                    ffi::MPI_Ireduce_scatter_block(from, to, got, f32s, sum, world, out)
                }
                Operation::Broadcast => ffi::MPI_Ibcast(to, got, f32s, 0, world, out),
                Operation::AllToAll => {
                    ffi::MPI_Ialltoall(from, sent, f32s, to, got, f32s, world, out)
                }
                _ => ffi::MPI_Iallreduce(from, to, sent, f32s, sum, world, out),
            };
            (code, request)
        };
        assert_eq!(code, ffi::MPI_SUCCESS as c_int);
        let mut done = 0;
        while done == 0 {
            // SAFETY: the request is the one that was started, and the pointers are valid for the call.
            let code = unsafe { ffi::MPI_Test(&mut request, &mut done, ffi::RSMPI_STATUS_IGNORE) };
            assert_eq!(code, ffi::MPI_SUCCESS as c_int);
            yield_now();
        }
    }

    fn ping_pong(&mut self) {
        let last = self.num_ranks - 1;
        if self.rank == 0 {
            self.send(last);
            self.receive(last);
        } else if self.rank == last {
            self.receive(0);
            self.send(0);
        }
    }

    fn send(&mut self, to: usize) {
        let (from, _, len, _) = self.buffers();
        // SAFETY: the input has as many elements. No other thread calls MPI meanwhile.
        let code = unsafe {
            let (f32s, world) = (ffi::RSMPI_FLOAT, ffi::RSMPI_COMM_WORLD);
            ffi::MPI_Send(from, len, f32s, to as c_int, TAG, world)
        };
        assert_eq!(code, ffi::MPI_SUCCESS as c_int);
    }

    fn receive(&mut self, from: usize) {
        let (_, to, _, len) = self.buffers();
        // SAFETY: the output has room for as many elements. No other thread calls MPI meanwhile.
        let code = unsafe {
            let (f32s, world, status) = (
                ffi::RSMPI_FLOAT,
                ffi::RSMPI_COMM_WORLD,
                ffi::RSMPI_STATUS_IGNORE,
            );
            ffi::MPI_Recv(to, len, f32s, from as c_int, TAG, world, status)
        };
        assert_eq!(code, ffi::MPI_SUCCESS as c_int);
    }
}

/// Waits for all ranks.
pub fn barrier() {
    // SAFETY: all ranks call it, and no other thread calls MPI meanwhile.
    let code = unsafe { ffi::MPI_Barrier(ffi::RSMPI_COMM_WORLD) };
    assert_eq!(code, ffi::MPI_SUCCESS as c_int);
}
