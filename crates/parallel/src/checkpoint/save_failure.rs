//! Why the first rank could not save, told to all.

use std::path::Path;

use candle_comm::{Mesh, message_of};
use candle_core::{Error, Result};

pub(super) type SaveResult<T = ()> = std::result::Result<T, SaveFailure>;

/// What stopped a save that all ranks took part in to its end.
#[derive(Debug)]
pub(super) enum SaveFailure {
    /// The folder: another one may do.
    Folder(Error),
    /// Weights that do not fit the type in which they are to be saved: f32 may do.
    Range(Error),
    /// The weights, wherever they are to be saved.
    Weights(Error),
}

impl SaveFailure {
    /// An error of the file system at `path`.
    pub fn at(path: &Path, err: impl std::fmt::Display) -> Self {
        Self::Folder(Error::msg(format!(
            "cannot save to {}: {err}\nhint: nothing that was there before has been changed",
            path.display()
        )))
    }

    /// What rank 0 says, on every rank.
    pub fn agree(own: SaveResult, mesh: &Mesh) -> Result<SaveResult> {
        let said = match &own {
            Ok(()) => String::new(),
            Err(Self::Folder(err)) => format!("f{}", message_of(err)),
            Err(Self::Range(err)) => format!("r{}", message_of(err)),
            Err(Self::Weights(err)) => format!("w{}", message_of(err)),
        };
        let all = mesh.world.all_gather_bytes(said.as_bytes())?;
        let said = String::from_utf8_lossy(all.first().map_or(&[], Vec::as_slice));
        let error = |message| Error::msg(format!("rank 0 could not save: {message}"));
        Ok(match (own, said.split_at_checked(1)) {
            (Err(own), _) => Err(own),
            (Ok(()), Some(("f", message))) => Err(Self::Folder(error(message))),
            (Ok(()), Some(("r", message))) => Err(Self::Range(error(message))),
            (Ok(()), Some((_, message))) => Err(Self::Weights(error(message))),
            (Ok(()), None) => Ok(()),
        })
    }

    /// The error, with another line below it.
    pub fn with_line(self, line: &str) -> Error {
        Error::msg(format!("{}\n{line}", message_of(&self.into())))
    }
}

impl From<SaveFailure> for Error {
    fn from(failure: SaveFailure) -> Self {
        match failure {
            SaveFailure::Folder(err) | SaveFailure::Range(err) | SaveFailure::Weights(err) => err,
        }
    }
}
