//! The processes below this one, whatever group or session they moved to.
//!
//! This process must be a subreaper: then a process whose parent ended becomes its child, and stays in the tree.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::prctl::set_child_subreaper;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

use crate::{Error, Result};

/// The time between two looks at processes that were killed.
pub(super) const KILL_INTERVAL: Duration = Duration::from_millis(30);
/// After this long, a process that SIGKILL does not end hangs in the kernel.
pub(super) const KILL_DEADLINE: Duration = Duration::from_secs(10);

/// Makes this process a subreaper.
pub(super) fn adopt_orphans() -> Result<()> {
    set_child_subreaper(true)
        .map_err(|errno| Error::Launch(format!("cannot become a subreaper: {errno}")))
}

/// The descendants of this process.
fn descendants() -> Vec<Pid> {
    let mut children: HashMap<i32, Vec<i32>> = HashMap::new();
    let Ok(entries) = std::fs::read_dir("/proc") else {
        return Vec::new();
    };
    for entry in entries.flatten() {
        let pid = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse().ok());
        if let Some((pid, parent)) = pid.and_then(|pid: i32| Some((pid, parent_of(pid)?))) {
            children.entry(parent).or_default().push(pid);
        }
    }
    let mut found = Vec::new();
    let mut open = vec![Pid::this().as_raw()];
    while let Some(parent) = open.pop() {
        let below = children.remove(&parent).unwrap_or_default();
        found.extend(below.iter().map(|pid| Pid::from_raw(*pid)));
        open.extend(below);
    }
    found
}

/// Sends a signal to all descendants and returns them.
pub(super) fn signal_descendants(signal: Signal) -> Vec<Pid> {
    let found = descendants();
    for pid in &found {
        // One that ended meanwhile is what we want.
        let _ = kill(*pid, signal);
    }
    found
}

/// Kills all descendants and waits for their end; returns those that outlive SIGKILL.
///
/// For a process that has no other use for the ends of its children any more.
pub(super) fn kill_descendants() -> Vec<Pid> {
    let begin = Instant::now();
    loop {
        let found = signal_descendants(Signal::SIGKILL);
        // What has no parent left below this process is its child: without children there is nobody.
        if !reap() {
            return Vec::new();
        }
        if begin.elapsed() > KILL_DEADLINE {
            return found;
        }
        std::thread::sleep(KILL_INTERVAL);
    }
}

/// Collects the children that ended; false if there are no children.
pub(super) fn reap() -> bool {
    loop {
        match waitpid(None, Some(WaitPidFlag::WNOHANG)) {
            Ok(WaitStatus::StillAlive) => return true,
            Ok(_) | Err(Errno::EINTR) => {}
            Err(_) => return false,
        }
    }
}

fn parent_of(pid: i32) -> Option<i32> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // pid (name) state parent ..: the name may hold anything, so count from its end.
    let fields = &stat[stat.rfind(')')? + 1..];
    fields.split_whitespace().nth(1)?.parse().ok()
}
