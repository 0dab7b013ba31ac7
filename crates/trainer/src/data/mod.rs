//! Data sets: which files, which records, and their token ids.
//!
//! [`Data`] is what `--data` names; its files hold [`Record`]s, which a [`RecordEncoder`] makes [`Tokens`] of.

mod alpaca;
mod columns;
mod conversation_record;
mod csv_rows;
mod data_file;
mod data_files;
mod data_spec;
mod encode_data;
mod file_records;
mod json_document;
mod overlong;
#[cfg(feature = "parquet")]
mod parquet_rows;
mod preferences;
mod record;
mod record_encoder;
mod record_fields;
mod record_location;
mod report;
mod token_cache;
mod token_index;
mod tokens;
mod tokens_writer;

pub use columns::Columns;
pub(crate) use data_file::BOM;
pub use data_files::Data;
pub use data_spec::DataSpec;
pub use overlong::Overlong;
pub use record::{Record, RecordFormat};
pub use record_encoder::{EncodedRecord, EncoderConfig, RecordEncoder};
pub use report::{DataReport, SkippedRecords};
pub use token_cache::TokenCache;
pub(crate) use token_index::IndexEntry;
pub use token_index::RecordKind;
pub use tokens::Tokens;
