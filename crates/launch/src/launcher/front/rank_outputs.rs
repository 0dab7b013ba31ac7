//! The outputs of all ranks of a host.

use std::fs::{File, OpenOptions};
use std::path::Path;

use super::labelled_output::LabelledOutput;
use crate::launcher::host_plan::HostPlan;
use crate::launcher::wire::Stream;
use crate::{Error, Result};

/// Two outputs per rank, by local rank.
pub(super) struct RankOutputs {
    first_rank: usize,
    outputs: Vec<[LabelledOutput; 2]>,
    log_failed: bool,
}

impl RankOutputs {
    /// # Errors
    /// A log file cannot be opened. One that exists is continued.
    pub(super) fn open(plan: &HostPlan, log_dir: Option<&Path>) -> Result<Self> {
        let mut outputs = Vec::new();
        for rank in plan.first_rank..plan.first_rank + plan.num_ranks {
            let label = format!("[rank {rank}] ");
            outputs.push([
                LabelledOutput::new(label.clone(), Stream::Out, open_log(log_dir, rank, "out")?),
                LabelledOutput::new(label, Stream::Err, open_log(log_dir, rank, "err")?),
            ]);
        }
        Ok(Self {
            first_rank: plan.first_rank,
            outputs,
            log_failed: false,
        })
    }

    /// Shows and logs what a rank wrote. Returns a warning the first time that logging fails.
    pub(super) fn write(&mut self, rank: usize, stream: Stream, bytes: &[u8]) -> Option<String> {
        let pair = self.of(rank)?;
        let result = pair[stream as usize].write(bytes);
        let error = result.err().filter(|_| !self.log_failed)?;
        self.log_failed = true;
        Some(format!("cannot write the log of rank {rank}: {error}"))
    }

    /// Shows what a rank that ended left without a line's end; returns its last lines on stderr.
    pub(super) fn end(&mut self, rank: usize) -> Vec<String> {
        let Some(pair) = self.of(rank) else {
            return Vec::new();
        };
        pair.iter_mut().for_each(LabelledOutput::flush);
        pair[Stream::Err as usize].last_lines()
    }

    fn of(&mut self, rank: usize) -> Option<&mut [LabelledOutput; 2]> {
        self.outputs.get_mut(rank.checked_sub(self.first_rank)?)
    }
}

fn open_log(dir: Option<&Path>, rank: usize, kind: &str) -> Result<Option<File>> {
    let Some(dir) = dir else { return Ok(None) };
    let path = dir.join(format!("rank-{rank}.{kind}"));
    let file = OpenOptions::new().create(true).append(true).open(&path);
    file.map(Some)
        .map_err(|error| Error::Launch(format!("cannot open log file {}: {error}", path.display())))
}
