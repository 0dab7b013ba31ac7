//! Flags that would do nothing beside the others of a run: they are refused, not ignored.

use candle_core::{Result, bail};

/// A flag that would do nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Idle {
    /// The flag, without its dashes.
    pub flag: &'static str,
    /// The flags that decide it.
    pub by: &'static [&'static str],
    /// What follows "is given".
    pub why: &'static str,
}

impl Idle {
    /// One of these, if there is any.
    ///
    /// # Errors
    /// Its flag, and why it does nothing.
    pub fn refuse(idle: &[Self]) -> Result<()> {
        match idle.first() {
            None => Ok(()),
            Some(Self { flag, why, .. }) => bail!("--{flag} is given {why}"),
        }
    }

    /// Those of these flags that are given, where all of them would do nothing for the same reason.
    pub(crate) fn each<const N: usize>(
        by: &'static [&'static str],
        why: &'static str,
        flags: [(&'static str, bool); N],
    ) -> Vec<Self> {
        let given = flags.into_iter().filter(|(_, is_given)| *is_given);
        given.map(|(flag, _)| Self { flag, by, why }).collect()
    }

    /// Those of a table of flags, of what decides each, of whether it does nothing, and of why.
    pub(crate) fn of<const N: usize>(
        rules: [(bool, &'static str, &'static [&'static str], &'static str); N],
    ) -> Vec<Self> {
        let idle = rules.into_iter().filter(|(is_idle, ..)| *is_idle);
        idle.map(|(_, flag, by, why)| Self { flag, by, why })
            .collect()
    }
}
