//! Bytes that are held, moment after moment.

use crate::memory::{MemoryCategory, MemoryReport, MemoryUse};
use crate::schedule::Instruction;

/// What is held in a part of a step.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Moment {
    /// What is done; `None`: sums and the update after the passes, and what a rank holds before its first step.
    pub instruction: Option<Instruction>,
    /// Bytes of each category: at its end, and the most.
    pub report: MemoryReport,
    /// The most bytes of all categories that are memory of the device at a time.
    pub peak: u64,
}

/// What is held now, and the most since the moment began.
#[derive(Default)]
pub(super) struct PlannedBytes {
    now: [u64; MemoryCategory::ALL.len()],
    most: [u64; MemoryCategory::ALL.len()],
    most_of_all: u64,
}

impl PlannedBytes {
    pub fn hold(&mut self, category: MemoryCategory, bytes: usize) {
        let place = category as usize;
        self.now[place] += bytes as u64;
        self.most[place] = self.most[place].max(self.now[place]);
        self.most_of_all = self.most_of_all.max(self.on_device());
    }

    fn on_device(&self) -> u64 {
        let categories = MemoryCategory::ALL.into_iter();
        let on_device = categories.filter(|category| category.is_on_device());
        on_device.map(|category| self.now[category as usize]).sum()
    }

    /// Of bytes that are held.
    pub fn free(&mut self, category: MemoryCategory, bytes: usize) {
        let now = &mut self.now[category as usize];
        *now = now.saturating_sub(bytes as u64);
    }

    /// Ends a moment.
    pub fn moment(&mut self, instruction: Option<Instruction>) -> Moment {
        let (now, most) = (self.now, self.most);
        let moment = Moment {
            instruction,
            report: MemoryReport::new(|category| MemoryUse {
                now: now[category as usize],
                peak: most[category as usize],
            }),
            peak: self.most_of_all,
        };
        self.most = now;
        self.most_of_all = self.on_device();
        moment
    }
}
