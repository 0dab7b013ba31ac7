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

    /// Those of a table that do nothing: whether each does, the flag, the flags that decide it, and why.
    pub fn of<const N: usize>(
        rules: [(bool, &'static str, &'static [&'static str], &'static str); N],
    ) -> Vec<Self> {
        let idle = rules.into_iter().filter(|(is_idle, ..)| *is_idle);
        idle.map(|(_, flag, by, why)| Self { flag, by, why })
            .collect()
    }
}
