//! The memory that a rank holds, and that there is.

mod available_memory;
pub(crate) mod memory_report;

pub use memory_report::{
    LESS_MEMORY_HINT, check_memory, explain_out_of_memory, memory_in_words, memory_left,
    peaks_in_words,
};
