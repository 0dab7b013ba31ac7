//! What `--data` names: a path with a weight.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// A file, folder, glob or dataset on a hub, `PATH[:WEIGHT]`, and how many of its samples an epoch has.
#[derive(Clone, Debug, PartialEq)]
pub struct DataSpec {
    /// A path, or `hub://datasets/org/name[@revision][/path]`.
    pub path: PathBuf,
    /// Samples in an epoch over those that there are: 1 is each once, 0.3 three in ten, 2 each twice.
    pub weight: f64,
}

impl DataSpec {
    /// Everything at `path` once.
    pub fn new(path: impl AsRef<Path>) -> Self {
        Self {
            path: path.as_ref().to_path_buf(),
            weight: 1.0,
        }
    }
}

impl FromStr for DataSpec {
    type Err = String;

    /// A path that exists is one as a whole, whatever follows a colon in it.
    fn from_str(spec: &str) -> Result<Self, String> {
        if spec.is_empty() {
            return Err("it is empty, expected a file or folder".to_string());
        }
        let weighted = spec.rsplit_once(':').filter(|(path, _)| !path.is_empty());
        let weighted =
            weighted.and_then(|(path, weight)| Some((path, weight.parse::<f64>().ok()?)));
        match weighted {
            Some((path, weight)) if !Path::new(spec).exists() => {
                if !(weight > 0.0 && weight <= 1000.0) {
                    return Err(format!(
                        "its weight is {weight}, expected a number above 0 and at most 1000"
                    ));
                }
                Ok(Self {
                    path: path.into(),
                    weight,
                })
            }
            _ => Ok(Self::new(spec)),
        }
    }
}

impl fmt::Display for DataSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.weight {
            1.0 => write!(f, "{}", self.path.display()),
            weight => write!(f, "{}:{weight}", self.path.display()),
        }
    }
}
