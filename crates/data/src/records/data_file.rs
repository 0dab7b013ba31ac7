//! One file of a data set.

use std::fs::File;
use std::io::{BufRead, BufReader, Cursor, Error as IoError, ErrorKind, Read, Take};
use std::path::PathBuf;

use candle_core::{Error, Result, bail};
use candle_parallel::checkpoint::open_file;
use flate2::bufread::MultiGzDecoder;

use crate::chat::json_text::BOM;
use crate::file_format::FileFormat;

/// One file.
#[derive(Clone, Debug)]
pub(crate) struct DataFile {
    pub path: PathBuf,
    pub format: FileFormat,
    /// Index of its [`DataSpec`](super::DataSpec).
    pub source: usize,
}

/// What a file says, decompressed.
pub(super) type DataBytes = BufReader<Box<dyn Read + Send>>;

/// How a file in gzip begins.
const GZIP: &[u8] = b"\x1f\x8b\x08";
/// How files begin that are compressed in ways that are not read, and what these are called.
const OTHERS: [(&[u8], &str); 4] = [
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"\xfd7zXZ\0", "xz"),
    (b"BZh91AY&SY", "bzip2"),
    (b"PK\x03\x04", "zip"),
];

impl DataFile {
    /// Its bytes without a byte-order mark, as many as it has now: one that grows has an end. A file in gzip, whatever
    /// it is called, is decompressed.
    ///
    /// # Errors
    /// It cannot be read, is in UTF-16 or compressed in another way.
    pub fn open(&self) -> Result<DataBytes> {
        let opened = open_file(&self.path).and_then(|opened| {
            let len = opened.metadata()?.len();
            decoded(BufReader::new(opened.take(len)))
        });
        opened.map_err(|err| self.unreadable(&err))
    }

    /// Whether it is compressed, whatever it is called; not if it cannot be read.
    pub fn is_gzip(&self) -> bool {
        let mut start = [0; GZIP.len()];
        let read = open_file(&self.path).and_then(|mut file| file.read_exact(&mut start));
        read.is_ok() && start == GZIP
    }

    /// Its text, all bytes of [`Self::open`].
    ///
    /// # Errors
    /// As [`Self::open`]; bytes that are no UTF-8.
    pub fn read_text(&self) -> Result<String> {
        let mut bytes = Vec::new();
        let read = self.open()?.read_to_end(&mut bytes);
        read.map_err(|err| self.unreadable(&err))?;
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
}

/// What a file says, from its bytes.
fn decoded(mut file: BufReader<Take<File>>) -> std::io::Result<DataBytes> {
    let start = file.fill_buf()?;
    if let Some((_, name)) = OTHERS.iter().find(|(begin, _)| start.starts_with(begin)) {
        return Err(IoError::new(
            ErrorKind::InvalidData,
            format!(
                "it is compressed with {name}; expected a file in gzip, or one that is not compressed\nhint: decompress it"
            ),
        ));
    }
    let mut bytes: Box<dyn Read + Send> = if start.starts_with(GZIP) {
        Box::new(MultiGzDecoder::new(file))
    } else {
        Box::new(file)
    };
    let mut start = Vec::new();
    (&mut bytes)
        .take(BOM.len_utf8() as u64)
        .read_to_end(&mut start)?;
    // The byte-order mark of UTF-16, as programs for Windows write it.
    if matches!(start[..], [0xff, 0xfe, ..] | [0xfe, 0xff, ..]) {
        return Err(IoError::new(
            ErrorKind::InvalidData,
            "it is in UTF-16, expected UTF-8\nhint: convert it, e.g. with iconv -f UTF-16 -t UTF-8",
        ));
    }
    if start == BOM.to_string().as_bytes() {
        start.clear();
    }
    Ok(BufReader::new(Box::new(Cursor::new(start).chain(bytes))))
}
