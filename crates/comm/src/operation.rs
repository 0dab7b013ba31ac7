//! What the ranks of a group do together.

pub(crate) mod call;
pub(crate) mod pending;
pub(crate) mod scope;

use std::sync::Arc;

use candle_core::{DType, Result, Shape, Tensor};

use crate::error::argument;

/// How a reduction combines the values of the ranks: elementwise, and pairwise by rank number. Ranks 0 and 1 are combined, 2 and 3,
/// then the two results, and so on; five ranks give `((0+1)+(2+3))+4`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ReduceOp {
    /// The sum. bf16 and f16 are accumulated in f32 and rounded once, but with [`HalfSums::Native`](crate::HalfSums); integers wrap.
    Sum,
    /// The sum, divided by the number of ranks before it is rounded. Not of integers.
    Avg,
    /// The largest value. A NaN on any rank gives NaN.
    Max,
    /// The smallest value. A NaN on any rank gives NaN.
    Min,
    /// The product. bf16 and f16 are multiplied in f32 and rounded once; integers wrap.
    Prod,
}

impl std::fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Sum => "sum",
            Self::Avg => "avg",
            Self::Max => "max",
            Self::Min => "min",
            Self::Prod => "prod",
        })
    }
}

/// What the ranks of a group do together. `N` is their number; all but messages act on dim 0 of one tensor for each rank, of
/// the same shape and dtype on all, and give one. Of what has `sizes`, a number of rows for each rank, dim 0 is that of all rows together
/// when ranks compare what they call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Operation {
    /// `(n, ..) -> (n, ..)`: the elementwise reduction over the ranks, on every rank.
    AllReduce(ReduceOp),
    /// `(n, ..) -> (N * n, ..)`: the ranks' tensors one after the other, on every rank.
    AllGather,
    /// `(N * n, ..) -> (n, ..)`: this rank's slice of the elementwise reduction.
    ReduceScatter(ReduceOp),
    /// `(n, ..) -> (n, ..)`: root's tensor on every rank. Values matter on the root only.
    Broadcast {
        /// The rank, in the group, whose tensor it is.
        root: usize,
    },
    /// `(N * n, ..) -> (N * n, ..)`: slice `j` goes to rank `j`; what came from rank `i` is slice `i`.
    AllToAll,
    /// `(n, ..) -> (n, ..)`: the elementwise reduction over the ranks, on the root; nothing on the others.
    Reduce {
        /// How values are combined.
        op: ReduceOp,
        /// The rank, in the group, that gets it.
        root: usize,
    },
    /// `(sizes[0] + sizes[1] + .., ..) -> (sizes[rank], ..)`: the root's rows, to each rank its own. The tensors of the others have no rows.
    Scatter {
        /// The rank, in the group, whose rows they are.
        root: usize,
        /// Rows of each rank.
        sizes: Arc<[usize]>,
    },
    /// `(sizes[rank], ..) -> (sizes[0] + sizes[1] + .., ..)`: the ranks' tensors one after the other, on the root; nothing on the others.
    Gather {
        /// The rank, in the group, that gets them.
        root: usize,
        /// Rows of each rank.
        sizes: Arc<[usize]>,
    },
    /// Complete once every rank of the group has started it. Its tensor has no elements.
    Barrier,
    /// An [`AllGather`](Self::AllGather) of what ranks say before they split the group.
    Split,
    /// Sends and receives, all in flight together. It takes the tensors to send and gives the received ones, in the order of the
    /// messages.
    Messages {
        /// What the user called, for the others' messages about it.
        name: &'static str,
        /// The sends and receives.
        messages: Arc<[Message<()>]>,
    },
}

