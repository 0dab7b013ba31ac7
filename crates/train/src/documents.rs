//! Text to train on: a `.txt` file is one document, a folder is all its `.txt` files.

use std::fs;
use std::path::{Path, PathBuf};

use candle_core::{Result, bail};

/// The documents of a data set, in a fixed order.
#[derive(Clone, Debug)]
pub struct Documents {
    texts: Vec<String>,
}

impl Documents {
    /// Reads `path`: a UTF-8 `.txt` file, which is one document, or a folder, whose `.txt` files are one document each, in
    /// the order of their names. Subfolders are not entered.
    ///
    /// Line endings become `\n`, whether they are `\r\n` or `\r`, as when Python reads a text file: so the token ids are those
    /// that a Python script gets. Nothing else is changed, nothing is trimmed.
    ///
    /// # Errors
    /// `path` is missing, is a file with another ending, or a folder without `.txt` files; a file cannot be read, is not
    /// UTF-8 (the error says at which byte), is empty or holds white space only.
    pub fn read(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let files = match fs::metadata(path) {
            Ok(metadata) if metadata.is_dir() => text_files(path)?,
            Ok(_) if is_text_file(path) => vec![path.to_path_buf()],
            Ok(_) => bail!(
                "data {path:?} is not a .txt file\nhint: give a UTF-8 text file that ends in .txt, or a folder of them"
            ),
            Err(e) => bail!(
                "cannot open data {path:?}: {e}\nhint: give a UTF-8 text file that ends in .txt, or a folder of them"
            ),
        };
        let texts = files
            .iter()
            .map(|file| read_text(file))
            .collect::<Result<_>>()?;
        Ok(Self { texts })
    }

    /// Documents that are in memory already.
    pub fn from_texts(texts: Vec<String>) -> Self {
        Self { texts }
    }

    /// The documents' texts, in order.
    pub fn iter(&self) -> impl Iterator<Item = &str> + Clone + Send {
        self.texts.iter().map(String::as_str)
    }

    /// Number of documents.
    pub fn len(&self) -> usize {
        self.texts.len()
    }

    /// True without any document.
    pub fn is_empty(&self) -> bool {
        self.texts.is_empty()
    }

    /// Size of all texts together, in bytes of UTF-8 with the line endings that [`Self::read`] leaves.
    pub fn num_bytes(&self) -> usize {
        self.texts.iter().map(String::len).sum()
    }
}

fn is_text_file(path: &Path) -> bool {
    path.extension()
        .is_some_and(|ending| ending.eq_ignore_ascii_case("txt"))
}

/// The `.txt` files directly in `dir`, sorted by name.
fn text_files(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(e) => bail!("cannot list the data folder {dir:?}: {e}"),
    };
    for entry in entries {
        match entry {
            Ok(entry) => files.push(entry.path()),
            Err(e) => bail!("cannot list the data folder {dir:?}: {e}"),
        }
    }
    files.retain(|file| is_text_file(file) && file.is_file());
    if files.is_empty() {
        bail!(
            "the data folder {dir:?} has no .txt file\nhint: only files directly in the folder are read, not those in its subfolders"
        );
    }
    files.sort();
    Ok(files)
}

fn read_text(file: &Path) -> Result<String> {
    let bytes = match fs::read(file) {
        Ok(bytes) => bytes,
        Err(e) => bail!("cannot read data file {file:?}: {e}"),
    };
    let num_bytes = bytes.len();
    let text = match String::from_utf8(bytes) {
        Ok(text) => text,
        Err(e) => bail!(
            "data file {file:?} is not UTF-8: invalid byte at offset {} of {num_bytes}\nhint: convert it, e.g. with iconv -t UTF-8",
            e.utf8_error().valid_up_to()
        ),
    };
    if text.is_empty() {
        bail!("data file {file:?} is empty");
    }
    if text.trim().is_empty() {
        bail!("data file {file:?} holds nothing but white space ({num_bytes} bytes)");
    }
    Ok(match text.contains('\r') {
        true => text.replace("\r\n", "\n").replace('\r', "\n"),
        false => text,
    })
}
