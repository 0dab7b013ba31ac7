//! GGUF files, of the crate candle-gguf, and the weights that go into them.

pub use candle_gguf::{
    GgmlDType, GgufContent, GgufFile, GgufMetadata, GgufReader, GgufTensor, GgufValue, RowChange,
    Weights, type_name,
};

pub use crate::checkpoint::weights::{CheckpointWeights, MergedModel};
