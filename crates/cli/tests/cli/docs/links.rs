//! Links of the pages lead somewhere, in a book and where the files are.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Component, Path, PathBuf};

use regex::Regex;

use super::pages::{pages, read, root, split};

/// Code spans, in which there are no links.
fn without_code(text: &str) -> String {
    let span = Regex::new(r"`[^`\n]*`").unwrap();
    span.replace_all(text, "").into_owned()
}

/// What links and pictures of a page name.
fn targets(page: &str) -> Vec<String> {
    let text = without_code(&split(page).1);
    let link = Regex::new(r"\]\(([^)\s]+)\)").unwrap();
    link.captures_iter(&text)
        .map(|link| link[1].to_string())
        .collect()
}

/// The names that forges and mdbook give the headings of a page.
fn anchors(page: &str) -> BTreeSet<String> {
    let (_, text) = split(page);
    let mut anchors = BTreeSet::new();
    for heading in text.lines().filter_map(|line| line.split_once("# ")) {
        if !heading.0.chars().all(|c| c == '#') {
            continue;
        }
        let name = heading.1.trim().to_lowercase();
        let name = name.chars().filter_map(|c| match c {
            ' ' => Some('-'),
            c if c.is_alphanumeric() || c == '-' || c == '_' => Some(c),
            _ => None,
        });
        let name: String = name.collect();
        let mut numbered = (1..).map(|n| format!("{name}-{n}"));
        let free = match anchors.contains(&name) {
            false => Some(name),
            true => numbered.find(|name| !anchors.contains(name)),
        };
        anchors.extend(free);
    }
    anchors
}

/// `from/../to` as `to`.
fn joined(folder: &Path, link: &str) -> PathBuf {
    let mut path = PathBuf::new();
    for part in folder.join(link).components() {
        match part {
            Component::ParentDir => {
                path.pop();
            }
            part => path.push(part),
        }
    }
    path
}

/// What is wrong with a link of a page.
fn fault(page: &str, link: &str) -> Option<String> {
    let (file, anchor) = match link.split_once('#') {
        None => (link, None),
        Some((file, anchor)) => (file, Some(anchor)),
    };
    let target = match file.is_empty() {
        true => PathBuf::from(page),
        false => joined(Path::new(page).parent().unwrap(), file),
    };
    if !root().join(&target).exists() {
        return Some("there is no such file".to_string());
    }
    // A book has what is in the folder alone.
    if page.starts_with("docs/") && !target.starts_with("docs") {
        return Some("the book does not have it; name it in `code` instead".to_string());
    }
    let anchor = anchor?;
    let text = read(target.to_str().unwrap());
    (!anchors(&text).contains(anchor)).then(|| format!("{} has no such heading", target.display()))
}

#[test]
fn links_lead_to_files_and_headings() {
    let mut faults = Vec::new();
    let mut count = 0;
    for page in pages() {
        for link in targets(&read(&page)) {
            if link.contains("://") {
                continue;
            }
            count += 1;
            faults.extend(fault(&page, &link).map(|fault| format!("{page}: {link}: {fault}")));
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    assert!(count > 100, "{count}");
}

#[test]
fn what_is_wrong_with_a_link_is_found() {
    let page = "# One\n## One\n```\n# no heading [a](nowhere)\n```\n`[a](b)` and [a](no.md), ![p](timeline.png)";
    assert_eq!(targets(page), ["no.md", "timeline.png"]);
    assert_eq!(anchors(page), ["one", "one-1"].map(String::from).into());
    for (link, is_wrong) in [
        ("no.md", true),
        ("chat.md", false),
        ("chat.md#no-such-heading", true),
        ("gpu/RESULTS.md", false),
        ("../README.md", true),
    ] {
        assert_eq!(fault("docs/lora.md", link).is_some(), is_wrong, "{link}");
    }
}

/// Folders from which pages name a file by less than its whole path.
fn folders_of(page: &str) -> Vec<PathBuf> {
    let models = root().join("models/src");
    // It is about this folder, and other crates have files of these names.
    if page == "docs/add-a-family.md" {
        return vec![models];
    }
    let crates = fs::read_dir(root().join("crates")).unwrap().flatten();
    let sources = crates.map(|entry| entry.path().join("src"));
    sources.chain([models, root().join("scripts")]).collect()
}

/// Files and examples of the repository that a page names without a link, and that are not there.
fn missing(page: &str, text: &str) -> Vec<String> {
    let whole =
        Regex::new(r"`((?:crates|docs|examples|models|tests)/[\w./-]+)`|(scripts/\w[\w./-]*\w)")
            .unwrap();
    // Of code: files of other kinds are mostly those of a user.
    let short = Regex::new(r"`([\w./-]+\.(?:cu|mjs|py|rs|sh))`").unwrap();
    let example = Regex::new(r"--example (\w+)").unwrap();
    let wholes = whole
        .captures_iter(text)
        .filter_map(|found| found.get(1).or(found.get(2)))
        .filter(|named| !root().join(named.as_str()).exists());
    let (folders, root_dir) = (folders_of(page), root());
    let shorts = short.captures_iter(text).filter_map(|found| found.get(1));
    let shorts = shorts.filter(|named| {
        let mut folders = folders
            .iter()
            .chain([&root_dir])
            .map(|it| it.join(named.as_str()));
        !whole.is_match(&format!("`{}`", named.as_str())) && !folders.any(|path| path.exists())
    });
    // NAME is one that the reader chooses.
    let files = wholes.chain(shorts).map(|named| named.as_str().to_string());
    let files = files.filter(|path| !path.contains("NAME"));
    let is_there = |name: &str| {
        let crates = fs::read_dir(root().join("crates")).unwrap().flatten();
        let folders = crates.map(|entry| entry.path().join("examples"));
        let mut folders = folders.chain([root().join("examples")]);
        folders.any(|folder| folder.join(format!("{name}.rs")).exists())
    };
    let examples = example.captures_iter(text).map(|name| name[1].to_string());
    files
        .chain(examples.filter(|name| !is_there(name)))
        .collect()
}

#[test]
fn files_and_examples_that_are_named_are_there() {
    let faults = pages().into_iter().flat_map(|page| {
        let missing = missing(&page, &read(&page)).into_iter();
        missing.map(move |name| format!("{page}: {name}"))
    });
    let faults: Vec<String> = faults.collect();
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    let text = "`crates/no.rs`, run `scripts/no.py`, scripts/bench_train.py, cargo run --example no_such and --example custom_model";
    assert_eq!(
        missing("README.md", text),
        ["crates/no.rs", "scripts/no.py", "no_such"]
    );
    let text = "`lines.py`, `placement.rs`, `pipeline/model_part.rs`, `pipeline/no.rs`, `NAME.rs`, `lm_head.rs`";
    assert_eq!(missing("docs/design.md", text), ["pipeline/no.rs"]);
    let missing = missing("docs/add-a-family.md", text);
    assert_eq!(missing[..2], ["lines.py", "placement.rs"]);
    assert_eq!(missing.len(), 4);
}

/// Every page of `docs` is in the book, once.
#[test]
fn the_book_has_every_page() {
    let mut listed = targets(&read("docs/SUMMARY.md"));
    listed.sort();
    let all = pages();
    let of_docs = all.iter().filter_map(|page| page.strip_prefix("docs/"));
    let of_docs: Vec<&str> = of_docs.filter(|page| *page != "SUMMARY.md").collect();
    assert_eq!(listed, of_docs);
    assert!(fs::exists(root().join("docs/book.toml")).unwrap());
}
