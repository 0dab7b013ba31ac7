//! Who adds over MPI.

use std::str::FromStr;

use crate::Error;

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

impl MpiReduction {
    fn name(self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::Native => "native",
        }
    }
}

impl std::fmt::Display for MpiReduction {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for MpiReduction {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        [Self::Exact, Self::Native]
            .into_iter()
            .find(|reduction| reduction.name() == name)
            .ok_or_else(|| {
                Error::Argument(format!(
                    "expected exact or native for who adds over MPI, got {name:?}"
                ))
            })
    }
}
