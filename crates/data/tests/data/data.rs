use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use candle_data::hub::DataUse;
use candle_data::{
    Data, DataReport, DataSpec, EncoderConfig, RecordEncoder, SampleConfig, Samples, TokenCache,
    Tokenizer, Tokens,
};

use crate::assert_error;
use crate::read::{Reading, lines};
use serde_json::json;

fn tokenizer() -> Tokenizer {
    Tokenizer::train_bpe(["the cat sat on the mat\n"].into_iter(), 280).unwrap()
}

fn write(dir: &Path, name: &str, content: &str) {
    let path = dir.join(name);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, content).unwrap();
}

fn found(path: &Path) -> Data {
    Data::find(&[DataSpec::new(path)], DataUse::Training).unwrap()
}

/// The texts of what is found at these paths below `dir`.
fn texts(dir: &Path, paths: &[&str]) -> candle_core::Result<Vec<String>> {
    let specs: Vec<DataSpec> = paths
        .iter()
        .map(|path| DataSpec::new(dir.join(path)))
        .collect();
    Data::find(&specs, DataUse::Training)?.texts()
}

#[test]
fn files_folders_and_globs_are_read_in_order() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    // What Python's open(path, encoding="utf-8").read() makes of it, which the reference numbers rest on.
    write(dir, "b.txt", " one\r\ntwo\n\rthree\r\r\n ");
    write(
        dir,
        "a.jsonl",
        "\u{feff}{\"text\": \"first\"}\n\n  \n{\"text\": \"second\"}",
    );
    write(
        dir,
        "in/deep/c.JSON",
        r#"[{"text": "third"}, {"prompt": "fou", "completion": "rth"}]"#,
    );
    write(dir, "in/d.json", r#"{"text": "one record"}"#);
    write(
        dir,
        "in/e.json",
        "{\"text\": \"lines\"}\n{\"text\": \"of records\"}\n",
    );
    write(dir, "in/notes.md", "no data");
    assert_eq!(texts(dir, &["b.txt"]).unwrap(), [" one\ntwo\n\nthree\n\n "]);
    let inner = ["one record", "third", "fourth", "lines", "of records"];
    // Folders come among the files by name.
    let mut of_folder = texts(dir, &["in"]).unwrap();
    of_folder.sort_unstable();
    let mut sorted = inner.to_vec();
    sorted.sort_unstable();
    assert_eq!(of_folder, sorted);
    assert_eq!(
        texts(dir, &["a.jsonl", "in/d.json"]).unwrap(),
        ["first", "second", "one record"]
    );
    assert_eq!(
        texts(dir, &["*.jsonl", "in/**/*.JSON"]).unwrap(),
        ["first", "second", "third", "fourth"]
    );
    let data = found(dir);
    assert_eq!(data.skipped(), [dir.join("in/notes.md")]);

    // Hidden files, and what a glob finds more than once by a link to a folder.
    write(dir, "in/.ipynb_checkpoints/d.json", r#"{"text": "hidden"}"#);
    std::os::unix::fs::symlink("..", dir.join("in/deep/loop")).unwrap();
    assert_eq!(texts(dir, &["in"]).unwrap().len(), inner.len());
    assert_eq!(
        texts(dir, &["in/**/[de].json"]).unwrap(),
        ["one record", "lines", "of records"]
    );
    assert_eq!(texts(dir, &["*"]).unwrap().len(), 3 + inner.len());

    // Of programs for Windows.
    write(dir, "bom.txt", "\u{feff}text\r\n");
    assert_eq!(texts(dir, &["bom.txt"]).unwrap(), ["text\n"]);
    for name in ["wide.txt", "wide.jsonl", "wide.json"] {
        let words = "\u{feff}{\"text\": 1}\n".encode_utf16();
        let bytes: Vec<u8> = words.flat_map(u16::to_le_bytes).collect();
        fs::write(dir.join(name), bytes).unwrap();
        assert_error(texts(dir, &[name]), &[name, "is in UTF-16", "hint: "]);
        fs::remove_file(dir.join(name)).unwrap();
    }

    write(dir, "bad/f.json", "{\"text\"");
    assert_error(texts(dir, &["bad"]), &["f.json", "is not valid JSON"]);
    write(dir, "empty/notes.md", "");
    assert_error(
        texts(dir, &["empty"]),
        &["empty", "has no file that ends in"],
    );
    assert_error(
        texts(dir, &["missing"]),
        &["cannot open data", "missing", "hint:"],
    );
    assert_error(
        Data::find(&[DataSpec::new("org/name")], DataUse::Training),
        &[
            "cannot open data",
            "a data set on the hub is hub://datasets/org/name",
        ],
    );
    assert_error(
        texts(dir, &["in/notes.md"]),
        &[
            "notes.md",
            "not a .txt, .jsonl, .json, .csv, .tsv or .parquet file",
        ],
    );
    assert_error(texts(dir, &["*.nothing"]), &["no file matches"]);
}

#[test]
fn what_is_no_file_is_called_what_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let link =
        |target: &str, name: &str| std::os::unix::fs::symlink(target, dir.join(name)).unwrap();
    let made = std::process::Command::new("mkfifo")
        .arg(dir.join("a.jsonl"))
        .status();
    assert!(made.unwrap().success());
    link("/dev/zero", "b.txt");
    link("nothing", "c.txt");
    link("d.txt", "d.txt");
    write(dir, "e.txt", "text");
    write(
        dir,
        "f.csv",
        "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n",
    );
    for (name, parts) in [
        (
            "a.jsonl",
            ["it is a pipe", "hint: write what comes out of it"],
        ),
        ("b.txt", ["it is a device", "hint: "]),
        (
            "c.txt",
            ["is a link to nothing, which is missing", "hint: "],
        ),
        ("d.txt", ["it is in a loop of links", "hint: "]),
        ("f.csv", ["it is a Git LFS pointer", "hint: git lfs pull"]),
    ] {
        assert_error(texts(dir, &[name]), &[&[name], &parts[..]].concat());
    }
    assert_error(texts(dir, &["."]), &["f.csv", "it is a Git LFS pointer"]);
    fs::remove_file(dir.join("f.csv")).unwrap();
    // Among others they are skipped, and told.
    let skipped = ["a.jsonl", "b.txt", "c.txt", "d.txt"].map(|name| dir.join(name));
    let data = found(dir);
    assert_eq!(data.skipped(), skipped);
    let told = DataReport::default().warnings(&data).remove(0);
    assert!(told.contains("c.txt (a link to nothing)"), "{told}");
    assert!(!told.contains("a.jsonl (a link"), "{told}");
    assert_eq!(texts(dir, &["."]).unwrap(), ["text"]);
}

