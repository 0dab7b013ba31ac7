//! TensorBoard's event files: a curve for each number of the steps.
//!
//! A file is a sequence of TFRecords: length (u64, little-endian), masked CRC-32C of these 8 bytes, bytes, masked CRC-32C of them. The bytes
//! are protocol-buffer messages `Event`, of which a curve takes six fields (tensorflow/core/util/event.proto, framework/summary.proto).

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use candle_core::{Error, Result, bail};
use candle_parallel::checkpoint::{FolderLock, check_writable};
use serde_json::Value;

use super::metrics_file::MetricsLine;

/// Names of event files begin and end with these; between them are the time and the run.
const PREFIX: &str = "events.out.tfevents.";
const SUFFIX: &str = ".candle-train";
/// The first record's `file_version`.
const VERSION: &[u8] = b"brain.Event:2";
/// `SessionLog.status` START: readers then forget what earlier files have of this step and later ones.
const START: u64 = 1;

/// Writer of an event file.
#[derive(Debug)]
pub struct TensorBoard {
    path: PathBuf,
    file: File,
    _lock: FolderLock,
}

impl TensorBoard {
    /// Opens a new file in the folder `dir`, creating that when it does not exist, for the run of this name, whose next step is `step`. What
    /// is there already about this step and later ones is not shown any more, and stays: [`Self::run_of`] tells whose it is.
    ///
    /// # Errors
    /// The folder or the file cannot be made; another run is writing to the folder: the curves of two would be one.
    pub fn create(dir: impl AsRef<Path>, run: &str, step: usize) -> Result<Self> {
        let dir = dir.as_ref();
        let now = now();
        // Readers take the files of a folder in the order of their names.
        let name = format!(
            "{PREFIX}{:010}.{:09}.{}{SUFFIX}",
            now.as_secs(),
            now.subsec_nanos(),
            in_file_name(run)
        );
        let path = dir.join(name);
        std::fs::create_dir_all(dir).map_err(|err| cannot_write(dir, &err))?;
        let lock = FolderLock::acquire(&locked(dir)).map_err(|err| cannot_write(dir, &err))?;
        let mut options = OpenOptions::new();
        let file = options.append(true).create_new(true).open(&path);
        let file = file.map_err(|err| cannot_write(dir, &err))?;
        let mut events = Self {
            path,
            file,
            _lock: lock,
        };
        let mut version = Message::default();
        version.double(1, now.as_secs_f64());
        version.bytes(3, VERSION);
        let mut session = Message::default();
        session.varint(1, START);
        let mut begin = event(step);
        begin.bytes(7, &session.0);
        events.append(&version)?;
        events.append(&begin)?;
        Ok(events)
    }

    /// The run whose curves the folder `dir` has, that of the newest event file that this program has written; without a name if an earlier
    /// version of it has, or if there are only those of other programs, such as a profiler. `None` if there is none.
    ///
    /// # Errors
    /// A folder that cannot be read.
    pub fn run_of(dir: impl AsRef<Path>) -> Result<Option<String>> {
        let dir = dir.as_ref();
        if !dir.is_dir() {
            return Ok(None);
        }
        let is_own = |name: &str| name.starts_with(PREFIX) && name.ends_with(SUFFIX);
        let mut newest: Option<(bool, String)> = None;
        for entry in std::fs::read_dir(dir).map_err(|err| cannot_write(dir, &err))? {
            let entry = entry.map_err(|err| cannot_write(dir, &err))?;
            let name = entry.file_name().to_string_lossy().into_owned();
            // As TensorBoard looks for them.
            if name.contains("tfevents") {
                newest = newest.max(Some((is_own(&name), name)));
            }
        }
        let run = |name: String| {
            let own = name.strip_prefix(PREFIX)?.strip_suffix(SUFFIX)?;
            own.split('.').nth(2).map(str::to_string)
        };
        Ok(newest.map(|(_, name)| run(name).unwrap_or_default()))
    }

    /// Checks that this run can write to the folder `dir`, or make it, without changing anything.
    ///
    /// # Errors
    /// Another run writes there, whose process is named; it is no folder or cannot be written to.
    pub fn check(dir: &Path) -> Result<()> {
        let checked = check_writable(dir).and_then(|()| FolderLock::check_free(&locked(dir)));
        checked.map_err(|err| cannot_write(dir, &err))
    }

