//! One file of a data set.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Take};
use std::path::PathBuf;

use candle_core::{Error, Result, bail};
use candle_parallel::checkpoint::{open_file, read_file};

use crate::file_format::FileFormat;

/// One file.
#[derive(Clone, Debug)]
pub(crate) struct DataFile {
    pub path: PathBuf,
    pub format: FileFormat,
    /// Index of its [`DataSpec`](super::DataSpec).
    pub source: usize,
}

/// The byte-order mark of UTF-8.
const BOM: &[u8] = "\u{feff}".as_bytes();

impl DataFile {
    /// Its bytes without a byte-order mark, as many as it has now: one that grows has an end.
    ///
    /// # Errors
    /// It cannot be read, or is in UTF-16.
    pub fn open(&self) -> Result<BufReader<Take<File>>> {
        let opened = open_file(&self.path).and_then(|opened| {
            let len = opened.metadata()?.len();
            let mut bytes = BufReader::new(opened.take(len));
            let start = bytes.fill_buf()?;
            let is_utf16 = is_utf16(start);
            if start.starts_with(BOM) {
                bytes.consume(BOM.len());
            }
            Ok((bytes, is_utf16))
        });
        match opened {
            Ok((_, true)) => Err(self.utf16_error()),
            Ok((bytes, false)) => Ok(bytes),
            Err(err) => Err(self.unreadable(&err)),
        }
    }

    /// All bytes of [`Self::open`].
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn read(&self) -> Result<Vec<u8>> {
        match read_file(&self.path) {
            Ok(bytes) if is_utf16(&bytes) => Err(self.utf16_error()),
            Ok(mut bytes) => {
                if bytes.starts_with(BOM) {
                    bytes.drain(..BOM.len());
                }
                Ok(bytes)
            }
            Err(err) => Err(self.unreadable(&err)),
        }
    }

    /// Its text, which is all of [`Self::read`].
    ///
    /// # Errors
    /// As [`Self::open`]; bytes that are no UTF-8.
    pub fn read_text(&self) -> Result<String> {
        let bytes = self.read()?;
        let num_bytes = bytes.len();
        match String::from_utf8(bytes) {
            Ok(text) => Ok(text),
            Err(err) => bail!(
                "data file {:?} is not UTF-8: invalid byte at offset {} of {num_bytes}\nhint: convert it, e.g. with iconv -t UTF-8",
                self.path,
                err.utf8_error().valid_up_to()
            ),
        }
    }

    /// Why it cannot be read.
    pub fn unreadable(&self, err: &std::io::Error) -> Error {
        Error::msg(format!("cannot read data file {:?}: {err}", self.path))
    }

    fn utf16_error(&self) -> Error {
        Error::msg(format!(
            "data file {:?} is in UTF-16, expected UTF-8\nhint: convert it, e.g. with iconv -f UTF-16 -t UTF-8",
            self.path
        ))
    }
}

/// Whether a file begins with the byte-order mark of UTF-16, as programs for Windows write it.
fn is_utf16(bytes: &[u8]) -> bool {
    matches!(bytes, [0xff, 0xfe, ..] | [0xfe, 0xff, ..])
}
