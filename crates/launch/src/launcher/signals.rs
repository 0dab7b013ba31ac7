//! The signals that end a run, received as messages.

use nix::sys::signal::{SigSet, Signal};

use crate::{Error, Result};

/// What users, terminals and batch systems send to end a program.
const ENDING: [Signal; 4] = [
    Signal::SIGINT,
    Signal::SIGTERM,
    Signal::SIGHUP,
    Signal::SIGQUIT,
];

/// Calls `on_signal` with each ending signal, from a thread of its own. They are blocked for this thread and those it starts later, so
/// it has to come before those.
///
/// One that is ignored, as SIGHUP is under `nohup`, stays ignored.
pub(super) fn watch(mut on_signal: impl FnMut(Signal) + Send + 'static) -> Result<()> {
    let ignored = ignored_mask();
    let is_ignored = |signal: &Signal| ignored & (1 << (*signal as u32 - 1)) != 0;
    let set: SigSet = ENDING.into_iter().filter(|it| !is_ignored(it)).collect();
    set.thread_block()
        .map_err(|errno| Error::Launch(format!("cannot block signals: {errno}")))?;
    std::thread::spawn(move || {
        while let Ok(signal) = set.wait() {
            on_signal(signal);
        }
    });
    Ok(())
}

/// One bit for each ignored signal, as the kernel lists them.
fn ignored_mask() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok())
        .unwrap_or(0)
}
