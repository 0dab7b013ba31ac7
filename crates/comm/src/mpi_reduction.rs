//! Who adds over MPI.

use crate::named::named;

/// Who adds large tensors over MPI. Largest values, and tensors of up to 2 KiB, are always reduced by us.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum MpiReduction {
    /// We do, so that every layout of ranks and hosts gives the same bits.
    #[default]
    Exact,
    /// MPI, by its nonblocking reductions, in whatever order it likes: other layouts, and other versions of MPI, give other bits.
    /// bf16 and f16 travel as f32, twice the bytes, and are rounded once. It takes memory for a copy of the input and one of the
    /// result, both in f32 for bf16 and f16.
    Native,
}

named!(MpiReduction, "for who adds over MPI", Exact "exact", Native "native");
