//! Environment variables read as numbers, with errors that name them.

use crate::{Error, Result};

/// The environment, or a test's stand-in for it.
pub(super) struct Variables<'a> {
    lookup: &'a dyn Fn(&str) -> Option<String>,
}

impl<'a> Variables<'a> {
    pub(super) fn new(lookup: &'a dyn Fn(&str) -> Option<String>) -> Self {
        Self { lookup }
    }

    pub(super) fn get(&self, name: &str) -> Option<String> {
        (self.lookup)(name)
    }

    pub(super) fn is_set(&self, name: &str) -> bool {
        self.get(name).is_some()
    }

    /// The number in a variable, if it is set.
    pub(super) fn number(&self, name: &str) -> Result<Option<usize>> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        match value.trim().parse() {
            Ok(number) => Ok(Some(number)),
            Err(_) => Err(Error::Environment(format!(
                "{name}: expected a whole number, got {value:?}"
            ))),
        }
    }

    /// The port in a variable, if it is set.
    pub(super) fn port(&self, name: &str) -> Result<Option<u16>> {
        let Some(value) = self.get(name) else {
            return Ok(None);
        };
        match value.trim().parse() {
            Ok(port) if port > 0 => Ok(Some(port)),
            _ => Err(Error::Environment(format!(
                "{name}: expected a port from 1 to 65535, got {value:?}"
            ))),
        }
    }

    /// The first of these variables that is set, with its number.
    pub(super) fn first_number<'n>(&self, names: &[&'n str]) -> Result<Option<(&'n str, usize)>> {
        for name in names {
            if let Some(number) = self.number(name)? {
                return Ok(Some((name, number)));
            }
        }
        Ok(None)
    }
}