    /// Appends a step, as a point at [`crate::StepMetrics::step`]: its other numbers as `train/loss` and so on, those of its memory as `memory/weights_bytes` and
    /// so on; or an evaluation, as `eval/loss` and so on.
    ///
    /// # Errors
    /// Writing fails, for example because the disk is full.
    pub fn log(&mut self, line: &MetricsLine) -> Result<()> {
        let fields = serde_json::to_value(line).map_err(Error::wrap)?;
        let mut summary = Message::default();
        for (name, value) in fields.as_object().into_iter().flatten() {
            match value {
                Value::Object(parts) => {
                    for (part, value) in parts {
                        summary.scalar(&format!("{name}/{part}"), value);
                    }
                }
                value if !["step", "global_step"].contains(&name.as_str()) => {
                    match name.strip_prefix("eval_") {
                        Some(name) => summary.scalar(&format!("eval/{name}"), value),
                        None => summary.scalar(&format!("train/{name}"), value),
                    }
                }
                _ => {}
            }
        }
        let mut event = event(line.step());
        event.bytes(5, &summary.0);
        self.append(&event)
    }

    fn append(&mut self, event: &Message) -> Result<()> {
        match self.file.write_all(&record(&event.0)) {
            Ok(()) => Ok(()),
            Err(err) => bail!("cannot write to {}: {err}", self.path.display()),
        }
    }
}

/// The name of a run, without what would have a meaning in that of a file.
fn in_file_name(run: &str) -> String {
    run.replace(|c: char| !c.is_ascii_alphanumeric(), "-")
}

/// What is locked of the folder `dir`: another file than that of --save-dir, which may be the same folder.
fn locked(dir: &Path) -> PathBuf {
    dir.join("tensorboard")
}

fn cannot_write(dir: &Path, err: &std::io::Error) -> Error {
    Error::msg(format!(
        "cannot write TensorBoard's events to {}: {err}\nhint: --tensorboard names a folder",
        dir.display()
    ))
}

/// An `Event` of now.
fn event(step: usize) -> Message {
    let mut event = Message::default();
    event.double(1, now().as_secs_f64());
    event.varint(2, step as u64);
    event
}

/// Since 1970; a clock that is before is at its beginning.
fn now() -> Duration {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.unwrap_or_default()
}

/// A protocol-buffer message: its fields, each behind its number and type.
#[derive(Default)]
struct Message(Vec<u8>);

impl Message {
    fn raw_varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    fn varint(&mut self, field: u64, value: u64) {
        self.raw_varint(field << 3);
        self.raw_varint(value);
    }

    fn double(&mut self, field: u64, value: f64) {
        self.raw_varint(field << 3 | 1);
        self.0.extend(value.to_le_bytes());
    }

    fn float(&mut self, field: u64, value: f32) {
        self.raw_varint(field << 3 | 5);
        self.0.extend(value.to_le_bytes());
    }

    /// A `Summary.Value`, if it is a number.
    fn scalar(&mut self, tag: &str, value: &Value) {
        if let Some(number) = value.as_f64() {
            let mut value = Self::default();
            value.bytes(1, tag.as_bytes());
            value.float(2, number as f32);
            self.bytes(1, &value.0);
        }
    }

    /// A text or another message.
    fn bytes(&mut self, field: u64, value: &[u8]) {
        self.raw_varint(field << 3 | 2);
        self.raw_varint(value.len() as u64);
        self.0.extend(value);
    }
}

/// A TFRecord.
fn record(bytes: &[u8]) -> Vec<u8> {
    let len = (bytes.len() as u64).to_le_bytes();
    let [of_len, of_bytes] = [&len[..], bytes].map(|bytes| masked_crc32c(bytes).to_le_bytes());
    [&len[..], &of_len, bytes, &of_bytes].concat()
}

/// CRC-32C (RFC 3720), rotated and shifted as TFRecords have it, so that the checksum of data with checksums is one.
fn masked_crc32c(bytes: &[u8]) -> u32 {
    let crc = !bytes.iter().fold(!0u32, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
            (crc >> 1) ^ (0x82f6_3b78 * (crc & 1))
        })
    });
    crc.rotate_right(15).wrapping_add(0xa282_ead8)
}

#[cfg(test)]
mod tests {
    use super::masked_crc32c;

    /// The vectors of RFC 3720, section B.4, without the mask.
    #[test]
    fn crc32c() {
        let crc = |bytes: &[u8]| {
            masked_crc32c(bytes)
                .wrapping_sub(0xa282_ead8)
                .rotate_left(15)
        };
        assert_eq!(crc(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc(&[0xff; 32]), 0x62a8_ab43);
        let rising: Vec<u8> = (0..32).collect();
        assert_eq!(crc(&rising), 0x46dd_794e);
    }
}
