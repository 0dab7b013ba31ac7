//! The TOML file of a run.

use std::path::Path;

use candle_core::{Error, Result};
use candle_parallel::checkpoint::read_text_file;
use toml::Table;

use crate::flags::defaults::Taken;

/// The file in a model's folder that says how the model was made.
pub const CONFIG_FILE: &str = "candle_train.toml";

/// The table of a TOML file.
///
/// # Errors
/// A file that cannot be read or is no TOML.
pub fn read_table(path: &Path) -> Result<Table> {
    let text = read_text_file(path).map_err(|err| {
        Error::msg(format!(
            "cannot read the configuration {}: {err}",
            path.display()
        ))
    })?;
    text.parse().map_err(|err: toml::de::Error| {
        let line = err
            .span()
            .map(|span| text[..span.start].lines().count().max(1));
        let line = line.map_or(String::new(), |line| format!(", line {line}"));
        Error::msg(format!(
            "{}{line} is no TOML: {}",
            path.display(),
            err.message()
        ))
    })
}

/// The text of a file with these values, those that were taken with the reason.
///
/// # Errors
/// None, as a table can be written.
pub(crate) fn text_of(table: &Table, taken: &[Taken]) -> Result<String> {
    let text = toml::to_string(table).map_err(Error::wrap)?;
    let mut lines: Vec<String> = text.lines().map(str::to_string).collect();
    for Taken { flag, reason, .. } in taken {
        let key = format!("{} = ", flag.trim_start_matches("--"));
        let mut lines = lines.iter_mut();
        if let Some(line) = lines.find(|line| line.starts_with(&key)) {
            *line += &format!(" # {reason}");
        }
    }
    lines.push(String::new());
    Ok(lines.join("\n"))
}