#[test]
fn a_file_without_text_is_skipped_among_others() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), "a.txt", "");
    write(dir.path(), "b.txt", "the cat");
    write(dir.path(), "c.jsonl", "");
    let (data, tokenizer) = (found(dir.path()), tokenizer());
    let encoder = RecordEncoder::new(&tokenizer, None, EncoderConfig::default()).unwrap();
    let tokens = Tokens::encode(&data, &encoder, None).unwrap();
    assert_eq!(tokens.num_records(), 1);
    let [warning] = tokens.report().warnings(&data).try_into().unwrap();
    assert!(warning.ends_with("a.txt: it is empty"), "{warning}");
}

#[test]
fn a_weight_is_what_follows_the_last_colon() {
    let spec = |text: &str| text.parse::<DataSpec>();
    assert_eq!(
        spec("a.jsonl:0.3").unwrap(),
        DataSpec {
            path: "a.jsonl".into(),
            weight: 0.3
        }
    );
    assert_eq!(spec("C:/a.jsonl").unwrap(), DataSpec::new("C:/a.jsonl"));
    assert_eq!(
        spec("hub://datasets/org/name").unwrap(),
        DataSpec::new("hub://datasets/org/name")
    );
    assert_eq!(spec("hub://datasets/org/name:2").unwrap().weight, 2.0);
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), "odd:3", "x");
    let odd = dir.path().join("odd:3");
    assert_eq!(spec(odd.to_str().unwrap()).unwrap(), DataSpec::new(&odd));
    for bad in ["a:0", "a:-1", "a:nan", "a:1e9", ""] {
        assert!(spec(bad).is_err(), "{bad}");
    }
}

