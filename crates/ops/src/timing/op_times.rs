//! Names of operations in a profile, and the time that each took.

use candle_core::DType;
use std::collections::HashMap;
use std::fmt::{Display, Formatter};

/// Time of a kernel, operation or product over a profile.
#[derive(Clone, Debug, PartialEq)]
pub struct OpTime {
    /// The kernel's name, on the CPU the operation's, or that of a linear layer's operation with its product's m x n x k and type:
    /// n rows of m sums of k terms. Products of different shapes are kept apart.
    pub op: String,
    /// How often it ran.
    pub num_calls: usize,
    /// Seconds of all calls.
    pub secs: f64,
}

/// What is timed by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum OpName {
    /// A kernel of a GPU, or an operation on the CPU.
    Named(&'static str),
    /// The operation that multiplied and its product, as cuBLAS counts: the sizes m, n and k and the types of what it reads and
    /// writes. The output has n rows of m values.
    Product(&'static str, [usize; 3], [DType; 2]),
}

impl Display for OpName {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Named(name) => f.write_str(name),
            Self::Product(op, [m, n, k], [from, to]) => {
                write!(f, "{op} {m}x{n}x{k} {}", from.as_str())?;
                match from == to {
                    true => Ok(()),
                    false => write!(f, " to {}", to.as_str()),
                }
            }
        }
    }
}

/// Number and seconds of the calls of each operation.
#[derive(Debug, Default)]
pub(crate) struct OpTimes(HashMap<OpName, (usize, f64)>);

impl OpTimes {
    /// Adds a call.
    pub(crate) fn add(&mut self, op: OpName, secs: f64) {
        let (num_calls, total_secs) = self.0.entry(op).or_default();
        *num_calls += 1;
        *total_secs += secs;
    }

    /// In no order.
    pub(crate) fn into_vec(self) -> Vec<OpTime> {
        let time = |(op, (num_calls, secs)): (OpName, _)| OpTime {
            op: op.to_string(),
            num_calls,
            secs,
        };
        self.0.into_iter().map(time).collect()
    }
}
