//! Choices that users make by name, among them how sums are made where a backend would make them otherwise than the others.

/// Gives an enum's variants their names: [`Display`](std::fmt::Display), and [`FromStr`](std::str::FromStr) with an error that lists them.
/// `$choice` follows the list in that.
macro_rules! named {
    ($type:ident, $choice:literal, $($variant:ident $name:literal),+) => {
        impl std::fmt::Display for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(match self {
                    $(Self::$variant => $name,)+
                })
            }
        }

        impl std::str::FromStr for $type {
            type Err = crate::Error;

            fn from_str(name: &str) -> Result<Self, crate::Error> {
                match name {
                    $($name => Ok(Self::$variant),)+
                    _ => Err($crate::choices::unknown(&[$($name),+], $choice, name)),
                }
            }
        }
    };
}
pub(crate) use named;

/// The error about a name that is none of these.
pub(crate) fn unknown(names: &[&str], choice: &str, got: &str) -> crate::Error {
    let (last, first) = names.split_last().unwrap_or((&"nothing", &[]));
    let first = first.join(", ");
    crate::Error::Argument(format!("expected {first} or {last} {choice}, got {got:?}"))
}

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

/// Who adds large tensors over MPI. Largest values, and tensors of up to 2 KiB, are always reduced by us.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
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

#[cfg(test)]
mod tests {
    use super::{HalfSums, MpiReduction};
    use crate::Backend;

    #[test]
    fn names_are_read_as_they_are_written() {
        for backend in [Backend::Local, Backend::Mpi, Backend::Nccl] {
            assert_eq!(backend.to_string().parse().ok(), Some(backend));
        }
        let said = |error: crate::Error| error.to_string();
        let wrong = "MPI".parse::<Backend>().map_err(said);
        let expected = r#"expected local, mpi or nccl as backend, got "MPI""#;
        assert_eq!(wrong, Err(expected.to_string()));
        assert_eq!("native".parse().ok(), Some(HalfSums::Native));
        let wrong = "".parse::<MpiReduction>().map_err(said);
        let expected = r#"expected exact or native for who adds over MPI, got """#;
        assert_eq!(wrong, Err(expected.to_string()));
    }
}
