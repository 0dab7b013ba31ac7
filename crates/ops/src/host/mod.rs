//! Tensors in host memory, to be read and written, and values on their way into candle's graph.

pub(crate) mod floats;
pub(crate) mod in_place;
pub(crate) mod on_cuda;
pub(crate) mod op_output;
pub(crate) mod values;
pub(crate) mod with_backward;
