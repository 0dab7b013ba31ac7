//! How long an operation took.

/// GPU time of a kernel or product over a profile.
#[derive(Clone, Debug, PartialEq)]
pub struct OpTime {
    /// The kernel's name, or that of the operation for which cuBLAS multiplied.
    pub op: &'static str,
    /// How often it ran.
    pub num_calls: usize,
    /// Seconds of all calls.
    pub secs: f64,
}
