//! Records in the spellings that people use: what of them is learned, what is refused, and what is told.

use candle_data::{EncoderConfig, Record, RecordEncoder, RecordError, RecordFormat, Tokenizer};
use minijinja::Value;
use serde_json::json;

use crate::assert_error;
use crate::read::{Reading, TEMPLATE, lines};

fn tokenizer() -> Tokenizer {
    Tokenizer::train_bpe(["the cat sat on the mat\n"].into_iter(), 280).unwrap()
}

fn parse(json: &str) -> Result<(RecordFormat, Record), RecordError> {
    Record::parse(&serde_json::from_str::<Value>(json).unwrap())
}

/// Roles and contents of a conversation.
fn turns(record: &Record) -> Vec<(String, String)> {
    let (Record::Chat(chat) | Record::Instruction { chat, .. }) = record else {
        panic!("{record:?} is no conversation");
    };
    let field = |message: &Value, name: &str| message.get_attr(name).unwrap().to_string();
    let messages = chat.messages().iter();
    messages
        .map(|message| (field(message, "role"), field(message, "content")))
        .collect()
}

#[test]
fn records_are_known_by_their_fields() {
    let pair = |role: &str, content: &str| (role.to_string(), content.to_string());
    let messages = r#"{"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}], "id": 7}"#;
    let (format, record) = parse(messages).unwrap();
    assert_eq!(
        (format, turns(&record)),
        (RecordFormat::Messages, vec![pair("user", "ab")])
    );
    let share_gpt = r#"{"system": "s", "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}"#;
    let (format, record) = parse(share_gpt).unwrap();
    let want = vec![
        pair("system", "s"),
        pair("user", "q"),
        pair("assistant", "a"),
    ];
    assert_eq!((format, turns(&record)), (RecordFormat::ShareGpt, want));
    let system = r#"{"system": "s", "messages": [{"role": "system", "content": "s"}]}"#;
    assert_eq!(turns(&parse(system).unwrap().1), [pair("system", "s")]);
    let (format, record) = parse(r#"{"instruction": "i", "input": "", "output": "o"}"#).unwrap();
    assert_eq!(
        (format, turns(&record)),
        (
            RecordFormat::Alpaca,
            vec![pair("user", "i"), pair("assistant", "o")]
        )
    );
    let (_, record) =
        parse(r#"{"instruction": "i", "input": "x", "output": "o", "text": "all"}"#).unwrap();
    assert_eq!(turns(&record)[0], pair("user", "i\nx"));
    let (format, _) = parse(r#"{"prompt": "p", "completion": "c"}"#).unwrap();
    assert_eq!(format, RecordFormat::Completion);
    assert_eq!(
        parse(r#"{"text": "t", "messages": null}"#).unwrap().0,
        RecordFormat::Text
    );
    for (json, part) in [
        ("[]", "expected an object"),
        ("{}", "its fields are []"),
        (r#"{"text": 3}"#, "its text is number, expected a text"),
        (r#"{"messages": []}"#, "has no messages"),
        (
            r#"{"messages": "x"}"#,
            "its messages is a text, expected a list",
        ),
        (
            r#"{"messages": [{"content": "x"}]}"#,
            "message 0 has no role",
        ),
        (
            r#"{"messages": [{"role": "user", "content": [{"type": "image"}]}]}"#,
            "message 0 has a part that is no text",
        ),
        (
            r#"{"system": "s", "messages": [{"role": "system", "content": "t"}]}"#,
            "has a system, and its messages begin with another one",
        ),
        (
            r#"{"conversations": [{"from": "nobody", "value": "x"}]}"#,
            "turn 0 is from \"nobody\", which is no known role; expected one of system, human, user, gpt",
        ),
        (
            r#"{"prompt": "p", "completion": ["c"]}"#,
            "its prompt is string and its completion is sequence, expected two texts, or two lists of messages",
        ),
    ] {
        let err = parse(json).unwrap_err().to_string();
        assert!(err.contains(part), "{part:?} is not in: {err}");
    }
}

#[test]
fn of_a_completion_its_own_tokens_and_the_end_have_loss() {
    let tokenizer = tokenizer();
    let learned = |on_prompt: bool, json: &str| {
        let config = EncoderConfig {
            train_on_prompt: on_prompt,
            ..EncoderConfig::default()
        };
        let encoder = RecordEncoder::new(&tokenizer, None, config).unwrap();
        let encoded = encoder.encode(&parse(json).unwrap().1)?;
        let ids: Vec<u32> = encoded
            .ids
            .iter()
            .zip(&encoded.has_loss)
            .filter(|(_, has)| **has)
            .map(|(&id, _)| id)
            .collect();
        Ok::<_, RecordError>(tokenizer.decode_with_special_tokens(&ids).unwrap())
    };
    let record = r#"{"prompt": "the cat\n", "completion": "sat on the mat"}"#;
    assert_eq!(
        learned(false, record).unwrap(),
        "sat on the mat<|end_of_text|>"
    );
    assert!(
        learned(true, record)
            .unwrap()
            .ends_with(" cat\nsat on the mat<|end_of_text|>")
    );
    let record = r#"{"instruction": "i", "input": "x", "output": "the mat"}"#;
    assert_eq!(learned(false, record).unwrap(), "the mat<|end_of_text|>");
    assert!(
        learned(false, r#"{"prompt": "p", "completion": ""}"#)
            .unwrap_err()
            .to_string()
            .contains("empty")
    );
    assert!(
        learned(false, r#"{"messages": [{"role": "user", "content": "q"}]}"#)
            .unwrap_err()
            .to_string()
            .contains("no chat template")
    );
}

#[test]
fn of_a_completion_of_messages_only_its_answers_are_learned() {
    let turn = |role: &str, content: &str| json!({"role": role, "content": content});
    let prompt = [
        turn("user", "on"),
        turn("assistant", "mat"),
        turn("user", "the cat"),
    ];
    let answer = [turn("assistant", "sat")];
    let record = json!({"prompt": prompt, "completion": answer, "system": "the"});
    let reading = Reading::new(Some(TEMPLATE));
    let learned = |record: &serde_json::Value, config: EncoderConfig| {
        reading.write("a.jsonl", lines(std::slice::from_ref(record)));
        let read = reading.read_with("a.jsonl", "", config);
        read.map(|read| read.records.concat())
    };
    let config = EncoderConfig::default();
    let said = "<system>the<user>on<assistant>mat<user>the cat<assistant>";
    assert_eq!(learned(&record, config).unwrap(), format!("{said}⟦sat⟧"));
    let mut more = record.clone();
    more["completion"] = json!([answer[0], turn("user", "on"), turn("assistant", "mat")]);
    assert_eq!(
        learned(&more, config).unwrap(),
        format!("{said}⟦sat⟧<user>on<assistant>⟦mat⟧")
    );
    let mask_history = EncoderConfig {
        mask_history: true,
        ..config
    };
    assert_eq!(
        learned(&more, mask_history).unwrap(),
        format!("{said}sat<user>on<assistant>⟦mat⟧")
    );
    let on_prompt = EncoderConfig {
        train_on_prompt: true,
        ..config
    };
    let all = learned(&record, on_prompt).unwrap();
    assert_eq!(all.matches('⟦').count(), 1);
    assert!(
        all.ends_with(&format!("{}sat⟧", &said["<system>".len()..])),
        "{all}"
    );
    let format = parse(&record.to_string()).unwrap().0;
    assert_eq!(format, RecordFormat::CompletionOfMessages);
    assert_eq!(format.to_string(), "prompt and completion of messages");
    for (prompt, completion, part) in [
        (
            json!("the cat"),
            json!(answer),
            "its prompt is string and its completion is sequence",
        ),
        (
            json!(prompt),
            json!("sat"),
            "its prompt is sequence and its completion is string",
        ),
        (json!(prompt), json!([]), "its completion is empty"),
        (json!(prompt), json!(["sat"]), "message 4 is string"),
        (
            json!(prompt),
            json!([turn("user", "on")]),
            "1 record without a token to learn",
        ),
    ] {
        let record = json!({"prompt": prompt, "completion": completion, "system": "the"});
        assert_error(learned(&record, config), &[part]);
    }
}

#[test]
fn calls_of_tools_in_share_gpt_are_calls_of_the_assistant() {
    let record = |call: &str| {
        json!({"conversations": [{"from": "human", "value": "on"}, {"from": "function_call", "value": call},
            {"from": "observation", "value": "mat"}, {"from": "gpt", "value": "sat"}]})
    };
    let reading = Reading::new(Some(TEMPLATE));
    let read = |call: &str| {
        reading.write("a.jsonl", lines(&[record(call)]));
        reading
            .read("a.jsonl", "")
            .map(|read| read.records.concat())
    };
    let said = |calls: &str| format!("<user>on<assistant>⟦{calls}⟧<tool>mat<assistant>⟦sat⟧");
    let call = r#"{"name": "f", "arguments": {"x": 1}}"#;
    assert_eq!(read(call).unwrap(), said(r#"[f {"x": 1}]"#));
    let in_text = r#"{"name": "f", "arguments": "{\"x\": 1}"}"#;
    assert_eq!(read(in_text).unwrap(), said(r#"[f {"x": 1}]"#));
    let two = format!(r#"[{call}, {{"name": "g", "arguments": {{}}}}]"#);
    assert_eq!(read(&two).unwrap(), said(r#"[f {"x": 1}][g {}]"#));
    for call in [
        "",
        "f(1)",
        "3",
        "[]",
        "{}",
        r#"{"name": "f"}"#,
        r#"{"arguments": {}}"#,
        r#"{"name": 1, "arguments": {}}"#,
    ] {
        let parts = [
            "line 1: turn 1 is a function_call whose value is no call",
            r#"expected JSON such as {"name": "#,
        ];
        assert_error(read(call), &parts);
    }
}

#[test]
fn preference_data_is_refused_with_a_way_out() {
    for (json, hint) in [
        (
            r#"{"prompt": "p", "rejected": "r", "completion": "c"}"#,
            "leave such records out",
        ),
        (
            r#"{"conversations": [], "chosen": {"from": "gpt"}, "rejected": {}}"#,
            "write the better answer",
        ),
        (
            r#"{"prompt": "p", "completion": "c", "label": false}"#,
            "whose label is true",
        ),
        (r#"{"messages": [], "label": true}"#, "whose label is true"),
        (
            r#"{"prompt": "p", "completion": "c", "label": 0}"#,
            "whose label is true or 1",
        ),
        (
            r#"{"instruction": "i", "output": "c", "label": "True"}"#,
            "whose label is true",
        ),
    ] {
        let err = parse(json).unwrap_err();
        assert!(matches!(err, RecordError::Unsupported(_)), "{err}");
        for part in [
            "preference data, as for DPO, KTO and reward models",
            "hint: ",
            hint,
        ] {
            assert!(err.to_string().contains(part), "{part:?} is not in: {err}");
        }
    }
    // Classes of texts are notes.
    for json in [
        r#"{"text": "t", "label": true}"#,
        r#"{"prompt": "p", "completion": "c", "label": "news"}"#,
        r#"{"prompt": "p", "completion": "c", "rejected": null}"#,
    ] {
        parse(json).unwrap();
    }
}
