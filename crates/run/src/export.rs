//! Models in the files of other programs.

pub(crate) mod generation_config;
pub(crate) mod gguf;
pub(crate) mod modelfile;
