//! What can go wrong between ranks, and how messages name ranks.

/// What can go wrong between ranks. Rank numbers are those of the world unless a group is named.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument that this rank alone can tell is wrong.
    #[error("{0}")]
    Argument(String),

    /// The library under a backend (MPI, NCCL) refused a call, or moved other bytes than asked for.
    #[error("{0}")]
    Backend(String),

    /// A message cannot be sent, or does not come.
    #[error("{0}")]
    Mail(String),

    /// Two ranks called different operations where the same one is needed.
    #[error(
        "ranks disagree in {group}, operation number {seq}:\n  rank {}: {}\n  rank {}: {}\nhint: every rank of a group \
         must call the same operations in the same order, with the same shape and dtype; what saves, evaluates or gathers is every \
         rank's call, not that of one (`if rank == 0`)",
        first.0, first.1, second.0, second.1
    )]
    Mismatch {
        /// The group's name.
        group: String,
        /// The operation's number in the group, from 0.
        seq: u64,
        /// One rank and what it called, where.
        first: (usize, String),
        /// Another rank and what it called, where.
        second: (usize, String),
    },

    /// A received message is not what the receiver asked for.
    #[error(
        "a message does not match its receive, in {group}:\n  rank {}: {}\n  rank {}: {}\nhint: messages between two \
         ranks arrive in the order in which they were sent",
        sender.0, sender.1, receiver.0, receiver.1
    )]
    MessageMismatch {
        /// The group's name.
        group: String,
        /// The sending rank and what it sent, where.
        sender: (usize, String),
        /// The receiving rank and what it asked for, where.
        receiver: (usize, String),
    },

    /// A rank failed by itself or panicked: the root cause of a failed run.
    #[error("rank {rank} failed: {message}")]
    RankFailed {
        /// The rank.
        rank: usize,
        /// Its error or panic message.
        message: String,
    },

    /// All ranks failed by themselves, with the same message.
    #[error("{message}")]
    AllRanksFailed {
        /// Their error or panic message.
        message: String,
    },

    /// An operation cannot complete because another rank failed.
    #[error("{call} on rank {waiting} cannot complete: rank {rank} failed: {message}")]
    PeerFailed {
        /// The rank that reports this.
        waiting: usize,
        /// Its call, and where that is in the source.
        call: String,
        /// The rank that failed.
        rank: usize,
        /// That rank's error or panic message.
        message: String,
    },

    /// An operation cannot complete because another rank returned without taking part.
    #[error(
        "{call} on rank {waiting} cannot complete: rank {rank} has left (it returned without taking part)\n{report}\n\
         hint: every rank of a group must call the same operations in the same order"
    )]
    PeerLeft {
        /// The rank that reports this.
        waiting: usize,
        /// Its call, and where that is in the source.
        call: String,
        /// The rank that left.
        rank: usize,
        /// Each rank's last operation.
        report: String,
    },

    /// Ranks wait for each other in different groups.
    #[error(
        "{call} on rank {waiting} cannot complete: {ranks} wait for each other in different groups\n{report}\nhint: every rank \
         must call the same operations in the same order; what saves, evaluates or gathers is every rank's call, not that of one \
         (`if rank == 0`)"
    )]
    Deadlock {
        /// The rank that reports this.
        waiting: usize,
        /// Its call, and where that is in the source.
        call: String,
        /// The ranks.
        ranks: String,
        /// Each rank's last operation.
        report: String,
    },

    /// A wait lasted longer than the deadline.
    #[error(
        "{call} on rank {waiting} is not complete after {secs} s: not arrived: {missing}\n{report}\nhint: a rank may be \
         stuck, or the ranks call operations in different orders (what saves, evaluates or gathers is every rank's call); a slow machine \
         may need a longer deadline"
    )]
    Deadline {
        /// The rank that reports this.
        waiting: usize,
        /// Its call, and where that is in the source.
        call: String,
        /// The deadline in seconds.
        secs: f64,
        /// The ranks that have not arrived.
        missing: String,
        /// Each rank's last operation.
        report: String,
    },
}

/// What candle says went wrong in a backend.
#[cfg(feature = "mpi")]
impl From<candle_core::Error> for Error {
    fn from(error: candle_core::Error) -> Self {
        Self::Backend(message_of(&error))
    }
}

impl From<Error> for candle_core::Error {
    /// Wraps the error without a backtrace: messages name the call sites on all ranks already.
    fn from(error: Error) -> Self {
        candle_core::Error::Wrapped(Box::new(error))
    }
}

/// The error about an argument that this rank alone can tell is wrong.
pub(crate) fn argument(message: impl Into<String>) -> candle_core::Error {
    Error::Argument(message.into()).into()
}

/// The sentences of an error without the backtraces that candle adds when RUST_BACKTRACE is set: outermost context first,
/// one line each.
pub fn message_of(error: &candle_core::Error) -> String {
    match error {
        candle_core::Error::WithBacktrace { inner, .. } => message_of(inner),
        candle_core::Error::Context { inner, context } => {
            format!("{context}\n{}", message_of(inner))
        }
        candle_core::Error::WithPath { inner, path } => {
            format!("path: {path:?} {}", message_of(inner))
        }
        other => other.to_string(),
    }
}

/// A group's name: the world, or its ranks.
pub(crate) fn group_name(members: &[usize]) -> String {
    format!("group {members:?}")
}

/// Ranks as words: "rank 2", "ranks 1, 3".
pub(crate) fn rank_list(ranks: &[usize]) -> String {
    let names: Vec<String> = ranks.iter().map(ToString::to_string).collect();
    match ranks {
        [] => "nobody (all ranks are there, the result is being computed)".to_string(),
        [rank] => format!("rank {rank}"),
        _ => format!("ranks {}", names.join(", ")),
    }
}