/// A send or a receive; see [`batch_send_recv`](crate::ProcessGroup::batch_send_recv).
///
/// Between two ranks of a group messages arrive in the order in which they were sent. All messages of a batch are in
/// flight together, so two ranks that send to each other in one batch cannot deadlock.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Message<X> {
    /// Sends a tensor. It is copied at the start; the caller may write to it afterwards.
    Send {
        /// What to send; nothing in an [`Operation`], which takes its tensors beside it.
        xs: X,
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

/// A message with the tensor that is to be sent.
pub type P2p<'a> = Message<&'a Tensor>;

impl Operation {
    /// What it is called.
    pub fn name(&self) -> &'static str {
        match self {
            Self::AllReduce(_) => "all_reduce",
            Self::AllGather => "all_gather",
            Self::ReduceScatter(_) => "reduce_scatter",
            Self::Broadcast { .. } => "broadcast",
            Self::AllToAll => "all_to_all",
            Self::Reduce { .. } => "reduce",
            Self::Scatter { .. } => "scatter",
            Self::Gather { .. } => "gather",
            Self::Barrier => "barrier",
            Self::Split => "split",
            Self::Messages { name, .. } => name,
        }
    }

    /// How it combines values, if it does.
    pub fn reduce_op(&self) -> Option<ReduceOp> {
        match self {
            Self::AllReduce(op) | Self::ReduceScatter(op) | Self::Reduce { op, .. } => Some(*op),
            _ => None,
        }
    }

    /// Whether it gives nothing to wait for.
    #[cfg(any(feature = "nccl", feature = "mpi"))]
    pub(crate) fn only_sends(&self) -> bool {
        matches!(self, Self::Messages { .. }) && self.receives().next().is_none()
    }

    /// What it receives as messages, and from which ranks in the group.
    pub(crate) fn receives(&self) -> impl Iterator<Item = (&Shape, DType, usize)> {
        let messages = match self {
            Self::Messages { messages, .. } => &messages[..],
            _ => &[],
        };
        messages.iter().filter_map(|message| match message {
            Message::Send { .. } => None,
            Message::Recv { shape, dtype, src } => Some((shape, *dtype, *src)),
        })
    }

    /// The tensor of an operation that is no messages.
    pub(crate) fn only_tensor<'a>(&self, xs: &'a [Tensor]) -> Result<&'a Tensor> {
        match xs {
            [xs] => Ok(xs),
            _ => Err(argument(format!(
                "{self} takes one tensor, got {}",
                xs.len()
            ))),
        }
    }

    /// On a tensor of what shape ranks must agree for one of them to bring one of `shape`: with all rows if each brings some.
    pub(crate) fn shape_of_all(&self, shape: &Shape) -> Shape {
        match self {
            Self::Scatter { sizes, .. } | Self::Gather { sizes, .. } => {
                with_rows(shape, sizes.iter().sum()).into()
            }
            _ => shape.clone(),
        }
    }

    /// The dims of what it brings to, and gives, `rank` of `world_size` ranks that agree on `shape`.
    fn dims_of(&self, shape: &Shape, world_size: usize, rank: usize) -> [Vec<usize>; 2] {
        let with_rows = |num_rows: usize| with_rows(shape, num_rows);
        let (all, num_rows) = (
            shape.dims().to_vec(),
            shape.dims().first().copied().unwrap_or(1),
        );
        let if_root = |root: usize, dims| if rank == root { dims } else { with_rows(0) };
        match self {
            Self::AllGather | Self::Split => [all, with_rows(num_rows * world_size)],
            Self::ReduceScatter(_) => [all, with_rows(num_rows / world_size)],
            Self::Reduce { root, .. } if rank != *root => [all, vec![0]],
            Self::Scatter { root, sizes } => [if_root(*root, all), with_rows(sizes[rank])],
            Self::Gather { root, sizes } => [with_rows(sizes[rank]), if_root(*root, all)],
            _ => [all.clone(), all],
        }
    }

    /// The number of elements that `rank` of `world_size` ranks, which agree on `shape`, brings to it.
    #[cfg(feature = "mpi")]
    pub(crate) fn input_len(&self, shape: &Shape, world_size: usize, rank: usize) -> usize {
        let [input, _] = self.dims_of(shape, world_size, rank);
        input.iter().product()
    }

    /// The dims of what it gives `rank` of `world_size` ranks, which agree on a tensor of `shape`.
    pub fn output_dims(&self, shape: &Shape, world_size: usize, rank: usize) -> Vec<usize> {
        let [_, output] = self.dims_of(shape, world_size, rank);
        output
    }
}

/// The dims of a shape, but with so many rows, if it has dims.
pub(crate) fn with_rows(shape: &Shape, num_rows: usize) -> Vec<usize> {
    let mut dims = shape.dims().to_vec();
    if let Some(dim) = dims.first_mut() {
        *dim = num_rows;
    }
    dims
}

impl std::fmt::Display for Operation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let name = self.name();
        match self {
            Self::AllReduce(op) | Self::ReduceScatter(op) => write!(f, "{name}({op})"),
            Self::Broadcast { root } => write!(f, "{name}(root {root})"),
            Self::Reduce { op, root } => write!(f, "{name}({op}, root {root})"),
            Self::Scatter { root, sizes } | Self::Gather { root, sizes } => {
                write!(f, "{name}(root {root}, sizes {sizes:?})")
            }
            _ => f.write_str(name),
        }
    }
}
