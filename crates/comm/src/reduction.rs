//! How the values of several ranks become one: which pieces of inputs, in which order, in which type.

pub(crate) mod element;
pub(crate) mod pairwise;
pub(crate) mod plan;
