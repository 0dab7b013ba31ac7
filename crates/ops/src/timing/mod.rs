//! Time of operations on the CPU, which begin here.

pub(crate) mod awake;
pub(crate) mod op_timer;
pub(crate) mod op_times;
