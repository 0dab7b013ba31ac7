//! What a rank computes when it calls a collective: compared across ranks, as the operation, shape and dtype are.
//!
//! A rank that leaves out the collective of one part of its work, because it has no rows for it, would meet the next part's of the other
//! ranks, and if shape and dtype are the same, numbers that have nothing to do with each other would be added.

use std::cell::Cell;
use std::fmt;

/// A part of a rank's work, by the same name on every rank of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Scope {
    /// What is done, `backward pass` for example.
    pub what: &'static str,
    /// The block of the model that it is done for.
    pub block: usize,
    /// How many such parts came before.
    pub number: u64,
}

/// A collective's place in a scope.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct InScope {
    scope: Scope,
    /// Collectives of the scope before it.
    number: u64,
}

thread_local! {
    static CURRENT: Cell<Option<InScope>> = const { Cell::new(None) };
}

impl Scope {
    /// Does `work`, whose collectives on this thread belong to the scope, and gives their number, too. Ranks whose collectives meet and
    /// belong to different scopes, or to different places in one, get an [`Error::Mismatch`](crate::Error::Mismatch): on threads and over
    /// MPI always, over NCCL where collectives are compared.
    pub fn run<T>(self, work: impl FnOnce() -> T) -> (T, u64) {
        /// Puts back what was before, also after a panic.
        struct Restore(Option<InScope>);
        impl Drop for Restore {
            fn drop(&mut self) {
                CURRENT.set(self.0);
            }
        }
        let begin = InScope {
            scope: self,
            number: 0,
        };
        let _restore = Restore(CURRENT.replace(Some(begin)));
        let result = work();
        let number = CURRENT.get().map_or(0, |end| end.number);
        (result, number)
    }
}

impl InScope {
    /// That of a collective which starts now.
    pub fn next() -> Option<Self> {
        let now = CURRENT.get()?;
        CURRENT.set(Some(Self {
            number: now.number + 1,
            ..now
        }));
        Some(now)
    }
}

impl fmt::Display for InScope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            scope:
                Scope {
                    what,
                    block,
                    number: pass,
                },
            number,
        } = self;
        write!(f, "{what} {pass} of block {block}, collective {number}")
    }
}
