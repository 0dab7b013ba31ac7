//! What a rank called, as compared across ranks and shown in messages.

use std::panic::Location;
use std::sync::Arc;

use candle_core::{DType, Shape, Tensor};

use crate::error::group_name;
use crate::operation::scope::InScope;
use crate::operation::{Message, Operation};

/// One rank's call: the operation, on what, from where, in which group.
#[derive(Debug, Clone)]
pub(crate) struct Call {
    pub operation: Operation,
    /// Of the tensors that it takes, as far as ranks must agree on them.
    pub kinds: Vec<(DType, Shape)>,
    pub site: &'static Location<'static>,
    /// The group's world ranks, by group rank.
    members: Arc<[usize]>,
    /// The number among the group's collectives, from 0; messages have none.
    pub seq: Option<u64>,
    /// What the rank computes, if it says so; of a message nothing.
    scope: Option<InScope>,
}

impl Call {
    /// A call by the caller of this.
    #[track_caller]
    pub fn new(
        operation: &Operation,
        xs: &[Tensor],
        members: &Arc<[usize]>,
        seq: Option<u64>,
    ) -> Self {
        let kinds = xs.iter();
        let kinds = kinds.map(|xs| (xs.dtype(), operation.shape_of_all(xs.shape())));
        Self {
            operation: operation.clone(),
            kinds: kinds.collect(),
            site: Location::caller(),
            members: members.clone(),
            scope: seq.and_then(|_| InScope::next(members)),
            seq,
        }
    }

    /// The dims of what a collective gives a rank of the group.
    pub fn output_dims(&self, rank: usize) -> Vec<usize> {
        let shape = self.kinds.first().map(|(_, shape)| shape);
        let num_ranks = self.members.len();
        shape.map_or(Vec::new(), |shape| {
            self.operation.output_dims(shape, num_ranks, rank)
        })
    }

    /// Whether two ranks called the same operation on the same kind of tensor for the same part of their work, wherever they did.
    pub fn agrees(&self, other: &Self) -> bool {
        self.operation == other.operation && self.kinds == other.kinds && self.scope == other.scope
    }

    /// Where, in which group, as which operation there.
    pub fn in_group(&self) -> String {
        let number = self.seq.map(|seq| format!(", operation number {seq}"));
        let number = number.unwrap_or_default();
        format!("{self} ({}{number})", group_name(&self.members))
    }

    /// The operation and on what, equal on ranks that agree.
    pub fn what(&self) -> String {
        let operation = &self.operation;
        let what = match (operation, &self.kinds[..]) {
            (Operation::Messages { messages, .. }, _) => {
                format!("{operation}({})", self.describe(messages))
            }
            (Operation::Barrier | Operation::Split, _) | (_, []) => operation.to_string(),
            (_, [(dtype, shape), ..]) => format!("{operation} of {}", kind(*dtype, shape)),
        };
        match &self.scope {
            None => what,
            Some(scope) => format!("{what} ({scope})"),
        }
    }

    /// Messages in words.
    fn describe(&self, messages: &[Message<()>]) -> String {
        let mut sends = self.kinds.iter();
        let entries = messages.iter().map(|message| match message {
            Message::Send { dst, .. } => {
                let kind = sends.next().map(|(dtype, shape)| kind(*dtype, shape));
                let kind = kind.unwrap_or_default();
                format!("send {kind} to rank {}", self.members[*dst])
            }
            Message::Recv { shape, dtype, src } => {
                let kind = kind(*dtype, shape);
                format!("receive {kind} from rank {}", self.members[*src])
            }
        });
        entries.collect::<Vec<_>>().join(", ")
    }
}

impl std::fmt::Display for Call {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} at {}", self.what(), self.site)
    }
}

/// A tensor's dtype and shape, on which the sender and the receiver of a message must agree.
pub(crate) fn kind(dtype: DType, shape: &Shape) -> String {
    format!("{} {:?}", dtype.as_str(), shape.dims())
}
