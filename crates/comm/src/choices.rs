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

#[cfg(test)]
mod tests {
    use super::HalfSums;
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
        let wrong = "".parse::<HalfSums>().map_err(said);
        let expected = r#"expected f32 or native for sums of half precision, got """#;
        assert_eq!(wrong, Err(expected.to_string()));
    }
}
