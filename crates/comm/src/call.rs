//! What a rank called, as compared across ranks and shown in messages.

use std::panic::Location;
use std::sync::Arc;

use candle_core::{DType, Shape};

use crate::{P2p, ReduceOp};

/// An operation and the arguments that all ranks must agree on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Operation {
    AllReduce(ReduceOp),
    AllGather,
    ReduceScatter(ReduceOp),
    Broadcast {
        root: usize,
    },
    AllToAll,
    Barrier,
    Split,
    /// Sends and receives, described.
    Batch(Arc<str>),
}

impl std::fmt::Display for Operation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::AllReduce(op) => write!(f, "all_reduce({op})"),
            Self::AllGather => f.write_str("all_gather"),
            Self::ReduceScatter(op) => write!(f, "reduce_scatter({op})"),
            Self::Broadcast { root } => write!(f, "broadcast(root {root})"),
            Self::AllToAll => f.write_str("all_to_all"),
            Self::Barrier => f.write_str("barrier"),
            Self::Split => f.write_str("split"),
            Self::Batch(what) => write!(f, "batch_send_recv({what})"),
        }
    }
}

/// One rank's call: the operation, on what, from where.
#[derive(Debug, Clone)]
pub(crate) struct Call {
    pub operation: Operation,
    pub tensor: Option<(Shape, DType)>,
    pub site: &'static Location<'static>,
}

impl Call {
    /// Whether two ranks called the same operation on the same kind of tensor, wherever they did.
    pub fn agrees(&self, other: &Self) -> bool {
        self.operation == other.operation && self.tensor == other.tensor
    }

    /// The operation and on what, equal on ranks that agree.
    pub fn what(&self) -> String {
        match &self.tensor {
            None => self.operation.to_string(),
            Some((shape, dtype)) => {
                let dtype = dtype.as_str();
                format!("{} of {dtype} {:?}", self.operation, shape.dims())
            }
        }
    }
}

impl std::fmt::Display for Call {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} at {}", self.what(), self.site)
    }
}

/// A batch in words, with world ranks.
pub(crate) fn describe(ops: &[P2p<'_>], members: &[usize]) -> String {
    let entries: Vec<String> = ops
        .iter()
        .map(|op| match op {
            P2p::Send { xs, dst } => format!(
                "send {} {:?} to rank {}",
                xs.dtype().as_str(),
                xs.dims(),
                members[*dst]
            ),
            P2p::Recv { shape, dtype, src } => {
                format!(
                    "receive {} {:?} from rank {}",
                    dtype.as_str(),
                    shape.dims(),
                    members[*src]
                )
            }
        })
        .collect();
    entries.join(", ")
}
