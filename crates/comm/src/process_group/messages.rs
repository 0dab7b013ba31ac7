//! Messages between two ranks, and what is made of them.

use candle_core::{Result, Shape, Tensor};

use super::{ProcessGroup, dims};
use crate::error::argument;
use crate::memory::device::empty;
use crate::operation::with_rows;
use crate::{Message, Operation, P2p, Pending};

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

    /// Starts an [`all_to_all`](Self::all_to_all) of parts of any size along dim 0, `(s_0 + s_1 + .., ..) -> (r_0 + r_1 + .., ..)`: the
    /// next `send_sizes[j]` rows of `xs` go to rank `j`; what came from rank `i` is the next `receive_sizes[i]` rows of the result. A
    /// size may be 0. `xs` must not be written to before the wait.
    ///
    /// # Errors
    /// Sizes that are not one for each rank, or do not add up to the rows of `xs`; else as
    /// [`start_all_reduce`](Self::start_all_reduce). From the wait: a rank that sends another size or dtype than the receiver says.
    #[track_caller]
    pub fn start_all_to_all_uneven(
        &self,
        xs: &Tensor,
        send_sizes: &[usize],
        receive_sizes: &[usize],
    ) -> Result<Pending<Tensor>> {
        self.check_sizes(xs, send_sizes, receive_sizes)?;
        if self.is_single() {
            return Ok(Pending::ready(xs.detach()));
        }
        let rank = self.rank();
        let (mut parts, mut start) = (Vec::new(), 0);
        for size in send_sizes {
            parts.push(xs.detach().narrow(0, start, *size)?);
            start += size;
        }
        let with_rows = |num_rows| Shape::from(with_rows(xs.shape(), num_rows));
        let mut ops = Vec::new();
        for peer in (0..self.world_size()).filter(|peer| *peer != rank) {
            let (xs, dst, dtype) = (&parts[peer], peer, xs.dtype());
            let shape = with_rows(receive_sizes[peer]);
            ops.push(P2p::Send { xs, dst });
            ops.push(P2p::Recv {
                shape,
                dtype,
                src: peer,
            });
        }
        let pending = self.start_messages("all_to_all", &ops)?;
        let mine = parts.swap_remove(rank);
        let shape = with_rows(receive_sizes.iter().sum());
        Ok(pending.map(move |mut received| {
            let (dtype, device) = (mine.dtype(), mine.device().clone());
            received.insert(rank, mine);
            received.retain(|part| part.elem_count() > 0);
            match &received[..] {
                // candle's cat panics on tensors without elements.
                [] => empty(shape, dtype, &device),
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
        Err(argument(format!("all_to_all of uneven parts: {message}")))
    }

    /// Starts messages, for what the user has called.
    #[track_caller]
    fn start_messages(&self, name: &'static str, ops: &[P2p<'_>]) -> Result<Pending<Vec<Tensor>>> {
        let (mut messages, mut sends) = (Vec::new(), Vec::new());
        for op in ops {
            let (role, peer) = match op {
                P2p::Send { xs, dst } => {
                    sends.push(dims::contiguous(xs)?);
                    messages.push(Message::Send { xs: (), dst: *dst });
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
                return Err(argument(format!(
                    "{name}: {role} {peer} is this rank itself"
                )));
            }
        }
        if messages.is_empty() {
            return Ok(Pending::ready(Vec::new()));
        }
        let messages = messages.into();
        self.start(&Operation::Messages { name, messages }, &sends, None)
    }
}
