//! Parts of conversations: masks of messages, history, calls of tools, and what a chat template does not show.

use std::fs;

use candle_data::hub::DataUse;
use candle_data::{
    Data, DataSpec, EncoderConfig, Record, RecordEncoder, TokenCache, Tokenizer, Tokens,
};
use minijinja::Value;
use serde_json::json;

use crate::assert_error;

const TEMPLATE: &str = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% for call in m.tool_calls %}[{{ call.function.arguments | tojson }}]{% endfor %}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";
const MARKED: &str = "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{{ m.content + eos_token }}{% endgeneration %}{% else %}{{ m.content + eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";
/// As those of Llama 2 and Mistral: other roles are not looked at.
const TWO_ROLES: &str = "{% for m in messages %}{% if m.role == 'user' %}[{{ m.content }}]{% elif m.role == 'assistant' %}{{ m.content + eos_token }}{% endif %}{% endfor %}";

fn tokenizer() -> Tokenizer {
    Tokenizer::train_bpe(["the cat sat on the mat\n"].into_iter(), 280).unwrap()
}

const MASK_HISTORY: EncoderConfig = EncoderConfig {
    train_on_prompt: false,
    mask_history: true,
    keep_argument_strings: false,
};
const ON_PROMPT: EncoderConfig = EncoderConfig {
    train_on_prompt: true,
    mask_history: false,
    keep_argument_strings: false,
};

/// The text of a record with this template, and what of it is learned, without the ends of turns.
fn encoded(
    template: &str,
    record: &serde_json::Value,
    config: EncoderConfig,
) -> candle_core::Result<(String, Vec<String>)> {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("chat_template.jinja"), template).unwrap();
    let tokenizer = tokenizer();
    let encoder = RecordEncoder::new(&tokenizer, Some(dir.path()), config)?;
    let record: Value = serde_json::from_str(&record.to_string()).unwrap();
    let (_, record) = Record::parse(&record).map_err(candle_core::Error::wrap)?;
    let encoded = encoder.encode(&record).map_err(candle_core::Error::wrap)?;
    let mut learned = Vec::new();
    let mut end = 0;
    for run in encoded.has_loss.chunk_by(|a, b| a == b) {
        let start = end;
        end += run.len();
        if run[0] {
            let ids = &encoded.ids[start..end];
            let text = tokenizer.decode_with_special_tokens(ids)?;
            learned.push(text.replace("<|end_of_text|>", ""));
        }
    }
    let text = tokenizer.decode_with_special_tokens(&encoded.ids)?;
    Ok((text, learned))
}

fn learned(record: &serde_json::Value, config: EncoderConfig) -> Vec<String> {
    let of_plain = encoded(TEMPLATE, record, config).unwrap().1;
    assert_eq!(encoded(MARKED, record, config).unwrap().1, of_plain);
    of_plain
}

fn refused(template: &str, record: &serde_json::Value, parts: &[&str]) {
    assert_error(encoded(template, record, EncoderConfig::default()), parts);
}

/// Two questions with answers, with this in the first answer.
fn two_answers(more: serde_json::Value) -> serde_json::Value {
    let mut first = json!({"role": "assistant", "content": "one"});
    first
        .as_object_mut()
        .unwrap()
        .extend(more.as_object().unwrap().clone());
    json!({"messages": [{"role": "user", "content": "q"}, first,
        {"role": "user", "content": "r"}, {"role": "assistant", "content": "two"}]})
}

