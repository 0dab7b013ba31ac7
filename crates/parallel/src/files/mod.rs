//! Files of weights and of text, as they are read.

mod plain_file;
mod reader;

pub use plain_file::{check_file, open_file, read_file, read_text_file};
pub use reader::{Checkpoint, INDEX_FILE, TensorEntry, WEIGHTS_FILE};
pub(crate) use reader::{decode, map};
