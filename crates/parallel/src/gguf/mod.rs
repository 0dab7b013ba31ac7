//! GGUF files, in which llama.cpp and Ollama have models: written tensor by tensor from any source of weights, and read as a
//! [`Checkpoint`](crate::checkpoint::Checkpoint). The format: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>.

mod blocks;
mod file;
mod metadata;
mod reader;
mod tensor;
mod weights;

pub use candle_core::quantized::GgmlDType;
pub use candle_core::quantized::gguf_file::Value as GgufValue;

pub use blocks::type_name;
pub use file::GgufFile;
pub use metadata::GgufMetadata;
pub use reader::GgufReader;
pub(crate) use reader::StoredRows;
pub use tensor::{GgufContent, GgufTensor, RowChange};
pub use weights::{CheckpointWeights, MergedModel, Weights};
