//! What a rank computes when it calls a collective: compared across ranks, as the operation, shape and dtype are.
//!
//! A rank that leaves out the collective of one part of its work, because it has no rows for it, would meet the next part's of the other
//! ranks, and if shape and dtype are the same, numbers that have nothing to do with each other would be added.

use std::cell::Cell;
use std::fmt;
use std::sync::Arc;

use crate::ProcessGroup;

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

/// The scope of a thread, and where the list of the group's members lies, which clones of the group share.
#[derive(Clone, Copy)]
struct Current {
    next: InScope,
    members: usize,
}

thread_local! {
    static CURRENT: Cell<Option<Current>> = const { Cell::new(None) };
}

impl Scope {
    /// Does `work`, whose collectives of `group` on this thread belong to the scope, and counts these. Ranks whose collectives meet and
    /// belong to different scopes, or to different places in one, get an [`Error::Mismatch`](crate::Error::Mismatch): on threads and
    /// over MPI always, over NCCL where collectives are compared.
    pub fn run<T>(self, group: &ProcessGroup, work: impl FnOnce() -> T) -> (T, u64) {
        /// Puts back what was before, also after a panic.
        struct Restore(Option<Current>);
        impl Drop for Restore {
            fn drop(&mut self) {
                CURRENT.set(self.0);
            }
        }
        let begin = Current {
            next: InScope {
                scope: self,
                number: 0,
            },
            members: group.members.as_ptr().addr(),
        };
        let _restore = Restore(CURRENT.replace(Some(begin)));
        let result = work();
        let number = CURRENT.get().map_or(0, |end| end.next.number);
        (result, number)
    }

    /// Whether a collective of `group` that starts now on this thread belongs to a scope.
    pub fn covers(group: &ProcessGroup) -> bool {
        let members = group.members.as_ptr().addr();
        CURRENT.get().is_some_and(|now| now.members == members)
    }
}

impl InScope {
    /// That of a collective which starts now, of the group of these members; `None` if it belongs to no scope.
    pub fn next(members: &Arc<[usize]>) -> Option<Self> {
        let now = CURRENT.get()?;
        if now.members != members.as_ptr().addr() {
            return None;
        }
        let mut then = now;
        then.next.number += 1;
        CURRENT.set(Some(then));
        Some(now.next)
    }
}

impl fmt::Display for InScope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (
            place,
            Scope {
                what,
                block,
                number,
            },
        ) = (self.number, self.scope);
        write!(f, "{what} {number} of block {block}, collective {place}")
    }
}
