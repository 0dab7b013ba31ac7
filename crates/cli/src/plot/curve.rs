//! A number of the steps of a run, from its metrics file.

use std::path::Path;

use candle_core::{Error, Result, bail};
use serde_json::Value;

/// A curve and its name.
pub(super) struct Curve {
    pub(super) name: String,
    /// Steps and values.
    pub(super) points: Vec<(f64, f64)>,
}

impl Curve {
    /// The number `metric` of each step in a metrics file that has it; a part of a number's group as `memory/weights_bytes`. The last
    /// line may be half of one: a run writes it.
    ///
    /// # Errors
    /// A file that cannot be read, a line that is no step, no step with that number.
    pub(super) fn read(path: &Path, metric: &str) -> Result<Self> {
        let shown = path.display();
        let text = std::fs::read_to_string(path)
            .map_err(|err| Error::msg(format!("cannot read the metrics file {shown}: {err}")))?;
        let mut points = Vec::new();
        let mut names = Vec::new();
        for (index, line) in text.split_inclusive('\n').enumerate() {
            let step = serde_json::from_str::<Value>(line).ok();
            let number = step.as_ref().and_then(|step| step["step"].as_f64());
            let (Some(step), Some(number)) = (step, number) else {
                if !line.ends_with('\n') {
                    break;
                }
                bail!("line {} of {shown} is no step of a metrics file", index + 1);
            };
            if let Some(value) = step.pointer(&format!("/{metric}")).and_then(Value::as_f64) {
                points.push((number, value));
            }
            names = numbers(&step);
        }
        if points.is_empty() {
            bail!(
                "{shown} has no step with the number {metric:?}\nhint: its last step has {}",
                names.join(", ")
            );
        }
        Ok(Self {
            name: shown.to_string(),
            points,
        })
    }
}

/// The names of a step's numbers.
fn numbers(step: &Value) -> Vec<String> {
    let mut names = Vec::new();
    for (name, value) in step.as_object().into_iter().flatten() {
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
