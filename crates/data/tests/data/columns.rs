//! Fields of records that are read from columns of other names.

use candle_data::Columns;
use serde_json::json;

use crate::assert_error;
use crate::read::{Reading, TEMPLATE, lines};

#[test]
fn a_field_is_read_from_the_column_that_is_named_for_it() {
    let reading = Reading::new(None);
    let records = [
        json!({"question": "the cat\n", "answer": "sat", "id": 7}),
        json!({"question": "on\n", "answer": "the mat", "prompt": "not this", "completion": null}),
    ];
    reading.write("a.jsonl", lines(&records));
    let read = reading
        .read("a.jsonl", "prompt=question, completion=answer")
        .unwrap();
    assert_eq!(read.records, ["the cat\n⟦sat⟧", "on\n⟦the mat⟧"]);
    assert_eq!(
        read.warnings,
        [
            "nothing reads these fields of the records: id (1 record, the first a.jsonl line 1), prompt (1 record, the first a.jsonl line 2)"
        ]
    );
    // The same files with other columns are other tokens, although there is a cache.
    let swapped = reading
        .read("a.jsonl", "completion=question,prompt=answer")
        .unwrap();
    assert_eq!(swapped.records[0], "sat⟦the cat\n⟧");
    let texts = reading.data("a.jsonl", "prompt=question,completion=answer");
    assert_eq!(
        texts.unwrap().texts().unwrap(),
        ["the cat\nsat", "on\nthe mat"]
    );
}

#[test]
fn two_fields_may_change_places() {
    let reading = Reading::new(None);
    reading.write(
        "a.jsonl",
        lines(&[json!({"prompt": "the cat", "completion": "on"})]),
    );
    let swap = "prompt=completion,completion=prompt";
    assert_eq!(
        reading.read("a.jsonl", "").unwrap().records,
        ["the cat⟦on⟧"]
    );
    assert_eq!(
        reading.read("a.jsonl", swap).unwrap().records,
        ["on⟦the cat⟧"]
    );
    // What a field was called before is no field of this name any more.
    let read = reading.read("a.jsonl", "text=prompt,system=completion");
    assert_eq!(read.unwrap().records, ["the⟦ cat⟧"]);
    assert_error(
        reading.read("a.jsonl", "input=prompt"),
        &["its fields are [\"completion\", \"input\"]"],
    );
}

#[test]
fn a_spelling_with_a_named_field_comes_before_others() {
    let reading = Reading::new(Some(TEMPLATE));
    let turns =
        json!([{"role": "user", "content": "on"}, {"role": "assistant", "content": "the mat"}]);
    let record = json!({"body": "the cat sat", "messages": turns, "turns": turns});
    reading.write("a.jsonl", lines(&[record]));
    let records = |columns: &str| reading.read("a.jsonl", columns).unwrap().records;
    assert_eq!(records(""), ["<user>on<assistant>⟦the mat⟧"]);
    assert_eq!(records("messages=turns"), records(""));
    assert_eq!(records("text=body"), ["the⟦ cat sat⟧"]);
}

#[test]
fn a_column_that_no_record_has_is_an_error_with_those_that_are_there() {
    let reading = Reading::new(None);
    let records = [json!({"question": "the cat", "answer": "sat"}), json!([])];
    reading.write("a.jsonl", lines(&records));
    for columns in ["text=body", "text=question,system=body"] {
        assert_error(
            reading.read("a.jsonl", columns),
            &[
                "=body: no record has a column \"body\"",
                "\"answer\", \"question\"",
            ],
        );
    }
    reading.write("a.txt", "the cat");
    assert_error(
        reading.read("a.txt", "text=body"),
        &["--columns text=body", "no record has any column"],
    );
    let texts = reading.data("a.jsonl", "text=body").unwrap().texts();
    assert_error(texts, &["no record has a column \"body\""]);
    // One that a single record has is there.
    let more = lines(&[json!({"text": "on"}), json!({"body": "the cat"})]);
    let read = reading
        .write("a.jsonl", more)
        .read("a.jsonl", "text=body")
        .unwrap();
    assert_eq!(read.records, ["the⟦ cat⟧"]);
    assert!(
        read.warnings[0].contains("a.jsonl line 1: its fields are []"),
        "{read:?}"
    );
}

