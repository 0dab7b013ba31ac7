//! The forms that parts of conversations have in records: what transformers' `apply_chat_template` makes of them, or
//! an error with field and place.

use candle_data::{EncoderConfig, TemplateKwargs};
use serde_json::{Value, json};

use crate::assert_error;
use crate::read::{Reading, lines};

/// Tools, contents and calls, as most templates write them.
const CALLS: &str = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}<{{ m.role }}>{{ m.content if m.content }}{% for c in m.tool_calls or [] %}{% if c.function %}{% set c = c.function %}{% endif %}[{{ c.name }} {{ c.arguments | tojson }}]{% endfor %}{{ eos_token if m.role == 'assistant' }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";
/// As that of Mistral: a turn with calls has no header and no content, and tools are before the last message of the
/// user.
const CALLS_ALONE: &str = "{% for m in messages %}{% if m.role == 'tool' %}[RESULT]{{ m.content }}[/RESULT]{% elif m.tool_calls is defined and m.tool_calls %}[CALLS]{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}{{ eos_token }}{% else %}{% if m.role == 'user' and tools and (messages | selectattr('role', 'equalto', 'user') | list)[-1] == m %}[TOOLS]{{ tools | tojson }}[/TOOLS]{% endif %}<{{ m.role }}>{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";

/// That of Mistral-7B-Instruct-v0.3.
const MISTRAL_V3: &str = include_str!("../../../../tests/fixtures/chat/templates/mistral-v3.jinja");

/// What is read of one record, with marks around what is learned.
fn read(template: &str, record: &Value) -> candle_core::Result<(String, Vec<String>)> {
    let reading = Reading::new(Some(template));
    reading.write("a.jsonl", lines(std::slice::from_ref(record)));
    let read = reading.read("a.jsonl", "")?;
    Ok((read.records.concat(), read.warnings))
}

fn text(template: &str, record: &Value) -> String {
    read(template, record).unwrap().0
}

/// A question, a call with these fields, the tool's answer and the assistant's.
fn with_calls(calls: Value, tools: Value) -> Value {
    let mut call = json!({"role": "assistant", "content": ""});
    let fields = call.as_object_mut().unwrap();
    fields.extend(calls.as_object().unwrap().clone());
    json!({"tools": tools, "messages": [{"role": "user", "content": "on?"}, call,
        {"role": "tool", "content": "mat"}, {"role": "assistant", "content": "sat"}]})
}

fn call() -> Value {
    json!({"type": "function", "function": {"name": "f", "arguments": {"x": 1}}})
}

/// `null` that says nothing, in each message, as Arrow and OpenAI's client write it.
fn answer(content: Value) -> Value {
    json!({"messages": [{"role": "user", "content": "on?", "tool_calls": null, "name": null},
        {"role": "assistant", "content": content, "tool_calls": null, "name": null}]})
}

#[test]
fn tools_and_calls_are_lists_of_objects_or_json_in_texts() {
    let tool = json!({"name": "f", "parameters": {}});
    let want = r#"{"name": "f", "parameters": {}}<user>on?<assistant>⟦[f {"x": 1}]⟧<tool>mat<assistant>⟦sat⟧"#;
    let as_text = |value: &Value| Value::from(value.to_string());
    let in_function = json!({"function": as_text(&call()["function"])});
    for calls in [
        json!([call()]),
        as_text(&json!([call()])),
        json!([as_text(&call())]),
        json!([in_function]),
        json!([call()["function"]]),
    ] {
        for tools in [
            json!([tool]),
            as_text(&json!([tool])),
            json!([as_text(&tool)]),
        ] {
            let record = with_calls(json!({"tool_calls": calls}), tools);
            assert_eq!(text(CALLS, &record), want, "{record}");
        }
    }
    let nothing = "<user>on?<assistant><tool>mat<assistant>⟦sat⟧";
    for none in [json!([]), json!({}), json!(""), json!(null), json!("[]")] {
        let record = with_calls(json!({"tool_calls": none}), none.clone());
        assert_eq!(text(CALLS, &record).replace("⟦⟧", ""), nothing, "{none}");
    }
}

#[test]
fn tools_and_calls_of_other_shapes_are_errors_with_line_and_field() {
    for (calls, part) in [
        (call(), "tool_calls as one object, expected a list"),
        (
            Value::from(call().to_string()),
            "tool_calls as one object, expected a list",
        ),
        (json!("f(1)"), "tool_calls in a text that is not valid JSON"),
        (json!(3), "tool_calls as number, expected a list"),
        (json!([3]), "tool_calls[0] as number, expected an object"),
        (
            json!([call(), "f"]),
            "tool_calls[1] in a text that is not valid JSON",
        ),
        (
            json!([{"function": "f"}]),
            "tool_calls[0].function in a text that is not valid JSON",
        ),
        (
            json!([{"function": [1]}]),
            "tool_calls[0].function as a list, expected an object",
        ),
    ] {
        let record = with_calls(json!({"tool_calls": calls}), json!(null));
        let parts = ["a.jsonl line 1: message 1 has ", part];
        assert_error(read(CALLS, &record), &parts);
    }
    let old = with_calls(json!({"function_call": "f(1)"}), json!(null));
    assert_error(read(CALLS, &old), &["line 1: message 1 has function_call"]);
    for (tools, part) in [
        (
            json!({"name": "f"}),
            "tools as one object, expected a list of objects",
        ),
        (json!("f, g"), "tools in a text that is not valid JSON"),
        (json!(["f"]), "tools[0] in a text that is not valid JSON"),
        (json!([[1]]), "tools[0] as a list, expected an object"),
        (json!(true), "tools as bool, expected a list"),
    ] {
        let record = with_calls(json!({"tool_calls": [call()]}), tools);
        assert_error(read(CALLS, &record), &["a.jsonl line 1: it has ", part]);
    }
}

#[test]
fn null_is_a_missing_field() {
    // As that of Llama 3.1, which looks for the field.
    let template = "{% for m in messages %}<{{ m.role }}>{% if 'tool_calls' in m %}[{{ m.tool_calls | length }} calls]{% else %}{{ m.content }}{% endif %}{{ eos_token if m.role == 'assistant' }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";
    let want = "<user>on?<assistant>⟦sat⟧";
    assert_eq!(text(template, &answer(json!("sat"))), want);
    for content in [json!(null), json!("")] {
        let record = with_calls(
            json!({"content": content, "tool_calls": [call()]}),
            json!(null),
        );
        let printing = CALLS.replace("{{ m.content if m.content }}", "{{ m.content }}");
        assert_eq!(
            text(&printing, &record),
            "<user>on?<assistant>⟦[f {\"x\": 1}]⟧<tool>mat<assistant>⟦sat⟧"
        );
        // As that of DeepSeek V3: null is not an empty text.
        let testing = CALLS.replace(
            "m.content if",
            "'NONE' if m['content'] is none else m.content if",
        );
        let shown = if content.is_null() { "NONE" } else { "" };
        assert_eq!(
            text(&testing, &record),
            format!("<user>on?<assistant>⟦{shown}[f {{\"x\": 1}}]⟧<tool>mat<assistant>⟦sat⟧")
        );
    }
    for record in [
        answer(json!(null)),
        json!({"messages": [{"role": "user", "content": "on?"}, {"role": "assistant", "text": "sat"}]}),
    ] {
        let parts = [
            "a.jsonl line 1",
            "message 1 has no content and no calls of tools; its fields are ",
        ];
        assert_error(read(CALLS, &record), &parts);
    }
}

#[test]
fn a_turn_that_shows_its_calls_in_place_of_its_content_is_learned() {
    let calls = |name: &str| json!([{"function": {"name": name, "arguments": {"x": 1}}}]);
    let shown = |name: &str| format!(r#"⟦[CALLS]{{"arguments": {{"x": 1}}, "name": "{name}"}}⟧"#);
    let record = with_calls(json!({"tool_calls": calls("f")}), json!(null));
    assert_eq!(
        text(CALLS_ALONE, &record),
        format!(
            "<user>on?{}[RESULT]mat[/RESULT]<assistant>⟦sat⟧",
            shown("f")
        )
    );
    // The last one, and the same one twice before a question that tools are shown at.
    let turn = |role: &str, content: &str| json!({"role": role, "content": content});
    let called =
        |name: &str| json!({"role": "assistant", "content": null, "tool_calls": calls(name)});
    let record = json!({"tools": [{"name": "f"}], "messages": [turn("user", "on?"), called("f"), turn("tool", "mat"), called("f"),
        turn("tool", "cat"), turn("assistant", "sat"), turn("user", "the"), called("g")]});
    assert_eq!(
        text(CALLS_ALONE, &record),
        format!(
            "<user>on?{f}[RESULT]mat[/RESULT]{f}[RESULT]cat[/RESULT]<assistant>⟦sat⟧[TOOLS][{{\"name\": \"f\"}}][/TOOLS]<user>the{g}",
            f = shown("f"),
            g = shown("g")
        )
    );
    // A text beside calls is told, as it is not learned.
    let mut beside = with_calls(json!({"tool_calls": calls("f")}), json!(null));
    let want = text(CALLS_ALONE, &beside);
    beside["messages"][1]["content"] = json!("the cat");
    let told = "nothing reads these fields of the records: messages[].content beside calls of tools (1 record, the first a.jsonl line 1)";
    assert_eq!(
        read(CALLS_ALONE, &beside).unwrap(),
        (want, vec![told.to_string()])
    );
    // As that of gpt-oss: the thoughts before earlier calls are left out.
    let forgetting = "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% if m.thinking and loop.last %}<think>{{ m.thinking }}</think><assistant>{% endif %}{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}<end>{% endfor %}{% if not m.tool_calls %}<say>{{ m.content }}<end>{% endif %}{% else %}{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";
    let record = with_calls(
        json!({"tool_calls": calls("f"), "thinking": "hm"}),
        json!(null),
    );
    assert_eq!(
        text(forgetting, &record),
        "<user>on?<assistant>⟦<call>f<end>⟧<tool>mat<assistant>⟦<say>sat<end>⟧"
    );
    // As that of Gemma 4: the turn goes on with what the tool answers.
    let going_on = "{% for m in messages %}{% if m.role == 'tool' %}<answer>{{ m.content }}</answer>{% else %}{% if not loop.first and messages[loop.index0 - 1].role != 'tool' or m.role == 'user' %}<{{ m.role }}>{% endif %}{% if m.tool_calls %}<call>{{ m.tool_calls[0].function.name }}</call>{% if loop.last %}<end>{% endif %}{% else %}{{ m.content }}<end>{% endif %}{% endif %}{% endfor %}{% if add_generation_prompt and messages[-1].role != 'tool' %}<assistant>{% endif %}";
    let record = with_calls(json!({"tool_calls": calls("f")}), json!(null));
    assert_eq!(
        text(going_on, &record),
        "<user>on?<end><assistant>⟦<call>f</call>⟧<answer>mat</answer>⟦sat<end>⟧"
    );
    // As that of Phi 3: what ends the whole conversation begins as the next turn does.
    let ending = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}{% if add_generation_prompt %}<assistant>{% else %}<over>{% endif %}";
    let record = json!({"messages": [turn("user", "on?"), turn("assistant", "sat"), turn("user", "the"), turn("assistant", "cat")]});
    assert_eq!(
        text(ending, &record),
        "<user>on?<end><assistant>⟦sat<end>⟧<user>the<end><assistant>⟦cat<end><over>⟧"
    );
}

#[test]
fn content_in_parts_goes_to_templates_that_walk_parts_as_parts() {
    let part = |text: &str| json!({"type": "text", "text": text});
    let record = json!({"messages": [{"role": "user", "content": [part("on "), part("the?")]},
        {"role": "assistant", "content": [{"type": "text", "value": " mat"}, " sat"]}]});
    // As that of Gemma 3, which trims each part.
    let walking = "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content | trim }}{% else %}{% for p in m.content %}{{ p.text | trim }}{% endfor %}{% endif %}{{ eos_token if m.role == 'assistant' }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";
    let told = |template: &str| read(template, &record).unwrap();
    let kept = "content in parts went to the chat template as parts, as it shows each of them: 1 record, the first a.jsonl line 1";
    let joined = "content in parts was joined to one text, as the chat template does not show each of them: 1 record, the first a.jsonl line 1";
    assert_eq!(
        told(walking),
        ("<user>onthe?<assistant>⟦matsat⟧".into(), vec![kept.into()])
    );
    // Some walk the parts of some roles, or print lists, or show the first part, or refuse a list.
    let of_users = walking.replace("m.content is string", "m.role == 'assistant'");
    let want = (
        "<user>onthe?<assistant>⟦mat sat⟧".into(),
        vec![kept.into(), joined.into()],
    );
    assert_eq!(told(&of_users), want);
    let want = (
        "<user>on the?<assistant>⟦ mat sat⟧".into(),
        vec![joined.into()],
    );
    assert_eq!(told(CALLS), want);
    let to_json = "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}{{ m.content | tojson }}{% endif %}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";
    assert_eq!(told(to_json).0, want.0);
    let first = "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}{{ m.content[0].text }}{% endif %}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";
    assert_eq!(told(first).0, want.0);
    let refusing = "{% for m in messages %}{{ '<' + m.role + '>' + m.content + eos_token }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";
    assert_eq!(told(refusing), want);
    // Quotes around all of them are no list.
    let quoting = "{% for m in messages %}<{{ m.role }}>\"{% if m.content is string %}{{ m.content | trim }}{% else %}{% for p in m.content %}{{ p.text | trim }}{% endfor %}{% endif %}\"{{ eos_token if m.role == 'assistant' }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";
    let quoted = json!({"messages": [{"role": "user", "content": [part(" on? ")]}, {"role": "assistant", "content": "sat"}]});
    assert_eq!(
        read(quoting, &quoted).unwrap(),
        (
            "<user>\"on?\"<assistant>⟦\"sat\"⟧".into(),
            vec![kept.into()]
        )
    );
    // One that shows parts alone is given texts as texts.
    let parts_alone = walking.replace(
        "{% if m.content is string %}{{ m.content | trim }}{% else %}",
        "{% if true %}",
    );
    assert_eq!(told(&parts_alone).0, "<user>onthe?<assistant>⟦matsat⟧");
}

#[test]
fn arguments_in_texts_stay_texts_for_templates_that_refuse_or_misprint_objects() {
    let json = r#"{"x":1, "y": "é"}"#;
    let calls = json!([{"function": {"name": "f", "arguments": json}}]);
    let record = with_calls(json!({"tool_calls": calls}), json!(null));
    let shown = |template: &str| {
        let (text, warnings) = read(template, &record).unwrap();
        let (_, after) = text.split_once("⟦").unwrap();
        let (turn, _) = after.split_once("⟧").unwrap();
        (turn.to_string(), warnings.len())
    };
    let with =
        |arguments: &str| CALLS.replace("[{{ c.name }} {{ c.arguments | tojson }}]", arguments);
    let raw = (format!("[f {json}]"), 0);
    // As that of DeepSeek V3.
    assert_eq!(
        shown(&with("{{ '[' + c.name + ' ' + c.arguments + ']' }}")),
        raw
    );
    assert_eq!(shown(&with("[{{ c.name }} {{ c.arguments }}]")), raw);
    let object = (r#"[f {"x": 1, "y": "é"}]"#.to_string(), 1);
    assert_eq!(shown(CALLS), object);
    let either = "[f {% if c.arguments is string %}{{ c.arguments }}{% else %}{{ c.arguments | tojson }}{% endif %}]";
    assert_eq!(shown(&with(either)), object);
    let walked = "[f{% for k in c.arguments %} {{ k }}={{ c.arguments[k] }}{% endfor %}]";
    assert_eq!(shown(&with(walked)), ("[f x=1 y=é]".to_string(), 1));
}

#[test]
fn variables_of_a_record_and_of_a_run_reach_the_template() {
    let template = "{% if thinking is defined %}[{{ thinking }}]{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token if m.role == 'assistant' }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";
    let chat = "<user>on?<assistant>⟦sat⟧";
    let with = |kwargs: Value| {
        let mut record = answer(json!("sat"));
        record["chat_template_kwargs"] = kwargs;
        record
    };
    for (kwargs, want) in [
        (json!({"thinking": 5}), format!("[5]{chat}")),
        (json!("{\"thinking\": 5}"), format!("[5]{chat}")),
        (json!(null), chat.to_string()),
        (json!({}), chat.to_string()),
    ] {
        assert_eq!(read(template, &with(kwargs)).unwrap(), (want, Vec::new()));
    }
    let unknown = read(template, &with(json!({"enable_thinking": true})))
        .unwrap()
        .1;
    assert_eq!(
        unknown,
        [
            "nothing reads these fields of the records: chat_template_kwargs.enable_thinking (1 record, the first a.jsonl line 1)"
        ]
    );
    // As Arrow writes what a record does not have.
    let reading = Reading::new(Some(template));
    reading.write("a.jsonl", lines(&[with(json!({"thinking": null}))]));
    let kwargs: TemplateKwargs = "{\"thinking\": 3}".parse().unwrap();
    let read_null = reading.read_with_kwargs("a.jsonl", EncoderConfig::default(), &kwargs);
    assert_eq!(read_null.unwrap().records, [format!("[3]{chat}")]);
    for (kwargs, part) in [
        (json!([1]), "is sequence, expected a JSON object"),
        (json!("x"), "is not valid JSON"),
        (
            json!({"messages": []}),
            "has messages, which is no variable",
        ),
    ] {
        let parts = ["a.jsonl line 1: its chat_template_kwargs ", part];
        assert_error(read(template, &with(kwargs)), &parts);
    }
    // Those of a run hold for records that say nothing else, and are among what the cache goes by.
    let reading = Reading::new(Some(template));
    let records = [answer(json!("sat")), with(json!({"thinking": 5}))];
    reading.write("a.jsonl", lines(&records));
    for thinking in [3, 4] {
        let kwargs: TemplateKwargs = format!("{{\"thinking\": {thinking}}}").parse().unwrap();
        let read = reading.read_with_kwargs("a.jsonl", EncoderConfig::default(), &kwargs);
        let want = [format!("[{thinking}]{chat}"), format!("[5]{chat}")];
        assert_eq!(read.unwrap().records, want);
    }
    let other: TemplateKwargs = "{\"other\": 1}".parse().unwrap();
    let refused = reading.read_with_kwargs("a.jsonl", EncoderConfig::default(), &other);
    assert_error(
        refused.map(|_| ()),
        &["chat_template.jinja", "does not read other"],
    );
}

#[test]
fn common_names_of_roles_are_those_that_templates_know_and_others_are_refused() {
    let record = |user: &str, assistant: &str| json!({"messages": [{"role": user, "content": "on?"}, {"role": assistant, "content": "sat"}]});
    for (user, assistant) in [
        ("user", "assistant"),
        ("human", "gpt"),
        ("Human", "model"),
        ("USER", "Assistant"),
        ("user", "bot"),
    ] {
        let text = text(CALLS, &record(user, assistant));
        assert_eq!(text, "<user>on?<assistant>⟦sat⟧");
    }
    let developer = json!({"messages": [{"role": "developer", "content": "the"}, {"role": "assistant", "content": "sat"}]});
    assert_eq!(text(CALLS, &developer), "<developer>the<assistant>⟦sat⟧");
    for other in ["narrator", "", "assistant:"] {
        let parts = [
            "a.jsonl line 1: message 0 has the role ",
            "chat_template.jinja",
            "expected one of system, human, user, gpt, assistant",
        ];
        assert_error(read(CALLS, &record(other, "assistant")), &parts);
    }
    // A template may have roles of its own.
    let own = format!("{CALLS}{{# #}}{{% if messages[0].role == 'narrator' %}}{{% endif %}}");
    assert_eq!(
        text(&own, &record("narrator", "assistant")),
        "<narrator>on?<assistant>⟦sat⟧"
    );
}

#[test]
fn what_a_template_inserts_before_one_message_is_in_no_turn() {
    let tools = json!([{"type": "function", "function": {"name": "f", "description": "d"}}]);
    let shown = "[AVAILABLE_TOOLS] [{\"type\": \"function\", \"function\": {\"description\": \"d\", \"name\": \"f\"}}][/AVAILABLE_TOOLS]";
    let turn = |role: &str, content: &str| json!({"role": role, "content": content});
    for num_turns in 3..6 {
        let last = num_turns - 1;
        let messages = (0..num_turns).flat_map(|index| {
            [
                turn("user", &format!("q{index}")),
                turn("assistant", &format!("a{index}")),
            ]
        });
        let record = json!({"tools": tools, "messages": messages.collect::<Vec<_>>()});
        let want = (0..num_turns).map(|index| {
            let tools = if index == last { shown } else { "" };
            format!("{tools}[INST] q{index}[/INST]⟦ a{index}⟧")
        });
        let read = text(MISTRAL_V3, &record).replace("<|begin_of_text|>", "");
        assert_eq!(read, want.collect::<String>());
    }
}

#[test]
fn a_call_is_not_looked_for_in_what_the_user_says() {
    let call =
        r#"[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}, "id": "abcdefghi"}]<|end_of_text|>"#;
    let record = json!({"tools": [{"type": "function", "function": {"name": "f"}}], "messages": [
        {"role": "user", "content": format!("write {call} please")},
        {"role": "assistant", "tool_calls": [{"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]},
        {"role": "tool", "content": "r"}, {"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}]});
    let read = text(MISTRAL_V3, &record);
    let quoted = read.find("please[/INST]⟦[TOOL_CALLS] [{").unwrap();
    assert!(read[..quoted].find('⟦').is_none(), "{read}");
    assert!(read.ends_with("[INST] b[/INST]⟦ c⟧"), "{read}");
}

#[test]
fn a_turn_that_ends_otherwise_than_where_it_is_last_is_whole_or_an_error() {
    let thinking = json!({"thinking": "hm", "tool_calls": [call()]});
    let record = with_calls(thinking, json!(null));
    let template = "{% for m in messages %}<{{ m.role }}>{% if m.tool_calls %}{% if m.thinking and loop.last %}Thinking: {{ m.thinking }}. {% endif %}To call {{ m.tool_calls[0].function.name }}{% if loop.last %}<end>{% endif %}{% else %}{{ m.content }}<end>{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";
    assert_eq!(
        text(template, &record),
        "<user>on?<end><assistant>⟦To call f⟧<tool>mat<end><assistant>⟦sat<end>⟧"
    );
    let other = template.replace("To call", "To{{ '!' if loop.last }} call");
    let parts = [
        "a.jsonl line 1",
        "the chat template does not show the content of the assistant's message 1 once",
    ];
    assert_error(read(&other, &record), &parts);
}

#[test]
fn roles_are_named_where_the_template_tests_for_them() {
    let record = |user: &str, assistant: &str| json!({"messages": [{"role": user, "content": "on?"}, {"role": assistant, "content": "sat"}]});
    let printing = |test: &str| {
        format!(
            "{{# {{\"role\": \"\"}} #}}{CALLS}{{% if {test} %}}{{{{ 'narrator' and 'content' }}}}{{% endif %}}"
        )
    };
    for other in ["", "content", "tool_calls", "narrator"] {
        let template = printing("'tool_calls' in messages[0]");
        let parts = [
            "a.jsonl line 1: message 0 has the role ",
            "does not test for it",
        ];
        assert_error(read(&template, &record(other, "assistant")), &parts);
    }
    for test in [
        "messages[0]['role'] != 'narrator'",
        "messages[0].role | lower == \"narrator\"",
        "'narrator' == messages[0].role",
        "messages[0].role not in ('user', 'narrator')",
        "messages | selectattr('role', 'equalto', 'narrator') | list",
    ] {
        let template = format!("{CALLS}{{% if {test} %}}{{% endif %}}");
        let read = text(&template, &record("narrator", "assistant"));
        assert_eq!(read, "<narrator>on?<assistant>⟦sat⟧", "{test}");
    }
    // Common names stay what the template tests for.
    let own = "{% for m in messages %}{% if m.role == 'human' %}H:{{ m.content }}{% elif m.role == 'bot' %}B:{{ m.content }}{{ eos_token }}{% else %}SYS:{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}B:{% endif %}";
    let said = json!({"conversations": [{"from": "human", "value": "on?"}, {"from": "bot", "value": "sat"}]});
    for record in [record("human", "bot"), said] {
        assert_eq!(text(own, &record), "H:on?B:⟦sat⟧");
        assert_eq!(text(CALLS, &record), "<user>on?<assistant>⟦sat⟧");
    }
}