#[test]
fn malformed_records_are_counted_and_placed() {
    let dir = tempfile::tempdir().unwrap();
    write(
        dir.path(),
        "a.jsonl",
        "{\"text\": \"the cat\"}\n{\"text\": \n\n{\"no\": 1}\n{\"text\": \"\"}\n",
    );
    write(dir.path(), "b.json", r#"[{"text": "the mat"}, 3]"#);
    let data = found(dir.path());
    let tokenizer = tokenizer();
    let tokens = Tokens::encode(
        &data,
        &RecordEncoder::new(&tokenizer, None, EncoderConfig::default()).unwrap(),
        None,
    )
    .unwrap();
    let report = tokens.report();
    assert_eq!((report.num_malformed, report.num_without_target), (3, 1));
    let samples = Samples::new(&tokens, SampleConfig::new(64)).unwrap();
    let num_tokens: usize = (0..2)
        .map(|record| tokens.record(record * 2).unwrap().ids.len())
        .sum();
    let summary = format!("2 texts, {num_tokens} tokens in 1 sequence");
    assert_eq!(samples.summary(), summary);
    let warnings = report.warnings(&data).join("\n");
    for part in [
        "a.jsonl line 2: it is not valid JSON",
        "a.jsonl line 4: its fields are [\"no\"]",
        "b.json record 2: it is number",
        "skipped 1 record without",
    ] {
        assert!(warnings.contains(part), "{part:?} is not in: {warnings}");
    }
    assert_eq!(tokens.num_records(), 3);
    let first = tokens.record(0).unwrap();
    assert_eq!(tokenizer.decode(&first.ids).unwrap(), "the cat");
}

#[test]
fn a_reason_that_many_records_have_is_told_once() {
    let reading = Reading::new(None);
    let chat = json!({"messages": [{"role": "user", "content": "the cat"}]});
    reading.write("a.jsonl", lines(&[(); 40].map(|()| chat.clone())));
    let err = reading.read("a.jsonl", "").unwrap_err().to_string();
    let place = reading.path("a.jsonl");
    let reason = "it is a conversation, and the checkpoint has no chat template";
    let hint = "hint: --chat-template llama3 (or another name, or a file) gives it one";
    assert_eq!(
        err.lines().take(2).collect::<Vec<_>>(),
        [
            &format!(
                "the data has no record from which anything can be learned: skipped 40 records, the first {} line 1: {reason}",
                place.display()
            ),
            hint
        ]
    );
    // Of several reasons each has its number and place, and after a few the rest is counted.
    let mut records = vec![
        chat.clone(),
        json!({"text": "the cat"}),
        json!({}),
        chat,
        json!({}),
    ];
    records.extend((0..9).map(|index| json!({format!("{index}"): 1})));
    let read = || reading.read("a.jsonl", "").unwrap();
    reading.write("a.jsonl", lines(&records));
    let told = read().warnings;
    assert_eq!(told.len(), 6);
    assert_eq!(
        told[0],
        format!("skipped 2 records, the first a.jsonl line 1: {reason}\n{hint}")
    );
    assert!(
        told[1].starts_with("skipped 2 records, the first a.jsonl line 3: its fields are [], ")
    );
    assert!(told[2].starts_with("skipped a.jsonl line 6: its fields are [\"0\"], "));
    // What to do is told once.
    assert_eq!(told.concat().matches("hint: --columns").count(), 1);
    assert_eq!(told[5], "skipped 6 records for other reasons");
    // The same comes from the cache.
    assert_eq!(read().warnings, told);
}

/// A cache with the tokens of a few texts, and what makes them again.
struct Cached {
    dir: tempfile::TempDir,
    tokenizer: Tokenizer,
}

impl Cached {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let lines = (0..40).map(|index| format!("{{\"text\": \"the cat sat {index} times\"}}\n"));
        write(dir.path(), "data/a.jsonl", &lines.collect::<String>());
        Self {
            dir,
            tokenizer: tokenizer(),
        }
    }

    fn tokens(&self) -> Tokens {
        let encoder = RecordEncoder::new(&self.tokenizer, None, EncoderConfig::default()).unwrap();
        let cache = TokenCache::new(self.dir.path().join("cache"));
        let data = found(&self.dir.path().join("data"));
        Tokens::encode(&data, &encoder, Some(&cache)).unwrap()
    }

    fn ids(&self) -> Vec<Vec<u32>> {
        let tokens = self.tokens();
        let records = 0..tokens.num_records();
        records
            .map(|index| tokens.record(index).unwrap().ids)
            .collect()
    }

    fn files(&self) -> Vec<PathBuf> {
        let files = fs::read_dir(self.dir.path().join("cache/tokens")).unwrap();
        files.map(|file| file.unwrap().path()).collect()
    }
}

#[test]
fn a_cached_file_that_is_damaged_anywhere_is_made_again() {
    let cached = Cached::new();
    let want = cached.ids();
    let [file] = cached.files().try_into().unwrap();
    let whole = fs::read(&file).unwrap();
    // Every part of the file: header, ids, index, report.
    let places = (0..whole.len()).step_by(61).chain([whole.len() - 1]);
    for place in places {
        let mut flipped = whole.clone();
        flipped[place] ^= 1 << (place % 8);
        let cut = &whole[..place];
        let longer = [&whole[..place], &[0; 4], &whole[place..]].concat();
        for damaged in [&flipped, cut, &longer] {
            fs::write(&file, damaged).unwrap();
            assert_eq!(cached.ids(), want, "damaged at {place}");
            assert!(fs::read(&file).unwrap() == whole, "damaged at {place}");
        }
    }
    assert_eq!(cached.files(), [file]);
}

