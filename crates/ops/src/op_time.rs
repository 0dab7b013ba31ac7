//! How long an operation took.

/// GPU time of a kernel or product over a profile.
#[derive(Clone, Debug, PartialEq)]
pub struct OpTime {
    /// The kernel's name, or the operation for which cuBLAS multiplied with the product's m x n x k and type: products of
    /// different shapes are kept apart.
    pub op: String,
    /// How often it ran.
    pub num_calls: usize,
    /// Seconds of all calls.
    pub secs: f64,
}
