//! Messages between two ranks, and what is made of them.

use candle_core::{DType, Result, Shape, Tensor};

use super::{ProcessGroup, dims};
use crate::device::empty;
use crate::operation::Message;
use crate::{Error, Operation, Pending};

/// One entry of [`batch_send_recv`](ProcessGroup::batch_send_recv).
///
/// Between two ranks of a group messages arrive in the order in which they were sent. All entries of a batch are in
/// flight together, so two ranks that send to each other in one batch cannot deadlock.
#[derive(Debug, Clone)]
pub enum P2p<'a> {
    /// Sends a tensor. It is copied when the batch starts; the caller may write to it afterwards.
    Send {
        /// What to send.
        xs: &'a Tensor,
        /// The rank, in the group, that receives it.
        dst: usize,
    },
    /// Receives a tensor.
    Recv {
        /// The shape that the message must have.
        shape: Shape,
        /// The dtype that the message must have.
        dtype: DType,
        /// The rank, in the group, that sends it.
        src: usize,
    },
}

impl ProcessGroup {
    /// Sends and receives a batch of messages; the result holds the received tensors in the order of the `Recv`
    /// entries. Sends do not wait for their receiver.
    ///
    /// # Errors
    /// A rank outside the group or this rank itself, a message of another shape or dtype than asked for; else as
    /// [`all_reduce`](Self::all_reduce).
    #[track_caller]
    pub fn batch_send_recv(&self, ops: &[P2p<'_>]) -> Result<Vec<Tensor>> {
        self.start_batch_send_recv(ops)?.wait()
    }

    /// Starts a [`batch_send_recv`](Self::batch_send_recv).
    ///
    /// # Errors
    /// A rank outside the group or this rank itself; else as [`start_all_reduce`](Self::start_all_reduce).
    #[track_caller]
    pub fn start_batch_send_recv(&self, ops: &[P2p<'_>]) -> Result<Pending<Vec<Tensor>>> {
        self.start_messages("batch_send_recv", ops)
    }

    /// `(s_0 + s_1 + .., ..) -> (r_0 + r_1 + .., ..)`: an all-to-all of parts of any size along dim 0. The next `send_sizes[j]` rows
    /// of `xs` go to rank `j`; what came from rank `i` is the next `receive_sizes[i]` rows of the result. A size may be 0.
    ///
    /// # Errors
    /// Sizes that are not one for each rank, or do not add up to the rows of `xs`; a rank that sends another size or dtype than the
    /// receiver says; else as [`all_reduce`](Self::all_reduce).
    #[track_caller]
    pub fn all_to_all_uneven(
        &self,
        xs: &Tensor,
        send_sizes: &[usize],
        receive_sizes: &[usize],
    ) -> Result<Tensor> {
        self.start_all_to_all_uneven(xs, send_sizes, receive_sizes)?
            .wait()
    }

    /// Starts an [`all_to_all_uneven`](Self::all_to_all_uneven). `xs` must not be written to before the wait.
    ///
    /// # Errors
    /// Wrong sizes; else as [`start_all_reduce`](Self::start_all_reduce).
    #[track_caller]
    pub fn start_all_to_all_uneven(
        &self,
        xs: &Tensor,
        send_sizes: &[usize],
        receive_sizes: &[usize],
    ) -> Result<Pending<Tensor>> {
        let rank = self.rank();
        self.check_sizes(xs, send_sizes, receive_sizes)?;
        if self.is_single() {
            return Ok(Pending::ready(xs.detach()));
        }
        let mut dims = xs.dims().to_vec();
        let mut start = 0;
        let parts = send_sizes.iter().map(|size| {
            start += size;
            xs.detach().narrow(0, start - size, *size)
        });
        let mut parts = parts.collect::<Result<Vec<_>>>()?;
        let others = || (0..self.world_size()).filter(|peer| *peer != rank);
        let sends = others().map(|dst| P2p::Send {
            xs: &parts[dst],
            dst,
        });
        let receives = others().map(|src| {
            dims[0] = receive_sizes[src];
            P2p::Recv {
                shape: dims.as_slice().into(),
                dtype: xs.dtype(),
                src,
            }
        });
        let ops: Vec<P2p<'_>> = sends.chain(receives).collect();
        let pending = self.start_messages("all_to_all", &ops)?;
        let mine = parts.swap_remove(rank);
        dims[0] = receive_sizes.iter().sum();
        let (dtype, device) = (xs.dtype(), xs.device().clone());
        Ok(pending.map(move |mut received| {
            received.insert(rank, mine);
            received.retain(|part| part.elem_count() > 0);
            match &received[..] {
                // candle's cat panics on tensors without elements.
                [] => empty(dims, dtype, &device),
                [part] => part.force_contiguous(),
                parts => Tensor::cat(parts, 0),
            }
        }))
    }

    fn check_sizes(&self, xs: &Tensor, send: &[usize], receive: &[usize]) -> Result<()> {
        dims::check_dim("all_to_all", xs, 0)?;
        let (rank, n, num_rows) = (self.rank(), self.world_size(), xs.dims()[0]);
        let message = if send.len() != n || receive.len() != n {
            format!(
                "expected a size to send and one to receive for each of {n} ranks, got {} and {}",
                send.len(),
                receive.len()
            )
        } else if send.iter().sum::<usize>() != num_rows {
            format!(
                "the sizes to send, {send:?}, do not add up to the {num_rows} rows of the tensor"
            )
        } else if send[rank] != receive[rank] {
            let (sends, receives) = (send[rank], receive[rank]);
            format!("rank {rank} sends itself {sends} rows, but receives {receives}")
        } else {
            return Ok(());
        };
        Err(Error::Argument(format!("all_to_all of uneven parts: {message}")).into())
    }

    /// Starts messages, for what the user has called.
    #[track_caller]
    fn start_messages(&self, name: &'static str, ops: &[P2p<'_>]) -> Result<Pending<Vec<Tensor>>> {
        let (mut messages, mut sends) = (Vec::new(), Vec::new());
        for op in ops {
            let (role, peer) = match op {
                P2p::Send { xs, dst } => {
                    sends.push(dims::contiguous(xs)?);
                    messages.push(Message::Send { dst: *dst });
                    ("dst", *dst)
                }
                P2p::Recv { shape, dtype, src } => {
                    let (shape, dtype, src) = (shape.clone(), *dtype, *src);
                    messages.push(Message::Recv { shape, dtype, src });
                    ("src", src)
                }
            };
            self.check_rank(name, role, peer)?;
            if peer == self.rank() {
                let message = format!("{name}: {role} {peer} is this rank itself");
                return Err(Error::Argument(message).into());
            }
        }
        if messages.is_empty() {
            return Ok(Pending::ready(Vec::new()));
        }
        let messages = messages.into();
        self.start(&Operation::Messages { name, messages }, &sends, None)
    }
}
