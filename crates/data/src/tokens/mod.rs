//! Token ids of a data set: what a [`RecordEncoder`] makes of its records, kept in a [`TokenCache`].

mod encode_data;
mod record_encoder;
mod token_cache;
mod token_file;
mod token_index;
mod token_list;

pub use record_encoder::{EncodedRecord, EncoderConfig, RecordEncoder};
pub use token_cache::TokenCache;
pub(crate) use token_index::IndexEntry;
pub use token_index::RecordKind;
pub use token_list::Tokens;