/// What needs no memory is said to be large: no room is made for it.
#[test]
fn a_cached_file_whose_header_lies_is_made_again() {
    let cached = Cached::new();
    let want = cached.ids();
    let [file] = cached.files().try_into().unwrap();
    let whole = fs::read(&file).unwrap();
    let header: serde_json::Value = serde_json::from_slice(&whole[8..512]).unwrap();
    for name in ["ids", "records", "report"] {
        let mut header = header.clone();
        header[name]["shape"] = serde_json::json!([1u64 << 45, 0]);
        let offset = header[name]["data_offsets"][0].clone();
        header[name]["data_offsets"][1] = offset;
        let mut text = header.to_string().into_bytes();
        text.resize(504, b' ');
        let forged = [&whole[..8], &text, &whole[512..]].concat();
        fs::write(&file, forged).unwrap();
        assert_eq!(cached.ids(), want, "{name}");
        assert!(fs::read(&file).unwrap() == whole, "{name}");
    }
}

#[test]
fn what_a_killed_run_has_left_is_removed_and_not_what_another_one_writes() {
    let cached = Cached::new();
    cached.tokens();
    let [file] = cached.files().try_into().unwrap();
    let key = file.file_stem().unwrap().to_str().unwrap();
    let partial = |name: &str| file.with_file_name(format!(".{name}.saving"));
    let [dead, live, other] = [
        format!("{key}.tokens.AAAAA1"),
        format!("{key}.tokens.AAAAA2"),
        "4567.tokens.AAAAA3".into(),
    ]
    .map(|name| partial(&name));
    for path in [&dead, &live, &other] {
        fs::write(path, "half").unwrap();
    }
    let writing = fs::File::open(&live).unwrap();
    writing.lock().unwrap();
    fs::remove_file(&file).unwrap();
    cached.tokens();
    assert!(file.exists() && live.exists() && other.exists());
    assert!(!dead.exists());
}

#[test]
fn what_was_not_used_for_long_leaves_the_cache_when_something_new_comes() {
    let cached = Cached::new();
    cached.tokens();
    let [old] = cached.files().try_into().unwrap();
    let partial = old.with_file_name(".0123.tokens.AAAAAA.saving");
    fs::write(&partial, "half").unwrap();
    let age = |path: &Path, days: u64| {
        let file = fs::File::options().write(true).open(path).unwrap();
        let time = SystemTime::now() - Duration::from_secs(days * 24 * 60 * 60);
        file.set_modified(time).unwrap();
    };
    let add = |name: &str| write(cached.dir.path(), name, &format!("{{\"text\": {name:?}}}"));
    age(&old, 29);
    age(&partial, 31);
    add("data/b.jsonl");
    cached.tokens();
    assert!(old.exists() && !partial.exists());
    // Whoever uses a file keeps it.
    age(&old, 31);
    fs::remove_file(cached.dir.path().join("data/b.jsonl")).unwrap();
    cached.tokens();
    add("data/c.jsonl");
    cached.tokens();
    assert!(old.exists());
    age(&old, 31);
    add("data/d.jsonl");
    cached.tokens();
    assert!(!old.exists());
    assert_eq!(cached.files().len(), 3);
}

/// Somebody else who may write to the cache has put links and pipes there.
#[test]
fn the_cache_is_private_and_follows_no_links() {
    let cached = Cached::new();
    let want = cached.ids();
    let [file] = cached.files().try_into().unwrap();
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&file), 0o600);
    let whole = fs::read(&file).unwrap();
    let thesis = cached.dir.path().join("thesis");
    fs::write(&thesis, "years of work").unwrap();
    let old = SystemTime::now() - Duration::from_secs(1000);
    fs::File::options()
        .write(true)
        .open(&thesis)
        .unwrap()
        .set_modified(old)
        .unwrap();
    let key = file.file_stem().unwrap().to_str().unwrap();
    let [lock, partial] =
        ["lock", "tokens.AAAAAA.saving"].map(|end| file.with_file_name(format!(".{key}.{end}")));
    let link: fn(&Path, &Path) = |thesis, path| symlink(thesis, path).unwrap();
    let pipe: fn(&Path, &Path) = |_, path| {
        let made = std::process::Command::new("mkfifo").arg(path).status();
        assert!(made.unwrap().success());
    };
    for put in [link, pipe] {
        for path in [&file, &lock, &partial] {
            let _ = fs::remove_file(&file);
            put(&thesis, path);
            assert_eq!(cached.ids(), want);
            assert_eq!(fs::read(&file).unwrap(), whole);
            assert_eq!(fs::read_to_string(&thesis).unwrap(), "years of work");
            assert_eq!(fs::metadata(&thesis).unwrap().modified().unwrap(), old);
            let _ = fs::remove_file(&lock);
            let _ = fs::remove_file(&partial);
        }
    }
}
