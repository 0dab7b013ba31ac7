//! Programs: the one to run, found before anything is started, and this one.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Child;

use nix::unistd::Pid;

use crate::{Error, Result};

/// The file that `program` names: a path, from `folder`, or a name in the folders of PATH.
pub(super) fn find(program: &str, folder: &Path) -> Result<PathBuf> {
    if program.contains('/') {
        let path = folder.join(program);
        return check_file(&path).map(|()| path);
    }
    let search_path = std::env::var("PATH").unwrap_or_default();
    let candidates = search_path.split(':');
    let mut candidates = candidates.map(|dir| folder.join(dir).join(program));
    if let Some(found) = candidates.find(|path| check_file(path).is_ok()) {
        return Ok(found);
    }
    let hint = if folder.join(program).is_file() {
        format!("it is in {}: write ./{program}", folder.display())
    } else {
        "give its path".to_string()
    };
    Err(Error::Launch(format!(
        "program {program:?} is not in any folder of PATH\nhint: {hint}"
    )))
}

fn check_file(path: &Path) -> Result<()> {
    let problem = match std::fs::metadata(path) {
        Err(error) => error.to_string(),
        Ok(data) if data.is_dir() => "it is a folder".to_string(),
        Ok(data) if data.permissions().mode() & 0o111 == 0 => "it is not executable".to_string(),
        Ok(_) => return Ok(()),
    };
    Err(Error::Launch(format!(
        "cannot run program {}: {problem}",
        path.display()
    )))
}

/// The path of this program.
pub(super) fn own_program() -> String {
    let path = std::env::current_exe().unwrap_or_else(|_| PathBuf::from("candle-train"));
    path.display().to_string()
}

/// What a POSIX shell reads as `word`.
pub fn quoted(word: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/._-+=:,@%".contains(&byte);
    if !word.is_empty() && word.bytes().all(is_plain) {
        return word.to_string();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// The number of a process that was started, which is that of its group where it has one of its own.
pub(super) fn pid_of(child: &Child) -> Pid {
    Pid::from_raw(i32::try_from(child.id()).unwrap_or(-1))
}

#[cfg(test)]
mod tests {
    use super::quoted;

    #[test]
    fn words_for_a_shell() {
        for (word, expected) in [
            ("--lr=1e-3", "--lr=1e-3"),
            ("", "''"),
            ("The Queen", "'The Queen'"),
            ("it's", r"'it'\''s'"),
            ("$HOME;ls", "'$HOME;ls'"),
        ] {
            assert_eq!(quoted(word), expected);
        }
    }
}
