//! Numbers of the steps of a run, from its metrics file.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use candle_core::{Error, Result, bail};
use candle_parallel::checkpoint::read_text_file;
use serde_json::Value;

/// The lines of a metrics file.
pub(super) struct MetricsFile {
    path: PathBuf,
    /// Step, counted from 1 as in the progress of a run, and everything else of each line.
    lines: Vec<(f64, Value)>,
}

/// A number of the steps: steps and values.
pub(super) type Curve = Vec<(f64, f64)>;

impl MetricsFile {
    /// Reads all lines. The last one may be half of one: a run writes it.
    ///
    /// # Errors
    /// A file that cannot be read, a line that is no step.
    pub(super) fn read(path: &Path) -> Result<Self> {
        let shown = path.display();
        let text = read_text_file(path)
            .map_err(|err| Error::msg(format!("cannot read the metrics file {shown}: {err}")))?;
        let mut lines = Vec::new();
        for (index, line) in text.split_inclusive('\n').enumerate() {
            let read = serde_json::from_str::<Value>(line).ok();
            let number = read.as_ref().and_then(|read| read["step"].as_f64());
            let number = number.map(|from_0| from_0 + 1.0);
            let (Some(read), Some(number)) = (read, number) else {
                if !line.ends_with('\n') {
                    break;
                }
                bail!("line {} of {shown} is no step of a metrics file", index + 1);
            };
            lines.push((number, read));
        }
        Ok(Self {
            path: path.to_path_buf(),
            lines,
        })
    }

    /// What the file is called.
    pub(super) fn shown(&self) -> String {
        self.path.display().to_string()
    }

    /// The number `name` of each line that has it; a part of a number's group as `memory/weights_bytes`.
    ///
    /// # Errors
    /// No line has that number.
    pub(super) fn curve(&self, name: &str) -> Result<Curve> {
        let pointer = format!("/{name}");
        let points = self.lines.iter().filter_map(|(step, line)| {
            let value = line.pointer(&pointer)?.as_f64()?;
            Some((*step, value))
        });
        let points: Curve = points.collect();
        if !points.is_empty() {
            return Ok(points);
        }
        let shown = self.path.display();
        let names: BTreeSet<String> = self
            .lines
            .iter()
            .flat_map(|(_, line)| names(line))
            .collect();
        if names.is_empty() {
            bail!("{shown} has no step with the number {name:?}: it has no step at all");
        }
        let names: Vec<String> = names.into_iter().collect();
        bail!(
            "{shown} has no step with the number {name:?}\nhint: it has {}",
            names.join(", ")
        )
    }
}

/// The names of a line's numbers.
fn names(line: &Value) -> Vec<String> {
    let mut names = Vec::new();
    for (name, value) in line.as_object().into_iter().flatten() {
        match value {
            Value::Number(_) => names.push(name.clone()),
            Value::Object(parts) => {
                names.extend(parts.keys().map(|part| format!("{name}/{part}")));
            }
            _ => {}
        }
    }
    names
}
