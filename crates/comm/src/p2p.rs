//! One message between two ranks, as an entry of a batch.

use candle_core::{DType, Shape, Tensor};

/// One entry of [`batch_send_recv`](crate::ProcessGroup::batch_send_recv).
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
