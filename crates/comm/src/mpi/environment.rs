//! What the environment says about a run under MPI.

use std::hash::{DefaultHasher, Hash, Hasher};

/// How many ranks the launcher that started this process says there are, and the variable that says it.
pub(super) fn said_world_size(
    var: impl Fn(&str) -> Option<String>,
) -> Option<(&'static str, usize)> {
    let names = [
        "OMPI_COMM_WORLD_SIZE",
        "PMI_SIZE",
        "PMIX_SIZE",
        "WORLD_SIZE",
        "SLURM_STEP_NUM_TASKS",
    ];
    names.into_iter().find_map(|name| {
        let size = var(name)?.trim().parse().ok()?;
        Some((name, size))
    })
}

/// A number that is the same for processes on a host that may use the same cores.
pub(super) fn cores_id() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let cores = (status.lines()).find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    let mut hasher = DefaultHasher::new();
    cores.unwrap_or_default().trim().hash(&mut hasher);
    hasher.finish()
}

/// Threads for one of the ranks with these core ids on a host, on which this process may use `num_cores`.
pub(super) fn threads_per_rank(num_cores: usize, own: u64, all: &[u64]) -> usize {
    let num_sharing = all.iter().filter(|id| **id == own).count();
    (num_cores / num_sharing.max(1)).max(1)
}

/// The number of cores of this host that are switched on, whoever may use them.
pub(super) fn num_online_cores() -> Option<usize> {
    let online = std::fs::read_to_string("/sys/devices/system/cpu/online").ok()?;
    count_list(online.trim())
}

/// How many numbers a list like `0-3,8` has.
fn count_list(list: &str) -> Option<usize> {
    list.split(',')
        .map(|range| {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
            Some((last + 1).saturating_sub(first))
        })
        .sum()
}

/// A warning if the ranks of a host leave at least half of its cores idle.
pub(super) fn idle_cores(
    threads_per_rank: usize,
    num_ranks: usize,
    num_online: usize,
) -> Option<String> {
    let num_used = threads_per_rank * num_ranks;
    (num_used * 2 <= num_online).then(|| {
        format!(
            "the {num_ranks} ranks on this host compute on {threads_per_rank} threads each, and the host has {num_online} cores\n\
             hint: Open MPI binds ranks to few cores: mpirun --bind-to none, or --map-by slot:pe=CORES_PER_RANK"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launchers() {
        let said = |pairs: &'static [(&str, &str)]| {
            said_world_size(|name| {
                let found = pairs.iter().find(|(known, _)| *known == name);
                found.map(|(_, value)| value.to_string())
            })
        };
        assert_eq!(said(&[]), None);
        assert_eq!(said(&[("WORLD_SIZE", "4")]), Some(("WORLD_SIZE", 4)));
        let both = said(&[("WORLD_SIZE", "4"), ("OMPI_COMM_WORLD_SIZE", " 2\n")]);
        assert_eq!(both, Some(("OMPI_COMM_WORLD_SIZE", 2)));
        assert_eq!(said(&[("WORLD_SIZE", "four")]), None);
    }

    #[test]
    fn cores_are_divided_over_who_shares_them() {
        assert_eq!(threads_per_rank(16, 1, &[1, 1, 2, 2]), 8);
        assert_eq!(threads_per_rank(1, 3, &[1, 2, 3, 4]), 1);
        assert_eq!(threads_per_rank(2, 1, &[1, 1, 1, 1]), 1);
        assert_eq!(cores_id(), cores_id());
    }

    #[test]
    fn idle_cores_are_told() {
        assert_eq!(count_list("0-3,8,10-11"), Some(7));
        assert_eq!(count_list("0"), Some(1));
        assert_eq!(count_list(""), None);
        assert!(num_online_cores().is_none_or(|num_cores| num_cores > 0));
        assert_eq!(idle_cores(1, 2, 2), None);
        assert_eq!(idle_cores(8, 4, 48), None);
        let warning = idle_cores(1, 2, 64).unwrap();
        assert!(
            warning.contains("1 threads each") && warning.contains("64 cores"),
            "{warning}"
        );
    }
}
