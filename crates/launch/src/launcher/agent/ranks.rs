//! The ranks of one host: started, signalled, reported.

use std::ffi::OsString;
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

use super::Event;
use super::report_pipe::ReportPipe;
use crate::launcher::end::End;
use crate::launcher::host_plan::HostPlan;
use crate::launcher::rank_variables::FOREIGN;
use crate::launcher::wire::{MAX_OUTPUT, Report, Stream};
use crate::{Error, Result};

/// A rank that ended is reported when its output is through, or after this long: a process it left behind may hold it open.
const DRAIN: Duration = Duration::from_secs(1);
/// All ranks of this host, by local rank.
pub(super) struct Ranks {
    first_rank: usize,
    ranks: Vec<Rank>,
}

struct Rank {
    pid: Pid,
    open_outputs: usize,
    ended: Option<(End, Instant)>,
    reported: bool,
}

impl Ranks {
    /// Starts them; the kernel kills them when the calling thread ends.
    pub(super) fn start(
        plan: &HostPlan,
        reports: &ReportPipe,
        events: &Sender<Event>,
    ) -> Result<Self> {
        let mut ranks = Vec::new();
        for local_rank in 0..plan.num_ranks {
            let rank = plan.first_rank + local_rank;
            let mut child = command(plan, local_rank)?
                .spawn()
                .map_err(|error| Error::Launch(format!("cannot start rank {rank}: {error}")))?;
            let pid = Pid::from_raw(i32::try_from(child.id()).unwrap_or(-1));
            let open_outputs = forward_output(&mut child, rank, local_rank, reports, events);
            ranks.push(Rank {
                pid,
                open_outputs,
                ended: None,
                reported: false,
            });
        }
        Ok(Self {
            first_rank: plan.first_rank,
            ranks,
        })
    }

    /// Sends a signal to the groups of all running ranks.
    pub(super) fn signal(&self, signal: Signal) {
        for rank in self.ranks.iter().filter(|rank| rank.ended.is_none()) {
            let _ = killpg(rank.pid, signal);
        }
    }

    pub(super) fn any_running(&self) -> bool {
        self.ranks.iter().any(|rank| rank.ended.is_none())
    }

    pub(super) fn all_reported(&self) -> bool {
        self.ranks.iter().all(|rank| rank.reported)
    }

    /// Notes the end of a process, if that is a rank.
    pub(super) fn note_end(&mut self, pid: Pid, end: End) {
        let running = self.ranks.iter_mut().find(|rank| rank.pid == pid);
        if let Some(rank) = running.filter(|rank| rank.ended.is_none()) {
            rank.ended = Some((end, Instant::now()));
        }
    }

    pub(super) fn note_output_end(&mut self, local_rank: usize) {
        self.ranks[local_rank].open_outputs -= 1;
    }

    /// Reports the ranks that ended and whose output is through.
    pub(super) fn report_ends(&mut self, reports: &ReportPipe) {
        for (local_rank, rank) in self.ranks.iter_mut().enumerate() {
            let Some((end, at)) = rank.ended.filter(|_| !rank.reported) else {
                continue;
            };
            if rank.open_outputs == 0 || at.elapsed() >= DRAIN {
                rank.reported = true;
                reports.post(Report::Ended {
                    rank: self.first_rank + local_rank,
                    pid: rank.pid.as_raw(),
                    end,
                    ms_ago: u64::try_from(at.elapsed().as_millis()).unwrap_or(u64::MAX),
                });
            }
        }
    }

    /// When the next rank has to be reported, whatever holds its output open.
    pub(super) fn next_report_at(&self) -> Option<Instant> {
        let waiting = self.ranks.iter().filter(|rank| !rank.reported);
        waiting.filter_map(|rank| Some(rank.ended?.1 + DRAIN)).min()
    }
}

fn command(plan: &HostPlan, local_rank: usize) -> Result<Command> {
    let own_program = std::env::current_exe()
        .map_err(|error| Error::Launch(format!("cannot find candle-train's own file: {error}")))?;
    let mut command = Command::new(own_program);
    command
        .arg("rank")
        .arg(OsString::from(std::process::id().to_string()))
        .arg(&plan.program)
        .args(&plan.args)
        .envs(plan.env.iter().map(|(name, value)| (name, value)))
        .envs(plan.rank_env(local_rank))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        // A group of its own: a signal to it reaches what it starts, and a terminal's Ctrl-C only the front.
        .process_group(0);
    for name in FOREIGN.iter().filter(|_| !plan.through_mpi) {
        command.env_remove(name);
    }
    Ok(command)
}

/// Sends what a rank writes to the front; returns the number of its outputs.
fn forward_output(
    child: &mut Child,
    rank: usize,
    local_rank: usize,
    reports: &ReportPipe,
    events: &Sender<Event>,
) -> usize {
    let outputs: [(Stream, Option<Box<dyn Read + Send>>); 2] = [
        (
            Stream::Out,
            child.stdout.take().map(|pipe| Box::new(pipe) as _),
        ),
        (
            Stream::Err,
            child.stderr.take().map(|pipe| Box::new(pipe) as _),
        ),
    ];
    let mut num_open = 0;
    for (stream, pipe) in outputs {
        let Some(mut pipe) = pipe else { continue };
        let (reports, events) = (reports.clone(), events.clone());
        num_open += 1;
        std::thread::spawn(move || {
            let mut buffer = vec![0; MAX_OUTPUT];
            while let Ok(num_bytes @ 1..) = pipe.read(&mut buffer) {
                let report = Report::Output {
                    rank,
                    stream,
                    num_bytes,
                };
                reports.send(&report, &buffer[..num_bytes]);
            }
            let _ = events.send(Event::OutputEnded { local_rank });
        });
    }
    num_open
}
