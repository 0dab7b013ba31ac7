//! Finding the program before anything is started.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use crate::{Error, Result};

/// The file that `program` names: a path, from `folder`, or a name in the folders of `search_path` (PATH).
pub(super) fn find(program: &str, folder: &Path, search_path: &str) -> Result<PathBuf> {
    if program.contains('/') {
        let path = folder.join(program);
        return check_file(&path).map(|()| path);
    }
    let candidates = search_path
        .split(':')
        .map(|dir| folder.join(dir).join(program));
    if let Some(found) = candidates.into_iter().find(|path| check_file(path).is_ok()) {
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