#[test]
fn messages_of_weight_0_are_not_learned() {
    let default = EncoderConfig::default();
    assert_eq!(learned(&two_answers(json!({})), default), ["one", "two"]);
    for more in [
        json!({"weight": 0}),
        json!({"weight": 0.0}),
        json!({"train": false}),
        json!({"training": false, "weight": 1}),
        json!({"loss_mask": 0}),
        json!({"loss": false, "train": null}),
    ] {
        assert_eq!(
            learned(&two_answers(more.clone()), default),
            ["two"],
            "{more}"
        );
        let all = learned(&two_answers(more), ON_PROMPT);
        assert_eq!(all.len(), 2, "{all:?}");
        assert!(
            all[0].ends_with("q<assistant>") && all[1].starts_with("<user>r"),
            "{all:?}"
        );
    }
    let share_gpt = json!({"system": "s", "conversations": [{"from": "human", "value": "q", "weight": 1},
        {"from": "gpt", "value": "one", "weight": 0}, {"from": "human", "value": "r"}, {"from": "gpt", "value": "two"}]});
    assert_eq!(learned(&share_gpt, default), ["two"]);
    for name in ["weight", "train", "training", "loss_mask"] {
        let mut record = share_gpt.clone();
        record[name] = json!([0, null, 0, 0]);
        assert_eq!(learned(&record, default), Vec::<String>::new(), "{name}");
        record[name] = json!([0, 1]);
        refused(TEMPLATE, &record, &[name, "expected a list of 4 entries"]);
    }
}

#[test]
fn masks_that_cannot_be_honoured_are_refused() {
    for (more, parts) in [
        (
            json!({"weight": 0.5}),
            ["message 1 has weight 0.5", "expected 0 or 1"],
        ),
        (
            json!({"train": "yes"}),
            ["message 1 has train yes", "expected 0 or 1"],
        ),
        (
            json!({"train": true, "loss": 0}),
            ["by its train it is learned", "by its loss it is not"],
        ),
    ] {
        refused(TEMPLATE, &two_answers(more), &parts);
    }
    let of_user = |mask: bool| json!({"messages": [{"role": "user", "content": "q", "train": mask}, {"role": "assistant", "content": "a"}]});
    assert_eq!(learned(&of_user(false), EncoderConfig::default()), ["a"]);
    refused(
        TEMPLATE,
        &of_user(true),
        &["message 0", "\"user\"", "--train-on-prompt"],
    );
    assert!(encoded(TEMPLATE, &of_user(true), ON_PROMPT).is_ok());
    assert_error(
        encoded(TEMPLATE, &of_user(false), ON_PROMPT),
        &["message 0", "\"user\""],
    );
    // A tag around two messages does not tell where one ends.
    let together = "{% generation %}{% for m in messages %}{{ m.content + eos_token }}{% endfor %}{% endgeneration %}{% if add_generation_prompt %}{% endif %}";
    let masked = two_answers(json!({"weight": 0}));
    refused(
        together,
        &masked,
        &["generation tag", "not all of them are learned"],
    );
}

#[test]
fn of_a_masked_history_the_last_answer_is_learned() {
    assert_eq!(learned(&two_answers(json!({})), MASK_HISTORY), ["two"]);
    let mut last = two_answers(json!({}));
    last["messages"][3]["weight"] = json!(0);
    assert_eq!(learned(&last, MASK_HISTORY), Vec::<String>::new());
    let alpaca = json!({"instruction": "i", "input": "x", "output": "o", "system": "s",
        "history": [["q", "one"], ["r", "two"]]});
    assert_eq!(
        learned(&alpaca, EncoderConfig::default()),
        ["one", "two", "o"]
    );
    let (text, last) = encoded(TEMPLATE, &alpaca, MASK_HISTORY).unwrap();
    assert_eq!(last, ["o"]);
    let text = text.replace("<|end_of_text|>", "");
    assert_eq!(
        text,
        "<system>s<user>q<assistant>one<user>r<assistant>two<user>i\nx<assistant>o"
    );
    for history in [json!([["q"]]), json!(["qr"]), json!([["q", 3]])] {
        let record = json!({"instruction": "i", "output": "o", "history": history});
        refused(
            TEMPLATE,
            &record,
            &["turn 0 of its history", "an instruction and its answer"],
        );
    }
}

