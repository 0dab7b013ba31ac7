//! Slurm's compressed lists: `node[01-03,7],other` for hosts, `2(x3),1` for tasks per node.

use crate::{Error, Result};

/// The first host of `node[01-03,7],other`; `variable` is where the list stands, for errors.
pub(super) fn first_host(variable: &str, list: &str) -> Result<String> {
    first_of_pattern(list)
        .ok_or_else(|| malformed(variable, list, "names like node[01-03,7],other"))
}

/// The number of tasks on node `index` of `2(x3),1`; `variable` is where the list stands, for errors.
pub(super) fn tasks_on_node(variable: &str, list: &str, index: usize) -> Result<usize> {
    let expected = "counts like 2(x3),1";
    let mut nodes_before = 0usize;
    for part in list.split(',') {
        let (tasks, repeat) = match part.trim().split_once("(x") {
            Some((tasks, repeat)) => (tasks, repeat.strip_suffix(')').unwrap_or("")),
            None => (part.trim(), "1"),
        };
        let (Ok(tasks), Ok(repeat)) = (tasks.parse(), repeat.parse()) else {
            return Err(malformed(variable, list, expected));
        };
        nodes_before = nodes_before.saturating_add(repeat);
        if index < nodes_before {
            return Ok(tasks);
        }
    }
    Err(Error::Environment(format!(
        "{variable}={list} has {nodes_before} nodes, but SLURM_NODEID says this is node {index}, counted from 0"
    )))
}

fn malformed(variable: &str, list: &str, expected: &str) -> Error {
    Error::Environment(format!("{variable}: expected {expected}, got {list:?}"))
}

/// The text up to the first comma outside brackets, each bracket replaced by its first number.
fn first_of_pattern(list: &str) -> Option<String> {
    let mut host = String::new();
    let mut rest = list;
    loop {
        let end = rest.find(['[', ']', ',']).unwrap_or(rest.len());
        host.push_str(&rest[..end]);
        match rest.as_bytes().get(end) {
            Some(b'[') => {
                let (numbers, after) = rest[end + 1..].split_once(']')?;
                let first = numbers.split(['-', ',']).next()?;
                if first.is_empty() || !first.bytes().all(|byte| byte.is_ascii_digit()) {
                    return None;
                }
                host.push_str(first);
                rest = after;
            }
            Some(b']') => return None,
            _ if host.is_empty() => return None,
            _ => return Some(host),
        }
    }
}
