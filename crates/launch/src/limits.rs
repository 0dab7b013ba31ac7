//! Limits that a system sets a process, and what to do at one.

use std::io;

use nix::errno::Errno;

/// What to do where the system has no thread or process.
pub const THREADS_HINT: &str = "hint: raise the limit on processes and threads (`ulimit -u`; `TasksMax` of systemd, `pids.max` of a \
    container) or on memory (`ulimit -v`); or start fewer ranks here, with fewer threads (`RAYON_NUM_THREADS`)";

const FILES_HINT: &str = "hint: raise the limit on open files (`ulimit -n`)";

const MEMORY_HINT: &str =
    "hint: raise the limit on memory (`ulimit -v`; `memory.max` of a container)";

/// An error of starting a thread or a process or opening a file, and what to do if the system has no more of them.
pub fn at_limit(error: &io::Error) -> String {
    let hint = match error.raw_os_error().map(Errno::from_raw) {
        Some(Errno::EAGAIN) => THREADS_HINT,
        Some(Errno::EMFILE | Errno::ENFILE) => FILES_HINT,
        Some(Errno::ENOMEM) => MEMORY_HINT,
        _ => return error.to_string(),
    };
    format!("{error}\n{hint}")
}

/// What to do about an error in words, if it is that of a file that may not be opened beside the others.
pub fn hint_of_files(message: &str) -> Option<&'static str> {
    let has = |errno: Errno| message.contains(&format!("(os error {})", errno as i32));
    let is_limit = has(Errno::EMFILE) || has(Errno::ENFILE);
    (is_limit && !message.contains("hint:")).then_some(FILES_HINT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_limit_has_a_hint_and_other_errors_have_none() {
        let said = |errno: Errno| at_limit(&io::Error::from_raw_os_error(errno as i32));
        assert!(said(Errno::EAGAIN).contains("(os error 11)\nhint: raise the limit on processes"));
        assert!(said(Errno::EMFILE).contains("(os error 24)\nhint: raise the limit on open files"));
        assert!(said(Errno::ENOMEM).contains("(os error 12)\nhint: raise the limit on memory"));
        assert!(!said(Errno::ENOENT).contains("hint:"));
        let message = |errno: Errno| io::Error::from_raw_os_error(errno as i32).to_string();
        assert_eq!(hint_of_files(&message(Errno::EMFILE)), Some(FILES_HINT));
        assert_eq!(hint_of_files(&message(Errno::ENOENT)), None);
        assert_eq!(hint_of_files(&said(Errno::EMFILE)), None);
    }
}
