//! Environment variables read as numbers, with errors that name them.

use std::str::FromStr;

use crate::{Error, Result};

/// A number and the variable it came from.
pub(super) type Named<'n> = (&'n str, usize);

/// The environment, or a test's stand-in for it.
pub(super) struct Variables<'a>(pub(super) &'a dyn Fn(&str) -> Option<String>);

impl Variables<'_> {
    /// The value of a variable that is set, to something.
    pub(super) fn get(&self, name: &str) -> Option<String> {
        self.even_empty(name)
            .filter(|value| !value.trim().is_empty())
    }

    /// The value of a variable that is set, to nothing too.
    pub(super) fn even_empty(&self, name: &str) -> Option<String> {
        (self.0)(name)
    }

    pub(super) fn is_set(&self, name: &str) -> bool {
        self.get(name).is_some()
    }

    /// The value of the first of these variables that is set.
    pub(super) fn first(&self, names: &[&str]) -> Option<String> {
        names.iter().find_map(|name| self.get(name))
    }

    /// The number in a variable, if it is set.
    pub(super) fn number(&self, name: &str) -> Result<Option<usize>> {
        self.parsed(name, "a whole number")
    }

    /// The port in a variable, if it is set.
    pub(super) fn port(&self, name: &str) -> Result<Option<u16>> {
        let port: Option<std::num::NonZero<u16>> = self.parsed(name, "a port from 1 to 65535")?;
        Ok(port.map(Into::into))
    }

    fn parsed<T: FromStr>(&self, name: &str, expected: &str) -> Result<Option<T>> {
        let parse = |value: String| {
            value.trim().parse().map_err(|_| {
                Error::Environment(format!("{name}: expected {expected}, got {value:?}"))
            })
        };
        self.get(name).map(parse).transpose()
    }

    /// The first of these variables that is set, with its number.
    pub(super) fn first_number<'n>(&self, names: &[&'n str]) -> Result<Option<Named<'n>>> {
        for name in names {
            if let Some(number) = self.number(name)? {
                return Ok(Some((name, number)));
            }
        }
        Ok(None)
    }

    /// The number in the first of `names` that is set; an error if none is, though `other` is.
    pub(super) fn required<'n>(&self, names: &[&'n str], other: &str) -> Result<Named<'n>> {
        self.first_number(names)?.ok_or_else(|| {
            Error::Environment(format!(
                "{} is not set, but {other} is\n\
                 hint: start the program by a launcher (candle-train launch, torchrun, mpirun, srun), which sets them all, \
                 or unset {other} for a run of one process",
                names.join(" or ")
            ))
        })
    }
}
