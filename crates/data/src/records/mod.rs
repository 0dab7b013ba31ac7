//! Data sets: which files, and which records are in them.
//!
//! [`Data`] is what `--data` names; its files hold [`Record`]s, whatever their format.

mod alpaca;
pub(crate) mod columns;
mod conversation_record;
mod csv_rows;
mod data_file;
mod data_files;
mod data_spec;
pub(crate) mod file_records;
mod json_document;
#[cfg(feature = "parquet")]
mod parquet_rows;
mod preferences;
pub(crate) mod record;
mod record_fields;
pub(crate) mod record_location;
pub(crate) mod report;

pub use columns::Columns;
pub use data_files::Data;
pub use data_spec::DataSpec;
pub use record::{Record, RecordFormat};
pub use report::{DataReport, SkippedRecords};
