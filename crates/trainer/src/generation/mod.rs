//! A model continues a text.

mod continuation;
mod sampler;

pub use continuation::{GenerateConfig, generate};
pub use sampler::{Sampler, SamplingConfig};
