//! How sums of half-precision values are made where the backend would round after each addition.

use std::str::FromStr;

use crate::Error;

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

impl HalfSums {
    fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Native => "native",
        }
    }
}

impl std::fmt::Display for HalfSums {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for HalfSums {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        [Self::F32, Self::Native]
            .into_iter()
            .find(|sums| sums.name() == name)
            .ok_or_else(|| {
                Error::Argument(format!(
                    "expected f32 or native for sums of half precision, got {name:?}"
                ))
            })
    }
}
