use std::fs;

use candle_train::Documents;

use crate::assert_error;

#[test]
fn a_file_is_one_document_of_which_only_line_endings_change() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.txt");
    // What Python's open(path, encoding="utf-8").read() makes of it, which the reference numbers rest on.
    fs::write(&path, " one\r\ntwo\n\rthree\r\r\n ").unwrap();
    let documents = Documents::read(&path).unwrap();
    assert_eq!(
        documents.iter().collect::<Vec<_>>(),
        [" one\ntwo\n\nthree\n\n "]
    );
    assert_eq!((documents.len(), documents.num_bytes()), (1, 18));
}

#[test]
fn a_folder_is_its_text_files_by_name() {
    let dir = tempfile::tempdir().unwrap();
    for (name, text) in [
        ("b.txt", "second"),
        ("a.TXT", "first"),
        ("c.md", "not text"),
    ] {
        fs::write(dir.path().join(name), text).unwrap();
    }
    fs::create_dir(dir.path().join("sub.txt")).unwrap();
    fs::write(dir.path().join("sub.txt/d.txt"), "not entered").unwrap();
    let documents = Documents::read(dir.path()).unwrap();
    assert_eq!(documents.iter().collect::<Vec<_>>(), ["first", "second"]);
}

#[test]
fn bad_data_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, content: &[u8]| {
        let path = dir.path().join(name);
        fs::write(&path, content).unwrap();
        path
    };
    let missing = dir.path().join("missing.txt");
    assert_error(Documents::read(missing), &["missing.txt", "hint:"]);
    assert_error(
        Documents::read(file("a.json", b"{}")),
        &["a.json", "not a .txt", "hint:"],
    );
    assert_error(
        Documents::read(file("empty.txt", b"")),
        &["empty.txt", "is empty"],
    );
    assert_error(
        Documents::read(file("blank.txt", b" \n\t")),
        &["blank.txt", "white space", "3 bytes"],
    );
    let latin = file("latin.txt", b"caf\xe9 noir");
    assert_error(
        Documents::read(latin),
        &["latin.txt", "UTF-8", "offset 3 of 9"],
    );

    let folder = tempfile::tempdir().unwrap();
    assert_error(
        Documents::read(folder.path()),
        &["no .txt file", "subfolders"],
    );
    fs::write(folder.path().join("x.txt"), "").unwrap();
    assert_error(Documents::read(folder.path()), &["x.txt", "is empty"]);
}
