//! Records in cells.

use crate::assert_error;
use crate::read::{Reading, TEMPLATE, records};

#[test]
fn a_row_is_a_record_with_the_names_of_the_first_one() {
    for (name, content) in [
        ("a.csv", "prompt,completion\nthe cat,sat\non,the mat\n"),
        (
            "a.CSV",
            "\u{feff}prompt,completion\r\nthe cat,sat\r\n\r\non,the mat",
        ),
        (
            "a.tsv",
            "prompt\tcompletion\nthe cat\tsat\n\non\tthe mat\n\n",
        ),
        (
            "a.csv",
            "\"prompt\",\"completion\"\r\n\"the cat\",\"sat\"\r\n\"on\",\"the mat\"\r\n",
        ),
        (
            "a.csv",
            "system,prompt,completion\n,the cat,sat\n,on,the mat\n",
        ),
    ] {
        let want = ["the cat⟦sat⟧", "on⟦the mat⟧"];
        assert_eq!(records(name, content).unwrap(), want, "{content:?}");
    }
    let quoted = "completion,prompt\n\"a \"\"b\"\",\r\nc\",\"x\n\ny\"\n";
    assert_eq!(records("a.csv", quoted).unwrap(), ["x\n\ny⟦a \"b\",\r\nc⟧"]);
    let huge = "the cat ".repeat(200_000);
    let content = format!("text\n\"{huge}\"\non\n");
    let read = records("a.csv", content).unwrap();
    assert_eq!(read[0].len(), huge.len() + "⟦⟧".len());
    assert_eq!(read.len(), 2);
}

#[test]
fn lists_in_cells_are_read_as_json() {
    let turns = r#""[{""role"": ""user"", ""content"": ""the cat""}, {""role"": ""assistant"", ""content"": ""sat""}]""#;
    let want = ["<user>the cat<assistant>⟦sat⟧"];
    for (name, turns) in [
        ("messages", turns.to_string()),
        (
            "conversations",
            turns.replace("role", "from").replace("content", "value"),
        ),
    ] {
        let content = format!("{name},tools\n{turns},\n");
        assert_eq!(records("a.csv", content).unwrap(), want);
    }
    let pair = r#""[{""role"": ""user"", ""content"": ""the cat""}]","[{""role"": ""assistant"", ""content"": ""sat""}]""#;
    let content = format!("prompt,completion\n{pair}\n");
    assert_eq!(records("a.csv", content).unwrap(), want);
    // A list of something else is text.
    let content = "prompt,completion\n[1],\"[{\"\"a\"\": 2}]\"\n";
    assert_eq!(records("a.csv", content).unwrap(), ["[1]⟦[{\"a\": 2}]⟧"]);
    let history = "instruction,output,history\non,mat,\"[[\"\"the cat\"\",\"\"sat\"\"]]\"\n";
    assert_eq!(
        records("a.csv", history).unwrap(),
        ["<user>the cat<assistant>⟦sat⟧<user>on<assistant>⟦mat⟧"]
    );
    let python = "messages\n\"[{'role': 'user'}]\"\n";
    assert_error(
        records("a.csv", python),
        &["a.csv line 2: its messages is a text", "not valid JSON"],
    );
    assert_error(records("a.csv", "messages\n{}\n"), &["expected a list"]);
    let tools = format!("messages,tools\n{turns},\"[{{\"\"name\"\": \"\"f\"\"}}]\"\n");
    let reading = Reading::new(Some(
        "{{ tools | tojson }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}",
    ));
    let read = reading.write("a.csv", tools).read("a.csv", "").unwrap();
    assert_eq!(
        read.records,
        [r#"[{"name": "f"}]<user>the cat<assistant>⟦sat⟧"#]
    );
}

#[test]
fn rows_that_are_none_are_told_with_their_lines() {
    for line_end in ["\n", "\r\n"] {
        let lines = [
            "text,id", "\"the", "cat\",1", "", "on,2,3", "sat", ",4", "mat,5",
        ];
        let content = lines.join(line_end);
        let reading = Reading::new(Some(TEMPLATE));
        let read = reading.write("a.csv", content).read("a.csv", "").unwrap();
        assert_eq!(read.records.len(), 2);
        assert_eq!(
            read.warnings[..3],
            [
                "skipped a.csv line 5: it has 3 cells, expected 2, one for each column of the first row",
                "skipped a.csv line 6: it has 1 cell, expected 2, one for each column of the first row",
                "skipped a.csv line 7: its fields are [\"id\"], expected text; prompt and completion; messages; instruction and output; or conversations\nhint: --columns reads them from columns of other names, as in --columns prompt=question,completion=answer, or with a chat template instruction=question,output=answer",
            ]
        );
        assert!(
            read.warnings[3].contains("id (2 records, the first a.csv line 2)"),
            "{read:?}"
        );
    }
    let latin = b"text\ncaf\xe9\n".as_slice();
    assert_error(
        records("a.csv", latin),
        &["a.csv line 2: its text is not UTF-8"],
    );
}

#[test]
fn a_file_of_cells_that_is_none_is_an_error() {
    for (content, parts) in [
        (
            b"text,id\non,1\n\"the cat,2\nmat,3\n".as_slice(),
            ["a quote is opened in the row of line 3", "hint: "],
        ),
        (b"text,\"id\n", ["in the row of line 1", "never closed"]),
        (
            b"text,id,text\n1,2,3\n",
            ["two columns \"text\"", "first row"],
        ),
        (b"caf\xe9\nx\n", ["name of column 1 is not UTF-8", "hint: "]),
        (b"", ["a.csv: it is empty", ""]),
        (b"\n \xef\xbb\xbf", ["no record", ""]),
        (
            b"text\n",
            ["no record from which anything can be learned", ""],
        ),
        (b"\xff\xfet\0e\0", ["is in UTF-16", "hint: "]),
    ] {
        assert_error(records("a.csv", content), &parts);
    }
    // Programs that number rows leave the name of the first column out.
    let numbered = ",text\n0,the cat\n1,on\n";
    assert_eq!(records("a.csv", numbered).unwrap(), ["the⟦ cat⟧", "on⟦⟧"]);
}

#[test]
fn columns_of_cells_may_be_named() {
    let reading = Reading::new(Some(TEMPLATE));
    reading.write("a.tsv", "question\tanswer\nthe cat\tsat\n");
    let read = reading.read("a.tsv", "prompt=question,completion=answer");
    assert_eq!(read.unwrap().records, ["the cat⟦sat⟧"]);
    // One without anything in its cells is there.
    reading.write("a.csv", "body,who\nthe cat,\n");
    let read = reading.read("a.csv", "text=body,system=who").unwrap();
    assert_eq!(read.records, ["the⟦ cat⟧"]);
    assert_error(
        reading.read("a.csv", "text=who"),
        &["its fields are [\"body\"]"],
    );
}
