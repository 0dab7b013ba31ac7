//! One output of a rank, line by line with the rank's label.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{Write, stderr, stdout};
use std::path::Path;
use std::sync::OnceLock;

use crate::launcher::wire::Stream;
use crate::{Error, Result, has_no_reader, open_own_file, write_whole};

/// A line longer than this is shown in parts, so that it does not fill the memory.
const MAX_LINE_BYTES: usize = 1 << 16;
/// The lines kept for the report of a failure, and how much of each.
const NUM_LAST_LINES: usize = 20;
const MAX_KEPT_BYTES: usize = 1000;

/// The first error of stdout, such as a full disk; that nobody reads it any more is none.
static LOST: OnceLock<std::io::Error> = OnceLock::new();

/// Why lines of the ranks are missing on stdout, if some are.
pub(super) fn lost() -> Option<&'static std::io::Error> {
    LOST.get()
}

/// Writes what it gets to stdout or stderr, each line behind a label, and unchanged to a log file.
///
/// A carriage return ends a line too, as progress bars have it. Errors of the terminal end nothing, which may be a run of days: the launcher
/// tells of those of stdout at the end.
pub(super) struct LabelledOutput {
    label: String,
    stream: Stream,
    log: Option<File>,
    /// The beginning of a line whose end has not come yet.
    partial: Vec<u8>,
    after_carriage_return: bool,
    last_lines: VecDeque<Vec<u8>>,
}

/// The outputs of all ranks of a host, by local rank: stdout and stderr.
pub(super) type RankOutputs = Vec<[LabelledOutput; 2]>;

impl LabelledOutput {
    /// The outputs of a rank.
    ///
    /// # Errors
    /// A log file cannot be opened. One that exists is continued.
    pub(super) fn of_rank(rank: usize, log_dir: Option<&Path>) -> Result<[Self; 2]> {
        let label = || format!("[rank {rank}] ");
        let log = |kind| {
            let path = log_dir.map(|dir| dir.join(format!("rank-{rank}.{kind}")));
            let opened = path.map(|path| {
                let file = open_own_file(&path, File::options().create(true).append(true));
                file.map_err(|error| {
                    Error::Launch(format!("cannot open log file {}: {error}", path.display()))
                })
            });
            opened.transpose()
        };
        Ok([
            Self::new(label(), Stream::Out, log("out")?),
            Self::new(label(), Stream::Err, log("err")?),
        ])
    }

    pub(super) fn new(label: String, stream: Stream, log: Option<File>) -> Self {
        Self {
            label,
            stream,
            log,
            partial: Vec::new(),
            after_carriage_return: false,
            last_lines: VecDeque::new(),
        }
    }

    /// Shows the lines that are complete with these bytes. The error is the log file's.
    pub(super) fn write(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        let mut shown = Vec::with_capacity(bytes.len() + bytes.len() / 4);
        for part in bytes.split_inclusive(|byte| matches!(byte, b'\n' | b'\r')) {
            self.partial.extend_from_slice(part);
            let end = self.partial.last().copied();
            if self.partial == b"\n" && self.after_carriage_return {
                // The other half of \r\n.
                shown.push(b'\n');
                self.partial.clear();
            } else if matches!(end, Some(b'\n' | b'\r')) {
                self.show_partial(&mut shown);
            } else if self.partial.len() >= MAX_LINE_BYTES {
                self.partial.push(b'\n');
                self.show_partial(&mut shown);
            }
            self.after_carriage_return = end == Some(b'\r');
        }
        self.print(&shown);
        match &mut self.log {
            Some(file) => file.write_all(bytes),
            None => Ok(()),
        }
    }

    /// Shows a last line without an end, and gives that one.
    pub(super) fn flush(&mut self) {
        if !self.partial.is_empty() {
            let mut shown = Vec::new();
            self.partial.push(b'\n');
            self.show_partial(&mut shown);
            self.print(&shown);
        }
    }

    /// The last lines written, as text.
    pub(super) fn last_lines(&self) -> Vec<String> {
        let text = |line: &Vec<u8>| String::from_utf8_lossy(line).into_owned();
        self.last_lines.iter().map(text).collect()
    }

    fn show_partial(&mut self, shown: &mut Vec<u8>) {
        shown.extend_from_slice(self.label.as_bytes());
        shown.extend_from_slice(&self.partial);
        let text = self.partial.trim_ascii_end();
        if !text.is_empty() {
            if self.last_lines.len() == NUM_LAST_LINES {
                self.last_lines.pop_front();
            }
            self.last_lines
                .push_back(text[..text.len().min(MAX_KEPT_BYTES)].to_vec());
        }
        self.partial.clear();
    }

    fn print(&self, shown: &[u8]) {
        match self.stream {
            Stream::Out => {
                if let Err(err) = write_whole(&mut stdout().lock(), shown)
                    && !has_no_reader(&err)
                {
                    LOST.get_or_init(|| err);
                }
            }
            Stream::Err => drop(write_whole(&mut stderr().lock(), shown)),
        }
    }
}
