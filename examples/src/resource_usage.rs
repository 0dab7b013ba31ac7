//! What the process has used, as Linux tells it; 0 elsewhere.

/// Largest resident memory so far, in bytes.
pub fn peak_rss_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}

/// Page faults so far that needed no disk.
pub fn page_faults() -> u64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // The fields follow the program's name, which stands in brackets and may hold blanks; minflt is the eighth of them.
    let fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields);
    let minor = fields.split_whitespace().nth(7);
    minor.and_then(|minor| minor.parse().ok()).unwrap_or(0)
}
