//! Files of weights and of text, as they are read.

mod mapped_file;
mod plain_file;
mod reader;

pub(crate) use mapped_file::MappedFile;
pub use mapped_file::end_when_a_file_is_cut;
pub use plain_file::{check_file, open_file, read_file, read_text_file};
pub(crate) use reader::decode;
pub use reader::{Checkpoint, INDEX_FILE, TensorEntry, WEIGHTS_FILE};
