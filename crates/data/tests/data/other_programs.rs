//! Files as other programs write them: in gzip, joined, with numbers that JSON has not, in another encoding, of one
//! huge record.

use std::io::Write;

use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::json;

use crate::assert_error;
use crate::read::{Reading, TEMPLATE, lines, records};

const RECORD: &str = "{\"text\": \"the cat\"}\n";
const WANT: &str = "the⟦ cat⟧";

fn gzip(content: &str) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(content.as_bytes()).unwrap();
    encoder.finish().unwrap()
}

#[test]
fn files_in_gzip_are_read_whatever_they_are_called() {
    let list = format!("[{RECORD}]");
    for (name, content) in [
        ("a.jsonl.gz", RECORD),
        ("a.jsonl", RECORD),
        ("a.json.GZ", list.as_str()),
        ("a.json", list.as_str()),
        ("a.csv.gz", "\u{feff}text\nthe cat\n"),
        ("a.tsv", "text\nthe cat\n"),
        ("a.txt.gz", "the cat"),
    ] {
        assert_eq!(records(name, gzip(content)).unwrap(), [WANT], "{name}");
    }
    // As `cat` joins them, and one that only has the name.
    let joined = [gzip(RECORD), gzip(RECORD)].concat();
    assert_eq!(records("a.jsonl.gz", joined).unwrap(), [WANT; 2]);
    assert_eq!(records("a.jsonl.gz", RECORD).unwrap(), [WANT]);
    let whole = gzip(&RECORD.repeat(1000));
    assert_error(
        records("a.jsonl.gz", &whole[..whole.len() - 20]),
        &["cannot read data file", "a.jsonl.gz"],
    );
    for name in ["a.gz", "a.parquet.gz"] {
        assert_error(
            records(name, &whole),
            &[name, "is not a .txt", ".gz behind"],
        );
    }
    for (start, how) in [
        (&b"\x28\xb5\x2f\xfd"[..], "zstd"),
        (b"\xfd7zXZ\0", "xz"),
        (b"BZh91AY&SY", "bzip2"),
        (b"PK\x03\x04", "zip"),
    ] {
        let how = format!("it is compressed with {how}");
        assert_error(records("a.jsonl", start), &["a.jsonl", &how, "hint: "]);
    }
}

#[test]
fn byte_order_marks_of_joined_files_are_no_part_of_their_records() {
    let record = format!("\u{feff}{RECORD}");
    let pretty = "\u{feff}{\n\"text\":\n\"the cat\"}\n".repeat(2);
    for (name, content) in [
        ("a.jsonl", record.repeat(2)),
        ("a.json", record.repeat(2)),
        ("b.json", pretty.clone()),
        ("b.jsonl", pretty),
        // The first of the two has no line break at its end.
        ("c.json", record.trim_end().repeat(2)),
    ] {
        let reading = Reading::new(None);
        let read = reading.write(name, content).read(name, "").unwrap();
        assert_eq!(read.records, [WANT; 2], "{name}");
        assert!(read.warnings.is_empty(), "{read:?}");
    }
}

#[test]
fn numbers_that_python_writes_matter_where_something_reads_them() {
    let record = r#"{"text": "the cat", "score": NaN, "list": [-Infinity, {"a": Infinity}], "note": "NaN \" Infinity"}"#;
    for (name, content) in [
        ("a.jsonl", format!("{record}\n")),
        ("a.json", format!("[{record}]")),
        ("b.json", record.replace(": ", ":\n")),
        ("b.jsonl", record.replace(": ", ":\n")),
    ] {
        let reading = Reading::new(None);
        let read = reading.write(name, content).read(name, "").unwrap();
        assert_eq!(read.records, [WANT], "{name}");
        let [unread] = read.warnings.try_into().unwrap();
        let is_told = |field: &str| unread.contains(&format!("{field} (1 record"));
        assert!(
            ["list", "note", "score"].into_iter().all(is_told),
            "{unread}"
        );
    }
    let chat = json!({"messages": [{"role": "user", "content": "the"}, {"role": "assistant", "content": "cat", "weight": 0.5}]});
    for (line, part) in [
        (
            r#"{"text": NaN}"#.to_string(),
            "its text is number, expected a text",
        ),
        (r#"{"text": nan}"#.to_string(), "it is not valid JSON"),
        (
            r#"{"text": "a", "b": [NaN, }"#.to_string(),
            "it is not valid JSON",
        ),
        (
            lines(&[chat]).replace("0.5", "NaN"),
            "has weight NaN, expected 0 or 1",
        ),
    ] {
        assert_error(records("a.jsonl", line), &["a.jsonl line 1", part]);
    }
    // A template prints the number.
    let reading = Reading::new(Some(&TEMPLATE.replace("m.content", "m.score ~ m.content")));
    let chat = json!({"messages": [{"role": "user", "content": "the", "score": 0.5}, {"role": "assistant", "content": "cat"}]});
    let read = reading.write("a.jsonl", lines(&[chat]).replace("0.5", "-Infinity"));
    let read = read.read("a.jsonl", "").unwrap().records;
    assert!(read[0].to_lowercase().starts_with("<user>-inf"), "{read:?}");
}

#[test]
fn records_in_another_encoding_are_told_so() {
    let latin = b"{\"text\": \"na\xdf\"}\n".repeat(3);
    let reading = Reading::new(None);
    reading.write("a.jsonl", [RECORD.as_bytes(), &latin].concat());
    let read = reading.read("a.jsonl", "").unwrap();
    assert_eq!(read.records, [WANT]);
    let [told] = read.warnings.try_into().unwrap();
    let want = "skipped 3 records, the first a.jsonl line 2: it is not UTF-8\nhint: convert the file, e.g. with iconv";
    assert!(told.starts_with(want), "{told}");
    let list = [b"[", &latin[..latin.len() / 3], b"]"].concat();
    assert_error(
        records("a.json", list),
        &["a.json", "is not UTF-8", "hint: "],
    );
}

#[test]
fn a_record_that_is_too_long_is_an_error_with_its_line() {
    let texts = |name: &str, content: &str| {
        let reading = Reading::new(None);
        reading.write(name, content).data(name, "")?.texts()
    };
    let long = "a".repeat(64_000_000);
    for (content, line) in [
        (format!("{RECORD}{{\"text\": \"{long}\"}}\n{RECORD}"), 2),
        (format!("{{\"text\": \"{long}\"}}\n{RECORD}"), 1),
    ] {
        let place = format!("a.jsonl line {line}: the record has more than 64 MB");
        assert_error(texts("a.jsonl", &content), &[&place, "hint: "]);
    }
    let list = format!("[{RECORD},{{\"text\": \"{long}\"}}]");
    let place = "a.jsonl record 2: the record has more than 64 MB";
    assert_error(texts("a.jsonl", &list), &[place, "hint: "]);
    // A quote that is not closed takes the rest of the file.
    let cells = format!("text\non\n\"{long}{}", "b\n".repeat(5000));
    let place = "a.csv line 3: the row has more than 64 MB";
    assert_error(texts("a.csv", &cells), &[place, "is a quote never closed?"]);
    // A file that is one text is as long as it is.
    assert_eq!(texts("a.txt", &long).unwrap(), [long]);
}
