//! From files to micro-batches: data sets, chat templates, tokenizers, packing, and the hub that has them.
//!
//! Data flows one way: [`Data`] -> [`Tokens`] -> [`Samples`] -> [`Batches`] -> micro-batches. Beside it stand what is needed on the way:
//! [`hub`], [`Tokenizer`] and [`ChatTemplate`].

#![forbid(unsafe_code)]

pub mod hub;

mod activity;
mod chat;
mod file_format;
mod gguf;
mod guarded;
mod json_file;
mod own_lock;
mod record_error;
mod records;
mod sequences;
mod tokens;
mod vocabulary;
mod words;

pub use activity::Activity;
pub use chat::{Chat, ChatTemplate, Rendered, TemplateFit, TemplateKwargs};
pub use gguf::{GgufVocab, gguf_vocab};
pub use record_error::RecordError;
pub use records::{Columns, Data, DataReport, DataSpec, Record, RecordFormat, SkippedRecords};
pub use sequences::{
    BatchConfig, BatchRamp, Batches, DataPosition, EvalBatches, Filling, Overlong, Sample,
    SampleConfig, Samples, TrainingData,
};
pub use tokens::{EncodedRecord, EncoderConfig, RecordEncoder, RecordKind, TokenCache, Tokens};
pub use vocabulary::Tokenizer;
pub use words::counted;
