//! What the process has used, as Linux tells it; 0 elsewhere.

use nix::sys::resource::{UsageWho, getrusage};

/// Largest resident memory so far, in bytes.
pub fn peak_rss_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}

/// Page faults so far that needed no disk.
pub fn page_faults() -> u64 {
    getrusage(UsageWho::RUSAGE_SELF).map_or(0, |usage| usage.minor_page_faults() as u64)
}
