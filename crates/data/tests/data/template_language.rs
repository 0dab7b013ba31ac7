//! The language of chat templates: texts as transformers renders them (`scripts/reference/template_language.py`), and limits.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use candle_data::{Chat, ChatTemplate, RecordError};
use minijinja::{Value, context};
use serde::Deserialize;

use crate::read::Reading;

#[derive(Deserialize)]
struct Case {
    template: String,
    /// `None` where transformers refuses it.
    text: Option<String>,
}

fn template(source: &str) -> candle_core::Result<ChatTemplate> {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("chat_template.jinja"), source).unwrap();
    let template = ChatTemplate::from_dir(dir.path(), BTreeMap::new())?;
    Ok(template.unwrap())
}

fn chat() -> Chat {
    let extra = context! {
        text => "one two three",
        small => 2e-7,
        big => 1e16,
        huge => 12345678901234567890123_i128,
        m => context! { z => 1 },
    };
    let message = context! { role => "user", content => "hi", extra };
    Chat::new(vec![message], None).unwrap()
}

fn render(source: &str) -> Result<String, RecordError> {
    let rendered = template(source).unwrap().render(&chat(), &[]);
    rendered.map(|rendered| rendered.text)
}

#[test]
fn templates_give_the_texts_of_transformers() {
    let fixture = "../../tests/fixtures/chat/language.jsonl";
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(fixture);
    let cases = fs::read_to_string(path).unwrap();
    let mut wrong = Vec::new();
    for line in cases.lines() {
        let case: Case = serde_json::from_str(line).unwrap();
        let rendered = template(&case.template).map_err(|err| err.to_string());
        let rendered = rendered.and_then(|template| {
            let rendered = template.render(&chat(), &[]);
            rendered.map_err(|err| err.to_string())
        });
        let is_right = match (&rendered, &case.text) {
            (Ok(rendered), Some(text)) => rendered.text == *text,
            (Err(_), None) => true,
            _ => false,
        };
        if !is_right {
            wrong.push(format!(
                "{}\n  want {:?}\n  got  {:?}",
                case.template,
                case.text,
                rendered.map(|rendered| rendered.text)
            ));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// What a template is refused with, when it is read or when it renders; within seconds.
fn refusal(source: &str) -> String {
    let begin = Instant::now();
    let refused = match template(source) {
        Err(err) => err.to_string(),
        Ok(template) => match template.render(&chat(), &[]) {
            Err(err) => err.to_string(),
            Ok(rendered) => panic!("{source:.99} gives {} bytes", rendered.text.len()),
        },
    };
    let time = begin.elapsed();
    assert!(time < Duration::from_secs(60), "{source:.99}: {time:?}");
    refused
}

#[test]
fn what_is_nested_too_deep_is_refused() {
    let nested = |begin: &str, inside: &str, end: &str, count: usize| {
        format!("{}{inside}{}", begin.repeat(count), end.repeat(count))
    };
    let shown = |code: String| format!("{{{{ {code} }}}}");
    let grow = |code: &str| {
        format!(
            "{{% set ns = namespace(x=[1, 2]) %}}{{% for i in range(2000) %}}{{% set ns.x = {code} %}}{{% endfor %}}{{{{ ns.x }}}}"
        )
    };
    let cases = [
        (shown(nested("(", "1", ")", 2_000)), "brackets are more than 50 deep"),
        (shown(nested("[", "", "]", 2_000)), "brackets are more than 50 deep"),
        (shown(nested("{1: ", "1", "}", 2_000)), "brackets are more than 50 deep"),
        (shown(nested("f(", "1", ")", 60)), "brackets are more than 50 deep"),
        (shown(nested("not ", "1", "", 2_000)), "more than 1000 operators"),
        (shown(nested("-", "1", "", 2_000)), "more than 1000 operators"),
        (shown(nested("1 if 1 else ", "1", "", 2_000)), "more than 1000 operators"),
        (shown(nested("1 + ", "1", "", 2_000)), "more than 1000 operators"),
        (shown(nested("1 ~ ", "1", "", 2_000)), "more than 1000 operators"),
        (shown(nested("", "x", "|trim", 2_000)), "more than 1000 operators"),
        (shown(nested("", "x", ".x", 2_000)), "more than 1000 operators"),
        (shown(nested("", "x", "[0]", 2_000)), "more than 1000 operators"),
        (shown(nested("", "x", " is x", 2_000)), "more than 1000 operators"),
        (nested("{% if 1 %}", "x", "{% endif %}", 2_000), "recursion"),
        (nested("{% for i in [1] %}", "x", "{% endfor %}", 2_000), "recursion"),
        (nested("{% macro f() %}", "x", "{% endmacro %}", 2_000), "recursion"),
        (
            format!("{{% if x %}}{}{{% endif %}}", "{% elif x %}".repeat(2_000)),
            "more than 1000 elif tags",
        ),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}".to_string(), "recursion limit"),
        (
            "{% macro f(x) %}{{ f([[[[x]]]]) }}{% endmacro %}{{ f(1) }}".to_string(),
            "recursion limit",
        ),
        (
            "{% macro f() %}{% call f() %}{{ f() }}{% endcall %}{{ caller() }}{% endmacro %}{{ f() }}".to_string(),
            "recursion limit",
        ),
        (
            "{% for i in [1] recursive %}{{ loop([1]) }}{% endfor %}".to_string(),
            "recursion limit",
        ),
        ("{% block a %}{{ self.a() }}{% endblock %}".to_string(), "recursion limit"),
        ("{% include 'chat' %}".to_string(), "error in"),
        (grow("[ns.x]"), "more than 200 deep"),
        (grow("{'a': ns.x}"), "more than 200 deep"),
        (grow("(ns.x,)"), "more than 200 deep"),
        (grow("dict(a=ns.x)"), "more than 200 deep"),
        (grow("ns.x | batch(1)"), "more than 200 deep"),
                ("{% set n = namespace() %}{% set n.a = n %}{{ n }}".to_string(), "a namespace cannot be inside"),
        (
            "{% set n = namespace() %}{% set n.a = [n] %}{{ n }}".to_string(),
            "a namespace cannot be inside",
        ),
        (
            format!("{{% set x = 1 %}}{}{{{{ x }}}}", "{% set x = [x] %}".repeat(2_000)),
            "more than 200 deep",
        ),
    ];
    for (source, reason) in cases {
        let said = refusal(&source);
        assert!(said.contains(reason), "{source:.99}: {said:.999}");
    }
    // What is computed once it is read does not wrap itself without an end.
    for code in [
        "ns.x[:]",
        "ns.x | map('int')",
        "ns.x | list | reverse",
        "ns.x * 1",
        "(ns.x + [])[:2]",
    ] {
        assert_eq!(render(&grow(code)).unwrap().len(), "[1, 2]".len(), "{code}");
    }
    assert_eq!(render(&shown(nested("(", "1", ")", 49))).unwrap(), "1");
    assert_eq!(render(&shown(nested("1 + ", "1", "", 900))).unwrap(), "901");
    let elifs = "{% elif x %}".repeat(900);
    assert_eq!(
        render(&format!("{{% if x %}}{elifs}{{% endif %}}")).unwrap(),
        ""
    );
}

#[test]
fn texts_and_steps_of_a_template_have_limits_and_end_the_run() {
    let grow = |code: &str| {
        format!(
            "{{% set ns = namespace(x='abcdabcd' * 99999) %}}{{% for i in range(999) %}}{{% set ns.x = {code} %}}{{% endfor %}}"
        )
    };
    let cases = [
        grow("ns.x ~ ns.x"),
        grow("ns.x + ns.x"),
        grow("ns.x * 9"),
        grow("ns.x | replace('a', ns.x)"),
        grow("ns.x.replace('a', ns.x)"),
        grow("ns.x.join(['a', 'b', 'c'])"),
        grow("[ns.x, ns.x, ns.x] | join"),
        grow("'{0}{0}{0}'.format(ns.x)"),
        "{% for i in range(9999) %}{{ 'a' * 99999 }}{% endfor %}".to_string(),
        "{% set x %}{% for i in range(9999) %}{{ 'a' * 99999 }}{% endfor %}{% endset %}"
            .to_string(),
        "{{ 'a' * 10 ** 9 }}".to_string(),
        "{{ '%999999999999999999999s' % 'a' }}".to_string(),
        "{{ '%*d' % (999999999, 1) }}".to_string(),
        "{{ '{:999999999}'.format('a') }}".to_string(),
        "{{ 'a'.ljust(999999999) }}".to_string(),
        "{{ 'a'.zfill(999999999999) }}".to_string(),
        "{{ '\\t'.expandtabs(999999999) }}".to_string(),
        "{{ 'a' | center(999999999) }}".to_string(),
        "{{ range(10 ** 9) }}".to_string(),
    ];
    for source in cases {
        let said = refusal(&source);
        let reasons = [
            "text of more than 64 MB",
            "more than 20010000 steps",
            "is too large",
            "has too many elements",
        ];
        assert!(
            reasons.iter().any(|reason| said.contains(reason)),
            "{source:.99}: {said:.999}"
        );
    }
    // The first record ends the run, not each record its own time.
    let endless = "{% for i in range(99999) %}{% set x = 'a' * 10 ** 7 %}{% endfor %}";
    let record = r#"{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}"#;
    let reading = Reading::new(Some(endless));
    reading.write("a.jsonl", format!("{record}\n").repeat(3));
    crate::assert_error(
        reading.read("a.jsonl", ""),
        &[
            "a.jsonl",
            "line 1",
            "the chat template refuses it",
            "more than 20020000 steps",
        ],
    );
}

#[test]
fn numbers_of_records_are_those_of_python() {
    let template = "{% for m in messages %}{{ m.content }}{% if m.x %}{{ m.x }} {{ m.x | tojson }}{% endif %}{{ eos_token }}{% endfor %}";
    let numbers = "[1e-7, 2E16, 12345678901234567890123, -170141183460469231731687303715884105729, 98765432109876543210987654321098765432109876543210, 18446744073709551616, 0.1, 1234567890123456789.5, 7]";
    let printed = "[1e-07, 2e+16, 12345678901234567890123, -170141183460469231731687303715884105729, 98765432109876543210987654321098765432109876543210, 18446744073709551616, 0.1, 1.2345678901234568e+18, 7]";
    let record = |content: &str| {
        format!(
            r#"{{"messages": [{{"role": "user", "content": ""}}, {{"role": "assistant", "content": "{content}", "x": {numbers}}}]}}"#
        )
    };
    let reading = Reading::new(Some(template));
    let content = "\\\"12345678901234567890123";
    reading.write("a.jsonl", format!("{}\n", record(content)));
    // One document over several lines.
    reading.write(
        "a.json",
        format!("[\n{}\n]", record(content).replace(": [", ":\n[")),
    );
    for name in ["a.jsonl", "a.json"] {
        let read = reading.read(name, "").unwrap();
        assert_eq!(read.records.len(), 1, "{name}");
        let text = read.records[0].replace(['⟦', '⟧'], "");
        let want = format!("\"12345678901234567890123{printed} {printed}");
        assert_eq!(text, want, "{name}");
    }
}

#[test]
fn values_deeper_than_others_are_printed_or_refused() {
    let deep = |depth: usize| {
        let json = format!("{}{}", "[".repeat(depth), "]".repeat(depth));
        let value: Value = serde_json::from_str(&json).unwrap();
        let message = context! { role => "user", content => "x", value => vec![value] };
        Chat::new(vec![message], None).unwrap()
    };
    for source in [
        "{{ messages[0].value }}",
        "{{ messages[0].value | tojson }}",
        "{{ messages[0].value ~ '' }}",
        "{% set x = messages[0].value %}{{ x | string }}",
    ] {
        let text = template(source)
            .unwrap()
            .render(&deep(100), &[])
            .unwrap()
            .text;
        assert_eq!(text.len(), 202, "{source}");
    }
    let mut value = Value::from(1);
    for _ in 0..250 {
        value = Value::from(vec![value]);
    }
    let message = context! { role => "user", content => "x", value };
    let chat = Chat::new(vec![message], None).unwrap();
    for source in [
        "{{ messages }}",
        "{{ messages | tojson }}",
        "{{ messages ~ '' }}",
    ] {
        let refused = template(source).unwrap().render(&chat, &[]).unwrap_err();
        assert!(
            refused.to_string().contains("more than 200 deep"),
            "{source}: {refused}"
        );
    }
}
