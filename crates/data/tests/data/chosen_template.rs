//! Chat templates that a user chooses by name or as a file: what they render, which tokens they need, and what is saved.

use std::fs;
use std::path::PathBuf;

use candle_data::{Chat, ChatTemplate, EncoderConfig, Record, RecordEncoder, Tokenizer};
use minijinja::{Value, context};
use serde::Deserialize;

const NAMES: [&str; 6] = ["chatml", "llama3", "qwen", "mistral", "gemma", "zephyr"];

#[derive(Deserialize)]
struct Case {
    messages: Vec<Value>,
    tools: Option<Value>,
    text: String,
    ids: Vec<u32>,
    assistant: Vec<u8>,
}

fn folder(family: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/fixtures/chat")
        .join(family)
}

fn tokenizer(family: &str) -> Tokenizer {
    Tokenizer::from_dir(folder(family)).unwrap()
}

fn message(role: &str, content: &str) -> Value {
    context! { role => role, content => content }
}

/// A conversation, rendered, and what of it the assistant says.
fn rendered(template: &ChatTemplate, messages: &[Value]) -> (String, Vec<String>) {
    let chat = Chat::new(messages.to_vec(), None).unwrap();
    let rendered = template.render(&chat, &[]).unwrap();
    let said = rendered.assistant.iter();
    let said = said.map(|span| rendered.text[span.clone()].to_string());
    (rendered.text.clone(), said.collect())
}

#[test]
fn named_templates_render_what_those_of_the_families_do() {
    for (family, choice) in [
        ("chatml", "chatml"),
        ("zephyr", "zephyr"),
        ("mistral", "mistral"),
    ] {
        let tokenizer = tokenizer(family);
        let template = ChatTemplate::chosen(choice, &tokenizer).unwrap();
        let encoder = RecordEncoder::new(&tokenizer, None, EncoderConfig::default()).unwrap();
        let encoder = encoder.with_template(template.clone());
        let text = fs::read_to_string(folder(family).join("cases.jsonl")).unwrap();
        let mut num_compared = 0;
        for line in text.lines() {
            let case: Case = serde_json::from_str(line).unwrap();
            let content = |message: &Value| message.get_attr("content").unwrap().to_string();
            let has_system = case.messages[0].get_attr("role").unwrap().as_str() == Some("system");
            let is_trimmed = case
                .messages
                .iter()
                .all(|it| content(it).trim() == content(it));
            // Mistral's own puts the system's message before the last question, and trims nothing.
            if case.tools.is_some() || choice == "mistral" && (has_system || !is_trimmed) {
                continue;
            }
            num_compared += 1;
            let chat = Chat::new(case.messages, None).unwrap();
            let rendered = template.render(&chat, &tokenizer.special_tokens()).unwrap();
            assert_eq!(rendered.text, case.text, "{choice}");
            let encoded = encoder.encode(&Record::Chat(chat)).unwrap();
            assert_eq!(encoded.ids, case.ids, "{choice}: {}", case.text);
            let assistant: Vec<bool> = case.assistant.iter().map(|&is| is == 1).collect();
            assert_eq!(encoded.has_loss, assistant, "{choice}: {}", case.text);
        }
        assert!(num_compared > 4, "{num_compared}");
    }
}

