//! How a reduction combines the values of the ranks.

/// How a reduction combines the values of the ranks, elementwise and in rank order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ReduceOp {
    /// The sum. bf16 and f16 are accumulated in f32 and rounded once; integers wrap.
    Sum,
    /// The largest value. A NaN on any rank gives NaN.
    Max,
}

impl std::fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Sum => "sum",
            Self::Max => "max",
        })
    }
}
