//! The name of a model or dataset on a hub: `org/name[@revision]`.

use std::fmt;
use std::path::{Component, Path};

/// What a repository holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RepoKind {
    /// A model.
    #[default]
    Model,
    /// A data set.
    Dataset,
}

impl fmt::Display for RepoKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Model => "model",
            Self::Dataset => "dataset",
        })
    }
}

/// A repository and the revision that is asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RepoSpec {
    /// What it holds.
    pub kind: RepoKind,
    /// `org/name`.
    pub repo_id: String,
    /// Branch, tag or commit; `main` when the name has none.
    pub revision: String,
}

impl RepoSpec {
    /// Reads `org/name[@revision]` of a model; `None` when `spec` is not of this form.
    ///
    /// Names are letters, digits, `-`, `_` and `.`, and begin with none of the last three; a revision may have `/` inside.
    pub fn parse(spec: &str) -> Option<Self> {
        let (repo_id, revision) = spec.split_once('@').unwrap_or((spec, "main"));
        let (org, name) = repo_id.split_once('/')?;
        let is_valid = is_name(org) && is_name(name) && revision.split('/').all(is_name);
        is_valid.then(|| Self {
            kind: RepoKind::Model,
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

/// Whether a path that comes from elsewhere stays inside the folder that it is joined to.
pub(super) fn is_inside(path: &str) -> bool {
    let mut parts = Path::new(path).components();
    // A list of files has one in a line.
    let is_a_line = !path.contains(char::is_control);
    parts.all(|part| matches!(part, Component::Normal(_))) && !path.is_empty() && is_a_line
}
