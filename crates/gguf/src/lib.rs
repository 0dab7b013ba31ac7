//! GGUF files, in which llama.cpp and Ollama have models: written tensor by tensor from any source of [`Weights`], and
//! read. The format: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>.
#![forbid(unsafe_code)]
#![deny(missing_docs)]

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
pub use tensor::{GgufContent, GgufTensor, RowChange};
pub use weights::Weights;
