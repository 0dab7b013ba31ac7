//! What a rank called, as compared across ranks and shown in messages.

use std::panic::Location;
use std::sync::Arc;

use candle_core::{DType, Shape, Tensor};

use crate::error::group_name;
use crate::operation::{Message, Operation};

/// One rank's call: the operation, on what, from where, in which group.
#[derive(Debug, Clone)]
pub(crate) struct Call {
    pub operation: Operation,
    on: On,
    pub site: &'static Location<'static>,
    /// The group's world ranks, by group rank.
    members: Arc<[usize]>,
    /// The number among the group's collectives, from 0; messages have none.
    pub seq: Option<u64>,
}

/// What a call is on, as far as messages show it.
#[derive(Debug, Clone, PartialEq, Eq)]
enum On {
    Nothing,
    Tensor(Shape, DType),
    /// Messages in words, with world ranks.
    Messages(Arc<str>),
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
        let on = match (operation, xs) {
            (Operation::Messages { messages, .. }, _) => {
                On::Messages(describe(messages, xs, members).into())
            }
            (Operation::Barrier | Operation::Split, _) | (_, []) => On::Nothing,
            (_, [xs, ..]) => On::Tensor(xs.shape().clone(), xs.dtype()),
        };
        Self {
            operation: operation.clone(),
            on,
            site: Location::caller(),
            members: members.clone(),
            seq,
        }
    }

    /// Whether two ranks called the same operation on the same kind of tensor, wherever they did.
    pub fn agrees(&self, other: &Self) -> bool {
        self.operation == other.operation && self.on == other.on
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
        match &self.on {
            On::Nothing => operation.to_string(),
            On::Tensor(shape, dtype) => format!("{operation} of {}", kind(*dtype, shape)),
            On::Messages(messages) => format!("{operation}({messages})"),
        }
    }
}

impl std::fmt::Display for Call {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} at {}", self.what(), self.site)
    }
}

/// Messages in words.
fn describe(messages: &[Message], sends: &[Tensor], members: &[usize]) -> String {
    let mut sends = sends.iter();
    let entries = messages.iter().map(|message| match message {
        Message::Send { dst } => {
            let kind = sends.next().map(|xs| kind(xs.dtype(), xs.shape()));
            let kind = kind.unwrap_or_default();
            format!("send {kind} to rank {}", members[*dst])
        }
        Message::Recv { shape, dtype, src } => {
            format!(
                "receive {} from rank {}",
                kind(*dtype, shape),
                members[*src]
            )
        }
    });
    entries.collect::<Vec<_>>().join(", ")
}

/// A tensor's dtype and shape, on which the sender and the receiver of a message must agree.
pub(crate) fn kind(dtype: DType, shape: &Shape) -> String {
    format!("{} {:?}", dtype.as_str(), shape.dims())
}
