//! Data that is missing, empty, too short or not text.

use std::fs;

use super::workspace::{Workspace, refuses_file};

#[test]
fn data_that_is_missing_empty_or_not_text_is_named() {
    let file = "text.txt";
    refuses_file(
        file,
        |path| fs::remove_file(path).unwrap(),
        &["cannot open data", "text.txt"],
    );
    refuses_file(
        file,
        |path| fs::write(path, "").unwrap(),
        &["text.txt", "is empty"],
    );
    refuses_file(
        file,
        |path| fs::write(path, " \n\t\r\n ").unwrap(),
        &["text.txt", "white space (6 bytes)"],
    );
    refuses_file(
        file,
        |path| fs::write(path, b"caf\xe9 au lait").unwrap(),
        &["not UTF-8", "offset 3 of 12"],
    );
}

#[test]
fn data_that_is_shorter_than_one_sequence_is_an_error_with_both_lengths() {
    refuses_file(
        "text.txt",
        |path| fs::write(path, "Once more").unwrap(),
        &["tokens", "16"],
    );
}

#[test]
fn data_that_is_no_text_file_nor_a_folder_of_them_is_an_error() {
    let workspace = Workspace::new();
    let with = |name: &str| {
        workspace
            .finetune()
            .flag("--data", workspace.path(name).display())
    };
    fs::copy(workspace.path("text.txt"), workspace.path("text.csv")).unwrap();
    workspace.refuses(&with("text.csv"), &["text.csv", "not a .txt file"]);
    fs::create_dir(workspace.path("texts")).unwrap();
    workspace.refuses(&with("texts"), &["texts", "has no .txt file"]);
    fs::create_dir(workspace.path("texts/inner.txt")).unwrap();
    workspace.refuses(&with("texts"), &["texts", "has no .txt file"]);
    fs::copy(workspace.path("text.txt"), workspace.path("texts/a.txt")).unwrap();
    fs::write(workspace.path("texts/b.txt"), "").unwrap();
    workspace.refuses(&with("texts"), &["texts/b.txt", "is empty"]);
    fs::write(workspace.path("texts/b.txt"), "The second document.").unwrap();
    with("texts").succeeds();
}
