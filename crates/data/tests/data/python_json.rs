//! The filter `tojson` as Python's `json.dumps`: expected texts are what Python 3.11 prints.

use std::collections::BTreeMap;
use std::fs;

use candle_data::{Chat, ChatTemplate};
use minijinja::Value;

/// What `{{ tools[0] | tojson(OPTIONS) }}` gives.
fn tojson(json: &str, options: &str) -> String {
    let dir = tempfile::tempdir().unwrap();
    let template = format!("{{{{ tools[0] | tojson{options} }}}}");
    fs::write(dir.path().join("chat_template.jinja"), template).unwrap();
    let template = ChatTemplate::from_dir(dir.path(), BTreeMap::new())
        .unwrap()
        .unwrap();
    let message = minijinja::context! { role => "user", content => "x" };
    let tools: Value = serde_json::from_str(json).unwrap();
    let chat = Chat::new(vec![message], Some(vec![tools].into())).unwrap();
    template.generation_prompt(&chat).unwrap()
}

const JSON: &str = r#"{"b": [1, -2, 0.5, 1.0], "a": {"é": "<ü>\n\"🦀\"", "x": null}, "e": [], "o": {}, "t": true}"#;

#[test]
fn json_is_that_of_python() {
    assert_eq!(
        tojson(JSON, ""),
        r#"{"b": [1, -2, 0.5, 1.0], "a": {"é": "<ü>\n\"🦀\"", "x": null}, "e": [], "o": {}, "t": true}"#
    );
    assert_eq!(
        tojson(JSON, "(indent=2)"),
        "{\n  \"b\": [\n    1,\n    -2,\n    0.5,\n    1.0\n  ],\n  \"a\": {\n    \"é\": \"<ü>\\n\\\"🦀\\\"\",\n    \"x\": null\n  },\n  \"e\": [],\n  \"o\": {},\n  \"t\": true\n}"
    );
    assert_eq!(
        tojson(JSON, "(separators=(',', ':'), ensure_ascii=true)"),
        r#"{"b":[1,-2,0.5,1.0],"a":{"\u00e9":"<\u00fc>\n\"\ud83e\udd80\"","x":null},"e":[],"o":{},"t":true}"#
    );
    assert_eq!(
        tojson(r#"{"b": 1, "a": {"d": 2, "c": 3}}"#, "(sort_keys=true)"),
        r#"{"a": {"c": 3, "d": 2}, "b": 1}"#
    );
}

#[test]
fn templates_print_values_and_refuse_conversations_as_in_python() {
    let render = |source: &str| {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("chat_template.jinja"), source).unwrap();
        let template = ChatTemplate::from_dir(dir.path(), BTreeMap::new())
            .unwrap()
            .unwrap();
        let message = minijinja::context! { role => "user", content => " a,b " };
        let chat = Chat::new(vec![message], None).unwrap();
        template.render(&chat, &[]).map(|rendered| rendered.text)
    };
    assert_eq!(
        render("{{ true }} {{ none }} {{ 1 == 2 }}|{{ undefined_name }}|").unwrap(),
        "True None False||"
    );
    assert_eq!(
        render("{{ messages[0].content.strip().split(',')[-1].upper() }}").unwrap(),
        "B"
    );
    assert_eq!(render("{% for m in messages[::-1] %}\n{% if m.role == 'user' %}\n{% continue %}\n{% endif %}\nx\n{% endfor %}\nend\n").unwrap(), "end");
    assert_eq!(
        render("{{ strftime_now('%Y') | int > 2000 }}").unwrap(),
        "True"
    );
    let err = render("{{ raise_exception('Only one turn, please') }}").unwrap_err();
    let err = err.to_string();
    assert!(err.contains("refuses it: Only one turn, please"), "{err}");
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("chat_template.jinja"), "{% for %}").unwrap();
    crate::assert_error(
        ChatTemplate::from_dir(dir.path(), BTreeMap::new()),
        &["chat template", "can be rendered"],
    );
}
