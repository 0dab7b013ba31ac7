//! Every message that `docs/troubleshooting.md` explains is one that the source has.
//!
//! The first cell of each row of its tables has messages as code. In them `..`, a number and a word of capitals stand for what differs;
//! what lies between must be in a string of the source, where `{}` stands for it.

use std::fs;
use std::path::Path;

use regex::Regex;

use super::pages::{read, root};

/// What does not stand for itself in a message.
const PLACEHOLDER: &str = r"\.\.|\b[A-Z][A-Z_]*\b|\b\d+\b";

/// How much of a message must be in strings, at least, for it to be known by that.
const FEWEST_CHARS: usize = 10;

/// The text of the strings of a Rust file, without its comments.
fn strings(source: &str) -> Vec<String> {
    let token = [
        r"//[^\n]*",
        r"/\*.*?\*/",
        r##"r"(?<raw>[^"]*)""##,
        r###"r#"(?<hashed>.*?)"#"###,
        r"'(?:[^'\\]|\\[^\n]*?)'",
        r#""(?<text>(?:[^"\\]|\\.)*)""#,
    ];
    let token = Regex::new(&format!("(?s){}", token.join("|"))).unwrap();
    let line_end = Regex::new(r"\\\n\s*").unwrap();
    let mut strings = Vec::new();
    for found in token.captures_iter(source) {
        if let Some(text) = found.name("text") {
            let text = line_end.replace_all(text.as_str(), "");
            strings.push(text.replace("\\\"", "\"").replace("\\n", "\n"));
        } else if let Some(text) = found.name("raw").or(found.name("hashed")) {
            strings.push(text.as_str().to_string());
        }
    }
    strings
}

fn add_strings(folder: &Path, all: &mut Vec<String>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            add_strings(&path, all);
        } else if path.extension().is_some_and(|ending| ending == "rs") {
            all.extend(strings(&fs::read_to_string(path).unwrap()));
        }
    }
}

/// Of all libraries and the command.
fn strings_of_the_source() -> Vec<String> {
    let mut all = Vec::new();
    add_strings(&root().join("models/src"), &mut all);
    for entry in fs::read_dir(root().join("crates")).unwrap() {
        add_strings(&entry.unwrap().path().join("src"), &mut all);
    }
    all
}

/// The messages in the first cells of the tables of a page.
fn messages(page: &str) -> Vec<String> {
    let code = Regex::new(r"`([^`]+)`").unwrap();
    let rows = page.lines().filter_map(|line| line.strip_prefix("| "));
    let cells = rows.filter_map(|row| row.split(" | ").next());
    let codes = cells.flat_map(|cell| code.captures_iter(cell).map(|code| code[1].to_string()));
    codes.collect()
}

/// What of a message is not in any string; empty if all of it is.
fn missing(message: &str, strings: &[String]) -> Vec<String> {
    // Who shows a warning puts the word before it.
    let message = message.strip_prefix("warning: ").unwrap_or(message);
    if strings.iter().any(|string| string.contains(message)) {
        return Vec::new();
    }
    let placeholder = Regex::new(PLACEHOLDER).unwrap();
    let inserted = Regex::new(r"\{[^{}]*\}").unwrap();
    let is_border = |c: char| c.is_whitespace() || ":;,()\"'".contains(c);
    let parts = placeholder.split(message);
    let parts: Vec<&str> = parts.map(|part| part.trim_matches(is_border)).collect();
    let is_known = |part: &str| {
        let mut pieces = strings.iter().flat_map(|string| inserted.split(string));
        pieces.any(|piece| piece.contains(part))
    };
    let unknown = parts.iter().filter(|part| !is_known(part));
    let unknown: Vec<String> = unknown.map(|part| part.to_string()).collect();
    let num_chars: usize = parts.iter().map(|part| part.len()).sum();
    match unknown.is_empty() && num_chars < FEWEST_CHARS {
        true => vec![message.to_string()],
        false => unknown,
    }
}

#[test]
fn messages_that_are_explained_are_in_the_source() {
    let strings = strings_of_the_source();
    let messages = messages(&read("docs/troubleshooting.md"));
    assert!(messages.len() > 100, "{}", messages.len());
    let missing = messages
        .iter()
        .map(|message| (message, missing(message, &strings)));
    let missing: Vec<String> = missing
        .filter(|(_, parts)| !parts.is_empty())
        .map(|(message, parts)| format!("{message}: {parts:?}"))
        .collect();
    assert!(missing.is_empty(), "{}", missing.join("\n"));
}

#[test]
fn a_message_that_no_string_has_is_found() {
    let source = "// \"a comment\"\nlet quote = '\"'; bail!(\"rank {rank} has \\\n     left the \\\"run\\\" after {} s\")";
    let strings = strings(source);
    assert_eq!(strings, ["rank {rank} has left the \"run\" after {} s"]);
    for (message, is_there) in [
        ("rank N has left the \"run\" after 3 s", true),
        (".. has left the", true),
        ("rank N has left the walk", false),
        ("rank .. has joined", false),
        ("a comment", false),
        ("N s", false),
    ] {
        assert_eq!(missing(message, &strings).is_empty(), is_there, "{message}");
    }
}