#[test]
fn what_the_template_leaves_out_is_refused_by_role() {
    for role in ["developer", "system", "tool"] {
        let record = json!({"messages": [{"role": role, "content": "a"}, {"role": "user", "content": "aaa"},
            {"role": "assistant", "content": "b"}]});
        assert!(encoded(TEMPLATE, &record, EncoderConfig::default()).is_ok());
        let quoted = format!("{role:?}");
        refused(
            TWO_ROLES,
            &record,
            &["message 0", &quoted, "chat_template.jinja", "hint: "],
        );
    }
    let empty = json!({"messages": [{"role": "system", "content": " \n"}, {"role": "user", "content": "q"}, {"role": "assistant", "content": "b"}]});
    assert_eq!(
        encoded(TWO_ROLES, &empty, EncoderConfig::default())
            .unwrap()
            .0,
        "[q]b<|end_of_text|>"
    );
    // Thoughts, which a template may leave out of earlier turns, are no dropped message.
    let thinking = TWO_ROLES.replace("{{ m.content +", "{{ m.content.split('</think>')[-1] +");
    let thought = json!({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "<think>t</think>"}, {"role": "user", "content": "r"}, {"role": "assistant", "content": "b"}]});
    assert!(encoded(&thinking, &thought, EncoderConfig::default()).is_ok());
    let calls = two_answers(json!({"tool_calls": [{"function": {"name": "f", "arguments": {}}}]}));
    refused(
        TWO_ROLES,
        &calls,
        &[
            "tool_calls",
            "message 1",
            "\"assistant\"",
            "chat_template.jinja",
        ],
    );
}

/// Records of several sources have fields of each, of which most are null.
#[test]
fn turns_with_fields_of_two_spellings_say_one_thing() {
    let turns = |more: serde_json::Value| {
        let mut answer = json!({"from": "gpt", "value": "a"});
        let fields = answer.as_object_mut().unwrap();
        fields.extend(more.as_object().unwrap().clone());
        json!({"conversations": [{"from": "human", "value": "q", "content": null, "role": null}, answer]})
    };
    for more in [
        json!({"content": null, "role": null}),
        json!({"content": ""}),
        json!({"content": "a"}),
    ] {
        assert_eq!(learned(&turns(more), EncoderConfig::default()), ["a"]);
    }
    refused(TEMPLATE, &turns(json!({"content": "b"})), &["another one"]);
}

#[test]
fn each_call_of_a_tool_is_shown() {
    // Beside a text no call is.
    let template = "{% for m in messages %}<{{ m.role }}>{% if m.content %}{{ m.content }}{% else %}{{ m.tool_calls | tojson }}{% endif %}{{ eos_token }}{% endfor %}";
    let call = json!([{"function": {"name": "f", "arguments": {}}}]);
    let record = |first: &str| {
        json!({"messages": [{"role": "user", "content": "q"},
            {"role": "assistant", "content": first, "tool_calls": call}, {"role": "tool", "content": "r"},
            {"role": "assistant", "content": "", "tool_calls": call}]})
    };
    assert!(encoded(template, &record(""), EncoderConfig::default()).is_ok());
    refused(
        template,
        &record("Let me see"),
        &["tool_calls", "message 1"],
    );
}

#[test]
fn notes_that_are_called_like_parts_are_notes() {
    let scored = two_answers(json!({"loss": 0.25}));
    assert_eq!(learned(&scored, EncoderConfig::default()), ["one", "two"]);
    let masked = two_answers(json!({"loss": 0}));
    assert_eq!(learned(&masked, EncoderConfig::default()), ["two"]);
    for (name, value) in [
        ("images", json!(0)),
        ("video", json!(false)),
        ("history", json!("")),
    ] {
        let mut record = json!({"instruction": "i", "output": "o"});
        record[name] = value;
        assert!(encoded(TEMPLATE, &record, EncoderConfig::default()).is_ok());
    }
}

#[test]
fn parts_without_which_something_else_would_be_learned_are_refused() {
    for (name, value) in [
        ("images", json!(["a.png"])),
        ("rejected", json!("worse")),
        ("tool_calls", json!([{"name": "f"}])),
        ("train", json!(false)),
        ("weight", json!(0.5)),
        ("loss_mask", json!("0101")),
    ] {
        for mut record in [
            json!({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}),
            json!({"instruction": "i", "output": "o"}),
            json!({"prompt": "p", "completion": "c"}),
            json!({"text": "t"}),
        ] {
            record[name] = value.clone();
            refused(TEMPLATE, &record, &[name]);
            record[name] = json!(null);
            encoded(TEMPLATE, &record, EncoderConfig::default()).unwrap();
        }
    }
    let mut earlier = two_answers(json!({}));
    earlier["history"] = json!([["q", "a"]]);
    refused(TEMPLATE, &earlier, &["it has history"]);
    refused(
        TEMPLATE,
        &two_answers(json!({"images": ["a.png"]})),
        &["message 1 has images"],
    );
}

