//! Choices that users make by name.

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
                    _ => Err($crate::named::unknown(&[$($name),+], $choice, name)),
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

#[cfg(test)]
mod tests {
    use crate::{Backend, HalfSums, MpiReduction};

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
