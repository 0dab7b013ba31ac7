//! Host files in DeepSpeed's format: one host per line with its number of ranks, `#` before comments.
//!
//! ```text
//! # the two machines under the desk
//! node1 slots=4
//! node2 slots=2
//! ```

use std::path::Path;

use crate::{Error, Result};

/// A line of a host file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct HostLine {
    pub(super) host: String,
    pub(super) slots: usize,
    line: usize,
}

/// The hosts of a file, in its order; at least one.
pub(super) fn read(path: &Path) -> Result<Vec<HostLine>> {
    let text = std::fs::read_to_string(path).map_err(|error| {
        Error::Launch(format!("cannot read host file {}: {error}", path.display()))
    })?;
    let mut hosts: Vec<HostLine> = Vec::new();
    for (index, text) in text.lines().enumerate() {
        let line = index + 1;
        let problem = |what: String| {
            Error::Launch(format!("host file {}, line {line}: {what}", path.display()))
        };
        let text = text.split('#').next().unwrap_or("").trim();
        if text.is_empty() {
            continue;
        }
        let (host, slots) = parse_line(text).map_err(problem)?;
        if let Some(earlier) = hosts.iter().find(|earlier| earlier.host == host) {
            let earlier = earlier.line;
            return Err(problem(format!(
                "host {host:?} stands in line {earlier} already"
            )));
        }
        hosts.push(HostLine { host, slots, line });
    }
    if hosts.is_empty() {
        let path = path.display();
        return Err(Error::Launch(format!(
            "host file {path} names no host\nhint: each line is `host slots=NUMBER_OF_RANKS`"
        )));
    }
    Ok(hosts)
}

fn parse_line(text: &str) -> std::result::Result<(String, usize), String> {
    let words: Vec<&str> = text.split_whitespace().collect();
    let slots = match words[..] {
        [_, slots] => slots.strip_prefix("slots="),
        _ => None,
    };
    let Some(slots) = slots else {
        return Err(format!("expected `host slots=4`, got {text:?}"));
    };
    // To ssh it would be an option.
    if words[0].starts_with('-') {
        return Err(format!("expected a host name, got {:?}", words[0]));
    }
    match slots.parse() {
        Ok(number @ 1..) => Ok((words[0].to_string(), number)),
        _ => Err(format!(
            "expected slots=NUMBER, at least 1, got slots={slots}"
        )),
    }
}