const CALL: &str = r#"{"city": "Paris", "days": 2}"#;

#[test]
fn arguments_that_are_json_in_a_text_are_read_or_kept() {
    let call = |arguments: &str| {
        two_answers(json!({"tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}))
    };
    let text = |arguments: &str, config| encoded(TEMPLATE, &call(arguments), config).unwrap().0;
    let default = EncoderConfig::default();
    assert!(text(CALL, default).contains(&format!("one[{CALL}]")));
    let kept = EncoderConfig {
        keep_argument_strings: true,
        ..default
    };
    assert!(text(CALL, kept).contains(r#"one["{\"city\": \"Paris\", \"days\": 2}"]"#));
    // Other texts are texts.
    for other in ["Paris", "", "3"] {
        assert_eq!(text(other, default), text(other, kept));
    }
}

/// The tokens of these records, with their warnings.
fn told(records: &[serde_json::Value], cache: &TokenCache) -> candle_core::Result<Vec<String>> {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("chat_template.jinja"), TEMPLATE).unwrap();
    let lines: Vec<String> = records.iter().map(ToString::to_string).collect();
    fs::write(dir.path().join("a.jsonl"), lines.join("\n")).unwrap();
    let tokenizer = tokenizer();
    let encoder = RecordEncoder::new(&tokenizer, Some(dir.path()), EncoderConfig::default())?;
    let data = Data::find(
        &[DataSpec::new(dir.path().join("a.jsonl"))],
        DataUse::Training,
    )?;
    let tokens = Tokens::encode(&data, &encoder, Some(cache))?;
    let warnings = tokens.report().warnings(&data).into_iter();
    let place = format!("{}/", dir.path().display());
    Ok(warnings.map(|line| line.replace(&place, "")).collect())
}

#[test]
fn fields_that_nothing_reads_are_told_once_with_a_count_and_the_first_place() {
    let dir = tempfile::tempdir().unwrap();
    let cache = TokenCache::new(dir.path());
    let plain = two_answers(json!({}));
    assert!(
        told(std::slice::from_ref(&plain), &cache)
            .unwrap()
            .is_empty()
    );
    let call = two_answers(json!({"tool_calls": [{"function": {"name": "f", "arguments": CALL}}]}));
    let mut named = two_answers(json!({"name": "bot"}));
    named["tools"] = json!([{"name": "f"}]);
    let mut noted = two_answers(json!({"weight": 0, "thinking": "hm"}));
    noted["id"] = json!(7);
    noted["history"] = json!([]);
    let records = [plain, noted.clone(), named, noted, call];
    let first = told(&records, &cache).unwrap();
    assert_eq!(
        first,
        [
            "nothing reads these fields of the records: id (2 records, the first a.jsonl line 2), \
             messages[].name (1 record, the first a.jsonl line 3), \
             messages[].reasoning_content (2 records, the first a.jsonl line 2), tools (1 record, the first a.jsonl line 3)",
            "the arguments of tool calls that are JSON in a text were read as that JSON: 1 record, the first a.jsonl line 5; \
             --keep-argument-strings leaves them texts",
        ]
    );
    // Tokens from the cache have the same to tell.
    let num_files = || fs::read_dir(dir.path().join("tokens")).unwrap().count();
    let before = num_files();
    assert_eq!(told(&records, &cache).unwrap(), first);
    assert_eq!(num_files(), before);
    let refused = told(
        &[records[0].clone(), two_answers(json!({"weight": 2}))],
        &cache,
    );
    assert_error(refused, &["a.jsonl line 2", "weight 2"]);
}
