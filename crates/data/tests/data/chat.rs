//! Conversations and texts as transformers renders and encodes them: `scripts/reference/chat_fixtures.py`.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use candle_data::{Chat, ChatTemplate, EncoderConfig, Record, RecordEncoder, Tokenizer};
use minijinja::Value;
use serde::Deserialize;

const FAMILIES: [&str; 9] = [
    "llama2", "llama3", "qwen2.5", "qwen3", "mistral", "chatml", "zephyr", "split", "added",
];

#[derive(Deserialize)]
struct Case {
    messages: Vec<Value>,
    tools: Option<Value>,
    text: String,
    ids: Vec<u32>,
    assistant: Vec<u8>,
}

#[derive(Deserialize)]
struct Text {
    text: String,
    ids: Vec<u32>,
    plain_ids: Vec<u32>,
}

fn folder(family: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/fixtures/chat")
        .join(family)
}

fn lines<T: for<'de> Deserialize<'de>>(family: &str, name: &str) -> Vec<T> {
    let text = fs::read_to_string(folder(family).join(name)).unwrap();
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

/// Renders and encodes all conversations of a family with the template in `dir`.
fn check_conversations(family: &str, dir: &std::path::Path) {
    let tokenizer = Tokenizer::from_dir(folder(family)).unwrap();
    let template = ChatTemplate::from_dir(dir, tokenizer.named_special_tokens().clone());
    let template = template.unwrap().unwrap();
    let encoder = RecordEncoder::new(&tokenizer, Some(dir), EncoderConfig::default()).unwrap();
    let cases: Vec<Case> = lines(family, "cases.jsonl");
    assert!(cases.len() >= 10);
    for case in cases {
        // Mistral's template shows what the system says before a last question only.
        let first = |name: &str| case.messages[0].get_attr(name).unwrap().to_string();
        let hides_system =
            first("role") == "system" && !case.text.contains(first("content").trim());
        let chat = Chat::new(case.messages, case.tools).unwrap();
        let rendered = template.render(&chat, &tokenizer.special_tokens()).unwrap();
        assert_eq!(rendered.text, case.text, "{family}");
        let encoded = encoder.encode(&Record::Chat(chat));
        if hides_system {
            let reason = encoded.unwrap_err().to_string();
            assert!(reason.contains("message 0, of the role \"system\""));
            continue;
        }
        let encoded = encoded.unwrap();
        assert_eq!(encoded.ids, case.ids, "{family}: {:?}", case.text);
        let assistant: Vec<bool> = case.assistant.iter().map(|&is| is == 1).collect();
        let spelled = |mask: &[bool]| -> Vec<String> {
            let learned = case.ids.iter().zip(mask).filter(|(_, is)| **is);
            learned
                .map(|(&id, _)| tokenizer.token(id).unwrap())
                .collect()
        };
        assert_eq!(
            spelled(&encoded.has_loss),
            spelled(&assistant),
            "{family}: {:?}",
            case.text
        );
        assert_eq!(encoded.has_loss, assistant);
    }
}

#[test]
fn conversations_have_the_text_ids_and_assistant_tokens_of_transformers() {
    for family in FAMILIES {
        check_conversations(family, &folder(family));
    }
}

#[test]
fn generation_tags_tell_the_same() {
    for family in FAMILIES {
        let dir = tempfile::tempdir().unwrap();
        fs::copy(
            folder(family).join("marked.jinja"),
            dir.path().join("chat_template.jinja"),
        )
        .unwrap();
        check_conversations(family, dir.path());
    }
}

#[test]
fn texts_have_the_ids_of_transformers_with_and_without_special_tokens() {
    for family in FAMILIES {
        let tokenizer = Tokenizer::from_dir(folder(family)).unwrap();
        for case in lines::<Text>(family, "texts.jsonl") {
            let ids = tokenizer.encode_with_special_tokens(&case.text).unwrap();
            assert_eq!(ids, case.ids, "{family}: {:?}", case.text);
            assert_eq!(
                tokenizer.encode(&case.text).unwrap(),
                case.plain_ids,
                "{family}"
            );
        }
    }
}

#[test]
fn a_template_may_print_the_date_of_a_day() {
    let dir = tempfile::tempdir().unwrap();
    let template = |source: &str| {
        fs::write(dir.path().join("chat_template.jinja"), source).unwrap();
        let template = ChatTemplate::from_dir(dir.path(), BTreeMap::new());
        template.unwrap().unwrap()
    };
    let message = minijinja::context! { role => "user", content => "x" };
    let chat = Chat::new(vec![message], None).unwrap();
    let date: jiff::civil::Date = "2024-02-29".parse().unwrap();
    let dated = template("{{ strftime_now('%d %b %Y %H:%M:%S') }}");
    let today = dated.date().unwrap();
    assert!(today.year() >= 2026, "{today}");
    let dated = dated.with_date(date);
    assert_eq!(dated.date(), Some(date));
    assert_eq!(
        dated.generation_prompt(&chat).unwrap(),
        "29 Feb 2024 00:00:00"
    );
    let undated = template("{{ messages[0].content }}").with_date(date);
    assert_eq!(undated.date(), None);
    let wrong = template("{{ strftime_now('%') }}").generation_prompt(&chat);
    crate::assert_error(wrong, &["cannot be rendered", "%"]);
}

#[test]
fn line_endings_of_templates_are_line_feeds() {
    // What Jinja2 3.1 makes of each, with the options of transformers.
    let source = "{% for m in messages %}\n{{ m.role }}:\n  {{ m.content }}{{ '\\r\\n' }}{{ '|\n|' }}\n{% endfor %}\nend\n";
    let want = "user:\n  x\r\n|\n|\nend";
    let chat = Chat::new(
        vec![minijinja::context! { role => "user", content => "x" }],
        None,
    );
    let chat = chat.unwrap();
    for ending in ["\n", "\r\n", "\r"] {
        let text = source.replace('\n', ending);
        let config = serde_json::json!({"chat_template": text}).to_string();
        for (name, file) in [
            ("chat_template.jinja", &text),
            ("tokenizer_config.json", &config),
        ] {
            let dir = tempfile::tempdir().unwrap();
            fs::write(dir.path().join(name), file).unwrap();
            let template = ChatTemplate::from_dir(dir.path(), BTreeMap::new());
            let rendered = template.unwrap().unwrap().generation_prompt(&chat).unwrap();
            assert_eq!(rendered, want, "{ending:?} in {name}");
        }
    }
}
