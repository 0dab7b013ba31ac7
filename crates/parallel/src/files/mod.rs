//! Files of weights and of text, as they are read; whether there is room for more, and what goes again if the process
//! is ended.

mod free_space;
mod leftovers;
mod mapped_file;
mod plain_file;
mod reader;

pub(crate) use free_space::is_in_memory;
pub use free_space::{SpaceNeed, check_free_space, size_in_words};
pub(crate) use leftovers::named;
pub use leftovers::{Leftover, remove_leftovers};
pub(crate) use mapped_file::MappedFile;
pub use mapped_file::end_when_a_file_is_cut;
pub use plain_file::{check_file, open_file, read_file, read_text_file};
pub(crate) use reader::decode;
pub use reader::{Checkpoint, INDEX_FILE, TensorEntry, WEIGHTS_FILE};