#[test]
fn columns_are_fields_with_names() {
    let columns = |text: &str| text.parse::<Columns>();
    for (text, parts) in [
        (
            "answer",
            ["\"answer\" is no FIELD=COLUMN", "prompt=question"],
        ),
        ("", ["\"\" is no FIELD=COLUMN", "such as"]),
        (
            "reply=a",
            ["no field \"reply\"", "text, prompt, completion, messages"],
        ),
        ("text=a,prompt =b,text=c", ["names text twice", ""]),
        (
            "prompt=a,completion=a",
            ["both prompt and completion", "\"a\""],
        ),
        ("prompt=", ["prompt= names no column", ""]),
    ] {
        let err = columns(text).unwrap_err();
        for part in parts {
            assert!(err.contains(part), "{part:?} is not in: {err}");
        }
    }
    for text in [
        "prompt=question,completion=answer",
        "text=a, b=c",
        "tools= =,x",
    ] {
        let parsed = columns(text);
        // `b` is no field.
        match text {
            "text=a, b=c" => assert!(parsed.unwrap_err().contains("no field \"b\"")),
            text => assert_eq!(parsed.unwrap().to_string(), text),
        }
    }
}

#[test]
fn names_of_columns_may_be_anything() {
    let reading = Reading::new(None);
    for name in ["the answer, or what=it is", " ", "Ω", "a.b[0]"] {
        reading.write("a.jsonl", lines(&[json!({name: "the cat"})]));
        let columns = format!("text={name}");
        match reading.read("a.jsonl", &columns) {
            Ok(read) => assert_eq!(read.records, ["the⟦ cat⟧"], "{name}"),
            // After a comma `=` begins another one.
            Err(err) => {
                assert!(name.contains(", or what=") && err.to_string().contains("no field"))
            }
        }
    }
    reading.write("a.jsonl", lines(&[json!({"a=b, c": "the cat"})]));
    assert_eq!(
        reading.read("a.jsonl", "text=a=b, c").unwrap().records,
        ["the⟦ cat⟧"]
    );
}

#[test]
fn the_chosen_answers_of_preference_data_may_be_read() {
    let reading = Reading::new(Some(TEMPLATE));
    let turn = |role: &str, content: &str| json!({"role": role, "content": content});
    let (good, bad) = (turn("assistant", "sat"), turn("assistant", "mat"));
    for (record, columns, want) in [
        (
            json!({"prompt": "the cat", "chosen": "sat", "rejected": "on"}),
            "completion=chosen",
            "the cat⟦sat⟧",
        ),
        (
            json!({"prompt": [turn("user", "the cat")], "chosen": [good], "rejected": [bad]}),
            "completion=chosen",
            "<user>the cat<assistant>⟦sat⟧",
        ),
        (
            json!({"prompt": "q", "chosen": [turn("user", "the cat"), good], "rejected": [bad]}),
            "messages=chosen",
            "<user>the cat<assistant>⟦sat⟧",
        ),
        (
            json!({"instruction": "the cat", "chosen": "sat", "rejected": "on"}),
            "output=chosen",
            "<user>the cat<assistant>⟦sat⟧",
        ),
        (
            json!({"chosen": "the cat", "rejected": "on"}),
            "text=chosen",
            "the⟦ cat⟧",
        ),
    ] {
        reading.write("a.jsonl", lines(&[record]));
        let hint = format!("hint: --columns {columns} ");
        let parts = [
            "a.jsonl line 1",
            "chosen and rejected",
            "DPO",
            "preference data",
            &hint,
        ];
        assert_error(reading.read("a.jsonl", ""), &parts);
        let read = reading.read("a.jsonl", columns).unwrap();
        assert_eq!(read.records, [want]);
        assert!(read.warnings[0].contains("rejected (1 record"), "{read:?}");
    }
}
