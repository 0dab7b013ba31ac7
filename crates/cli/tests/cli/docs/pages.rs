//! The pages that people read: README.md, CONTRIBUTING.md and what is in `docs`.

use std::fs;
use std::path::{Path, PathBuf};

use regex::Regex;

/// The folder of the repository.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// What a file of the repository says.
pub fn read(path: &str) -> String {
    let read = fs::read_to_string(root().join(path));
    read.unwrap_or_else(|err| panic!("{path}: {err}"))
}

/// The paths of all pages, from the folder of the repository.
pub fn pages() -> Vec<String> {
    let mut pages = vec!["README.md".to_string(), "CONTRIBUTING.md".to_string()];
    add_pages("docs", &mut pages);
    pages.sort();
    pages
}

fn add_pages(folder: &str, pages: &mut Vec<String>) {
    for entry in fs::read_dir(root().join(folder)).unwrap() {
        let entry = entry.unwrap();
        let path = format!("{folder}/{}", entry.file_name().to_str().unwrap());
        if entry.file_type().unwrap().is_dir() {
            // What mdbook makes of them.
            if path != "docs/book" {
                add_pages(&path, pages);
            }
        } else if path.ends_with(".md") {
            pages.push(path);
        }
    }
}

/// A block of code of a page.
pub struct CodeBlock {
    /// What stands behind the backticks that begin it.
    pub language: String,
    pub text: String,
}

/// The blocks of code of a page, and the page without them.
pub fn split(page: &str) -> (Vec<CodeBlock>, String) {
    let fence = Regex::new(r"(?ms)^ *```(\S*)\n(.*?)^ *```$").unwrap();
    let blocks = fence.captures_iter(page).map(|block| CodeBlock {
        language: block[1].to_string(),
        text: block[2].to_string(),
    });
    (blocks.collect(), fence.replace_all(page, "").into_owned())
}
