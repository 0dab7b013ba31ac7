//! How much memory a process may have: what the machine has left, and what the control groups leave that it is in.

use std::fs::read_to_string;
use std::path::Path;

/// What is read of a group: its limit, what is used of it, and what of that is files' content, which goes when memory is wanted.
const V1: [&str; 3] = [
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    "total_inactive_file",
];
const V2: [&str; 3] = ["memory.max", "memory.current", "inactive_file"];

/// Bytes of memory.
pub(crate) struct AvailableMemory {
    /// That the calling process can still take.
    pub left: u64,
    /// That it has.
    pub own: u64,
    /// That there are for all processes together, swap included.
    pub all: u64,
}

impl AvailableMemory {
    /// Of the calling process; `None` where nothing tells, as on other systems than Linux.
    pub fn of_process() -> Option<Self> {
        let status = read_to_string("/proc/self/status").ok()?;
        let own = number_after("RssAnon:", &status)? << 10;
        let [left, all] = least_in(Path::new("/proc"), Path::new("/sys/fs/cgroup"))?;
        Some(Self { left, own, all })
    }
}

/// The least that the machine and the groups leave, and the least that they have in all.
fn least_in(proc: &Path, groups: &Path) -> Option<[u64; 2]> {
    let machine = read_to_string(proc.join("meminfo")).ok()?;
    let of_machine = |word| Some(number_after(word, &machine)? << 10);
    let left = of_machine("MemAvailable:")?;
    let all = of_machine("MemTotal:").unwrap_or(u64::MAX);
    let swap = of_machine("SwapTotal:").unwrap_or(0);
    let own = read_to_string(proc.join("self/cgroup")).unwrap_or_default();
    let of_groups = own.lines().flat_map(|line| {
        let mut parts = line.splitn(3, ':').skip(1);
        let controllers = parts.next().unwrap_or_default();
        let path = parts.next().unwrap_or_default().trim_start_matches('/');
        let (root, files) = match controllers {
            "" => (groups.to_path_buf(), V2),
            _ => (groups.join("memory"), V1),
        };
        let is_of_memory =
            controllers.is_empty() || controllers.split(',').any(|it| it == "memory");
        let own = root.join(path);
        let all = own
            .ancestors()
            .filter(|dir| is_of_memory && dir.starts_with(&root));
        all.filter_map(|dir| limits_of(dir, files))
            .collect::<Vec<_>>()
    });
    let all_of = of_groups.chain([[left, all]]);
    let [left, all] = all_of.reduce(|a, b| [a[0].min(b[0]), a[1].min(b[1])])?;
    Some([left, all.saturating_add(swap)])
}

/// What the group `dir` leaves, and its limit, if it has one.
fn limits_of(dir: &Path, [limit, usage, cache]: [&str; 3]) -> Option<[u64; 2]> {
    let number = |name| {
        let text = read_to_string(dir.join(name)).ok()?;
        text.trim().parse::<u64>().ok()
    };
    let (limit, usage) = (number(limit)?, number(usage)?);
    let stat = read_to_string(dir.join("memory.stat")).unwrap_or_default();
    let cache = number_after(cache, &stat).unwrap_or(0);
    let left = limit.saturating_sub(usage.saturating_sub(cache));
    Some([left, limit])
}

/// The number in the line that begins with this word.
fn number_after(word: &str, text: &str) -> Option<u64> {
    let mut lines = text.lines().map(str::split_whitespace);
    let mut line = lines.find(|words| words.clone().next() == Some(word))?;
    line.nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::least_in;

    #[test]
    fn the_least_of_the_machine_and_all_groups_counts() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            let path = dir.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let least = || least_in(&dir.path().join("proc"), &dir.path().join("cgroup"));
        let left = || least().map(|[left, _]| left);
        assert_eq!(left(), None);
        write(
            "proc/meminfo",
            "MemTotal: 900 kB\nMemAvailable:  500 kB\nSwapTotal: 1 kB\n",
        );
        assert_eq!(least(), Some([500 << 10, 901 << 10]));
        // The limit is that of a group around the own one.
        write("proc/self/cgroup", "4:cpu,memory:/a/b\n0::/c/d\n");
        write("cgroup/c/d/memory.max", "max\n");
        write("cgroup/c/d/memory.current", "7\n");
        write("cgroup/c/memory.max", "9000\n");
        write("cgroup/c/memory.current", "5000\n");
        assert_eq!(least(), Some([4000, 9000 + 1024]));
        write("cgroup/c/memory.stat", "anon 1\ninactive_file 2000\n");
        assert_eq!(left(), Some(6000));
        write("cgroup/memory/memory.limit_in_bytes", "3000");
        write("cgroup/memory/memory.usage_in_bytes", "9000");
        assert_eq!(left(), Some(0));
    }
}
