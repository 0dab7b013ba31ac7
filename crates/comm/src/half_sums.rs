//! How sums of half-precision values are made where the backend would round after each addition.

use crate::named::named;

/// How NCCL adds bf16 and f16, whose own sums it rounds after each addition. Threads and MPI add them in f32 and send them as they
/// are: there is nothing to choose.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum HalfSums {
    /// In f32, rounded once: they travel as f32, 4 bytes a value.
    #[default]
    F32,
    /// As NCCL adds them, rounded after each addition: they travel as they are, 2 bytes a value. The error grows with the number
    /// of ranks; f16 may overflow on the way.
    Native,
}

named!(HalfSums, "for sums of half precision", F32 "f32", Native "native");
