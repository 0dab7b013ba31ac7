//! Records in the spellings that people use: what of them is learned, what is refused, and what is told.

use candle_train::{EncoderConfig, Record, RecordEncoder, RecordError, RecordFormat, Tokenizer};
use minijinja::Value;

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
            "its messages is string, expected a list",
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
            "turn 0 is from \"nobody\"",
        ),
        (
            r#"{"prompt": "p", "completion": ["c"]}"#,
            "its completion is sequence",
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
