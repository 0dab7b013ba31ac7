//! The allocator of the programs, and how much memory they and their ranks have asked for.

pub(crate) mod allocator;
pub(crate) mod counting_allocator;