#[test]
fn turns_are_where_each_family_has_them() {
    let tokenizer = tokenizer("llama3");
    let [bos, eos] = ["bos_token", "eos_token"].map(|name| &tokenizer.named_special_tokens()[name]);
    let turns = [
        message("system", "Be kind."),
        message("user", " Hi "),
        message("assistant", "Hello"),
        message("user", "Bye"),
    ];
    for (name, expected, said, asked) in [
        (
            "llama3",
            format!(
                "{bos}<|start_header_id|>system<|end_header_id|>\n\nBe kind.<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>\
                 <|start_header_id|>assistant<|end_header_id|>\n\nHello<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|>"
            ),
            "Hello<|eot_id|>".to_string(),
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        (
            "gemma",
            format!(
                "{bos}<start_of_turn>user\nBe kind.\n\nHi<end_of_turn>\n<start_of_turn>model\nHello<end_of_turn>\n\
                 <start_of_turn>user\nBye<end_of_turn>\n"
            ),
            "Hello<end_of_turn>".to_string(),
            "<start_of_turn>model\n",
        ),
        (
            "mistral",
            format!("{bos}[INST] Be kind.\n\n Hi [/INST] Hello{eos}[INST] Bye[/INST]"),
            format!(" Hello{eos}"),
            "",
        ),
        (
            "qwen",
            "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n Hi <|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n\
             <|im_start|>user\nBye<|im_end|>\n"
                .to_string(),
            "Hello<|im_end|>".to_string(),
            "<|im_start|>assistant\n",
        ),
    ] {
        let template = ChatTemplate::chosen(name, &tokenizer).unwrap();
        let (text, learned) = rendered(&template, &turns);
        assert_eq!((text.as_str(), learned), (expected.as_str(), vec![said]), "{name}");
        let chat = Chat::new(turns.to_vec(), None).unwrap();
        assert_eq!(template.generation_prompt(&chat).unwrap(), expected + asked);
    }
    for name in NAMES {
        let template = ChatTemplate::chosen(name, &tokenizer).unwrap();
        let turns = vec![message("user", "a"), message("asistant", "b")];
        let refused = template.render(&Chat::new(turns, None).unwrap(), &[]);
        let refused = refused.unwrap_err().to_string();
        assert!(refused.contains("of the role asistant"), "{refused}");
    }
    for name in ["mistral", "gemma"] {
        let template = ChatTemplate::chosen(name, &tokenizer).unwrap();
        let chat = Chat::new(vec![message("user", "a"), message("tool", "b")], None).unwrap();
        let refused = template.render(&chat, &[]).unwrap_err().to_string();
        assert!(refused.contains("of the role tool"), "{refused}");
    }
}

#[test]
fn qwen_writes_calls_of_tools_and_their_answers() {
    let template = ChatTemplate::chosen("qwen", &tokenizer("chatml")).unwrap();
    let call = |city: &str| {
        let arguments = context! { city => city };
        context! { r#type => "function", function => context! { name => "weather", arguments => arguments } }
    };
    let calls = vec![call("Rome"), call("Oslo")];
    let messages = vec![
        message("user", "Where is it warm?"),
        context! { role => "assistant", content => "", tool_calls => calls },
        message("tool", "30"),
        message("tool", "3"),
        message("assistant", "Rome."),
    ];
    let tools = Value::from(vec![context! { name => "weather" }]);
    let chat = Chat::new(messages, Some(tools)).unwrap();
    let rendered = template.render(&chat, &[]).unwrap();
    let (head, rest) = rendered.text.split_once("<|im_end|>\n").unwrap();
    assert!(
        head.contains("<tools>\n{\"name\": \"weather\"}\n</tools>"),
        "{head}"
    );
    let called = "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Rome\"}}\n</tool_call>\n\
        <tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Oslo\"}}\n</tool_call><|im_end|>";
    let expected = format!(
        "<|im_start|>user\nWhere is it warm?<|im_end|>\n<|im_start|>assistant\n{called}\n<|im_start|>user\n<tool_response>\n30\n</tool_response>\n\
         <tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\nRome.<|im_end|>\n"
    );
    assert_eq!(rendered.text, format!("{head}<|im_end|>\n{expected}"));
    assert_eq!(rest, expected);
    let said: Vec<&str> = rendered
        .assistant
        .iter()
        .map(|span| &rendered.text[span.clone()])
        .collect();
    assert_eq!(said, [called, "Rome.<|im_end|>"]);
}

#[test]
fn what_ends_a_turn_is_found_and_markers_without_tokens_are_named() {
    let chatml = tokenizer("chatml");
    let fit = |name, tokenizer: &Tokenizer| {
        ChatTemplate::chosen(name, tokenizer)
            .unwrap()
            .fit(tokenizer)
    };
    let own = fit("chatml", &chatml);
    assert_eq!(own.end_of_turn.as_deref(), Some("<|im_end|>"));
    assert_eq!(own.end_of_turn_id, chatml.token_id("<|im_end|>"));
    assert!(
        own.end_of_turn_id.is_some() && own.warning().is_none(),
        "{own:?}"
    );
    let other = fit("llama3", &chatml);
    assert_eq!(other.end_of_turn.as_deref(), Some("<|eot_id|>"));
    assert_eq!(other.end_of_turn_id, None);
    let warning = other.warning().unwrap();
    for part in [
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
        "do not end",
        "hint: ",
    ] {
        assert!(warning.contains(part), "{warning}");
    }
    assert!(!warning.contains("<|im_end|>"), "{warning}");
    // The tokenizer's own end of a text is a token everywhere.
    for name in ["mistral", "zephyr"] {
        let fit = fit(name, &chatml);
        assert_eq!(fit.end_of_turn_id, Some(chatml.eos_id()), "{name}: {fit:?}");
    }
    assert!(
        fit("zephyr", &chatml)
            .split_markers
            .contains(&"<|user|>".to_string())
    );
}

#[test]
fn what_is_saved_is_the_template_and_the_end_of_its_turns() {
    let tokenizer = tokenizer("chatml");
    let id = tokenizer.token_id("<|im_end|>").unwrap();
    let template = ChatTemplate::chosen("chatml", &tokenizer).unwrap();
    let file = |name: &str, content: &str| (name.to_string(), content.as_bytes().to_vec());
    let saved = |files: Vec<(String, Vec<u8>)>| {
        let mut files = files;
        template.save_among(&mut files, &tokenizer).unwrap();
        move |name: &str| {
            let mut found = files.iter().filter(|(other, _)| other == name);
            let content = found
                .next()
                .map(|(_, content)| String::from_utf8(content.clone()).unwrap());
            assert!(found.next().is_none(), "{name} is there twice");
            content
        }
    };
    let ends = |content: Option<String>| {
        let config: serde_json::Value = serde_json::from_str(&content.unwrap()).unwrap();
        (
            config["eos_token_id"].clone(),
            config["temperature"].clone(),
        )
    };
    let of = saved(vec![
        file("config.json", r#"{"eos_token_id": 5}"#),
        file(
            "generation_config.json",
            r#"{"eos_token_id": [7, 8], "temperature": 0.5}"#,
        ),
        file(
            "tokenizer_config.json",
            r#"{"chat_template": "old", "eos_token": "</s>"}"#,
        ),
        file("chat_template.json", r#"{"chat_template": "old"}"#),
        file("chat_template.jinja", "old"),
        file("additional_chat_templates/tool_use.jinja", "old"),
    ]);
    assert_eq!(
        of("chat_template.jinja").as_deref(),
        Some(template.text_of_template())
    );
    assert_eq!(of("chat_template.json"), None);
    assert_eq!(of("additional_chat_templates/tool_use.jinja"), None);
    let tokenizer_config = of("tokenizer_config.json").unwrap();
    assert!(tokenizer_config.contains("im_start") && tokenizer_config.contains("</s>"));
    let expected = (serde_json::json!([7, 8, id]), serde_json::json!(0.5));
    assert_eq!(ends(of("generation_config.json")), expected);
    // Without the file: the ends of config.json, else the tokenizer's.
    let of = saved(vec![file("config.json", r#"{"eos_token_id": 5}"#)]);
    assert_eq!(
        ends(of("generation_config.json")).0,
        serde_json::json!([5, id])
    );
    assert_eq!(of("tokenizer_config.json"), None);
    let of = saved(Vec::new());
    let mut both = vec![tokenizer.eos_id(), id];
    both.dedup();
    assert_eq!(
        ends(of("generation_config.json")).0,
        serde_json::json!(both)
    );
    // An end that is there is not added again.
    let of = saved(vec![file(
        "generation_config.json",
        &format!(r#"{{"eos_token_id": {id}}}"#),
    )]);
    assert_eq!(
        ends(of("generation_config.json")).0,
        serde_json::json!([id])
    );
    let mut files = vec![file("generation_config.json", "[1]")];
    let refused = template
        .save_among(&mut files, &tokenizer)
        .unwrap_err()
        .to_string();
    assert!(
        refused.contains("generation_config.json") && refused.contains("no JSON object"),
        "{refused}"
    );
}

#[test]
fn a_file_is_a_template_and_anything_else_says_what_there_is() {
    let tokenizer = tokenizer("chatml");
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).display().to_string();
    fs::write(
        path("own.jinja"),
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}\r\n{% endfor %}",
    )
    .unwrap();
    let eos = &tokenizer.named_special_tokens()["eos_token"];
    let template = ChatTemplate::chosen(&path("own.jinja"), &tokenizer).unwrap();
    let (text, said) = rendered(
        &template,
        &[message("user", "a"), message("assistant", "b")],
    );
    assert_eq!(text, format!("<user>a{eos}\n<assistant>b{eos}\n"));
    assert_eq!(said.len(), 1);
    let fit = template.fit(&tokenizer);
    assert_eq!(fit.split_markers, ["<assistant>", "<user>"]);
    fs::write(path("broken.jinja"), "{% for %}").unwrap();
    for (choice, parts) in [
        (
            "vicuna".to_string(),
            [&NAMES[..], &["vicuna", "hint: "]].concat(),
        ),
        (path("none.jinja"), vec!["none.jinja", "cannot read"]),
        (
            path("broken.jinja"),
            vec!["broken.jinja", "is not one that can be rendered"],
        ),
        (path(""), vec!["cannot read the chat template"]),
    ] {
        let refused = ChatTemplate::chosen(&choice, &tokenizer)
            .unwrap_err()
            .to_string();
        for part in parts {
            assert!(refused.contains(part), "{part}: {refused}");
        }
    }
    for name in NAMES {
        ChatTemplate::chosen(name, &tokenizer).unwrap();
    }
}
