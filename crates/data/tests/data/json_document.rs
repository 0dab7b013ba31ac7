//! Files of JSON that have a record in each line, and those that are one document.

use serde_json::{Value, json};

use crate::assert_error;
use crate::read::{Reading, TEMPLATE, lines, records};

/// Two records, and what becomes of them.
fn two() -> ([Value; 2], [&'static str; 2]) {
    let records = [
        json!({"text": "the cat", "tags": [{"a": 1}]}),
        json!({"prompt": "on\n", "completion": "sat"}),
    ];
    (records, ["the⟦ cat⟧", "on\n⟦sat⟧"])
}

#[test]
fn an_array_is_read_as_its_records_in_both_formats() {
    let (two, want) = two();
    let list = json!(two);
    let spelled = |value: &Value| {
        let pretty = serde_json::to_string_pretty(value).unwrap();
        let windows = format!("\u{feff}\r\n \n{}\r\n", pretty.replace('\n', "\r\n"));
        [
            value.to_string(),
            format!("\n{value}\n \n"),
            pretty,
            windows,
        ]
    };
    let mut contents = spelled(&list).to_vec();
    for name in ["data", "train", "examples", "rows"] {
        contents.extend(spelled(
            &json!({"version": "2", "empty": [], "names": ["a"], name: list}),
        ));
    }
    contents.extend(spelled(&json!({"anything": list})));
    contents.push(
        two.each_ref()
            .map(|record| spelled(record)[2].clone())
            .join("\n"),
    );
    contents.push(lines(&two));
    for content in contents {
        for name in ["a.json", "a.jsonl", "a.ndjson"] {
            assert_eq!(records(name, &content).unwrap(), want, "{name}: {content}");
        }
    }
    for content in spelled(&two[0]) {
        for name in ["a.json", "a.jsonl"] {
            assert_eq!(
                records(name, &content).unwrap(),
                want[..1],
                "{name}: {content}"
            );
        }
    }
}

#[test]
fn an_object_with_fields_of_a_record_is_one() {
    let turns = json!([{"role": "user", "content": "on"}, {"role": "assistant", "content": "sat"}]);
    let want = ["<user>on<assistant>⟦sat⟧"];
    let record = json!({"messages": turns}).to_string();
    for name in ["a.json", "a.jsonl"] {
        assert_eq!(records(name, &record).unwrap(), want);
        let reading = Reading::new(Some(TEMPLATE));
        reading.write(name, json!({"dialogue": turns}).to_string());
        assert_eq!(
            reading.read(name, "messages=dialogue").unwrap().records,
            want
        );
        assert_error(
            reading.read(name, ""),
            &["its fields are [\"content\", \"role\"]"],
        );
        for two_lists in [
            json!({"train": [{"text": "a"}], "test": [{"text": "b"}]}),
            json!({"data": [{"text": "a"}, 3]}),
            json!({"data": {"text": "a"}}),
        ] {
            reading.write(name, two_lists.to_string());
            assert_error(reading.read(name, ""), &["its fields are [\""]);
        }
        reading.write(name, json!({"chosen": turns, "rejected": 0}).to_string());
        assert_error(
            reading.read(name, ""),
            &["it has chosen", "preference data"],
        );
    }
}

#[test]
fn a_damaged_first_line_leaves_the_other_lines_what_they_are() {
    let good = "{\"text\": \"the cat\"}\n";
    for first in [
        "{\"text\":",
        "{\"text\": [",
        "[",
        "{",
        "{\"text\": \"the",
        "]",
        "[]",
        "3",
        "x",
        "[{\"text\": \"a\"},",
    ] {
        let reading = Reading::new(None);
        reading.write("a.jsonl", format!("{first}\n{good}{good}"));
        let read = reading.read("a.jsonl", "").unwrap();
        assert_eq!(read.records.len(), 2, "{first}");
        assert!(
            read.warnings[0].starts_with("skipped a.jsonl line 1: it is"),
            "{read:?}"
        );
    }
    for content in [
        "[{\"text\": \"a\"}",
        "{\"text\"\n: \"a\"",
        "",
        " \n",
        "[1]\n]",
        "x",
    ] {
        assert_error(
            records("a.json", content),
            &["a.json\" is not valid JSON: "],
        );
    }
    // Places are records of a document, and lines of others.
    let reading = Reading::new(None);
    for (content, place) in [
        ("[{\"text\": \"the cat\"},\n3]", "record 2"),
        ("{\"text\": \"the cat\"}\n\n3", "line 3"),
    ] {
        for name in ["a.json", "a.jsonl"] {
            let read = reading.write(name, content).read(name, "").unwrap();
            assert_eq!(
                read.warnings,
                [format!(
                    "skipped {name} {place}: it is number, expected an object"
                )]
            );
        }
    }
}

#[test]
fn a_list_beside_other_fields_is_a_part_of_a_record() {
    // The fields of these records have other names, and their passages are none.
    let record =
        json!({"question": "q", "answer": "a", "passages": [{"text": "one"}, {"text": "two"}]});
    for name in ["a.json", "a.jsonl"] {
        let read = records(name, record.to_string());
        let reason = read.unwrap_err().to_string();
        assert!(
            reason.contains("question") && reason.contains("--columns"),
            "{reason}"
        );
    }
}
