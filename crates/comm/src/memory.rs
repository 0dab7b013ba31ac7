//! Tensors as memory: on which device it is, its bytes, and which thread allocated it.

pub(crate) mod adopted;
pub(crate) mod bytes;
pub(crate) mod device;
