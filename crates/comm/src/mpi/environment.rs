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
}
