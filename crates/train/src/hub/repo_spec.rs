//! The name of a model on a hub: `org/name[@revision]`.

use std::fmt;

/// A repository and the revision that is asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RepoSpec {
    /// `org/name`.
    pub repo_id: String,
    /// Branch, tag or commit; `main` when the name has none.
    pub revision: String,
}

impl RepoSpec {
    /// Reads `org/name[@revision]`; `None` when `spec` is not of this form.
    ///
    /// Names are letters, digits, `-`, `_` and `.`, and begin with none of the last three; a revision may have `/` inside.
    pub fn parse(spec: &str) -> Option<Self> {
        let (repo_id, revision) = spec.split_once('@').unwrap_or((spec, "main"));
        let (org, name) = repo_id.split_once('/')?;
        let is_valid = is_name(org) && is_name(name) && revision.split('/').all(is_name);
        is_valid.then(|| Self {
            repo_id: repo_id.to_string(),
            revision: revision.to_string(),
        })
    }

    /// True when the revision is a full commit id, which never changes its meaning.
    pub fn is_commit(&self) -> bool {
        self.revision.len() == 40 && self.revision.bytes().all(|b| b.is_ascii_hexdigit())
    }
}

impl fmt::Display for RepoSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.repo_id, self.revision)
    }
}

/// One part of a path that stays inside its folder.
pub(super) fn is_name(name: &str) -> bool {
    name.starts_with(|c: char| c.is_ascii_alphanumeric())
        && name
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
}
