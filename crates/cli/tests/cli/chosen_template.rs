//! `--chat-template`: conversations for a model without a template, from the data to an answer that ends.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use super::folder::edit_json;
use super::program::{AssertText, Program};
use super::workspace::{Workspace, candle_train};

/// A base model without a template, and conversations.
fn workspace() -> Workspace {
    let workspace = Workspace::new();
    let _ = fs::remove_file(workspace.model("chat_template.jinja"));
    let _ = fs::remove_file(workspace.model("generation_config.json"));
    edit_json(&workspace.model("tokenizer_config.json"), |config| {
        config.as_object_mut().unwrap().remove("chat_template");
    });
    let record = json!({"messages": [
        {"role": "user", "content": "Begin"}, {"role": "assistant", "content": "one"}
    ]});
    fs::write(
        workspace.path("chat.jsonl"),
        format!("{record}\n{record}\n{record}\n{record}\n"),
    )
    .unwrap();
    workspace
}

fn finetune(workspace: &Workspace) -> Program {
    workspace
        .finetune()
        .flag("--tp", 1)
        .flag("--pp", 1)
        .flag("--seq-len", 64)
        .flag("--data", workspace.path("chat.jsonl").display())
}

fn read_json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

#[test]
fn a_base_model_learns_conversations_and_keeps_the_template() {
    let workspace = workspace();
    let run = finetune(&workspace).flag("--chat-template", "zephyr");
    let said = run.succeeds_with_warnings().stderr;
    // Of the markers one warning, and the end of a turn is a token.
    assert_eq!(said.matches("warning: ").count(), 1, "{said}");
    assert!(
        said.contains("<|user|>") && !said.contains("do not end"),
        "{said}"
    );
    let output = workspace.output();
    let template = fs::read_to_string(output.join("chat_template.jinja")).unwrap();
    template.assert_has(&["'<|' + message['role'] + '|>"]);
    let ends = &read_json(&output.join("generation_config.json"))["eos_token_id"];
    assert!(
        ends.as_array().is_some_and(|ends| !ends.is_empty()),
        "{ends}"
    );
    let toml = fs::read_to_string(output.join("candle_train.toml")).unwrap();
    toml.assert_has(&["chat-template = \"zephyr\""]);
    // The model's own template is the chosen one now.
    let shown = |model: &Path, flags: &[(&str, &str)]| {
        let program = candle_train("preview")
            .flag("--model", model.display())
            .flag("--data", workspace.path("chat.jsonl").display())
            .flag("--num", 1);
        let program = program.flags(flags);
        program.succeeds_with_warnings().stdout
    };
    let by_flag = shown(&workspace.path("model"), &[("--chat-template", "zephyr")]);
    assert_eq!(shown(&output, &[]), by_flag);
    by_flag.assert_has(&["<|assistant|>"]);
    let chat = candle_train("generate")
        .flag("--model", output.display())
        .switch("--chat")
        .flag("--prompt", "Begin")
        .flag("--max-new-tokens", 4);
    chat.succeeds();
}

#[test]
fn a_template_file_in_place_of_the_models_own_and_what_is_none() {
    let workspace = workspace();
    fs::write(
        workspace.model("chat_template.jinja"),
        "{{ raise_exception('old') }}",
    )
    .unwrap();
    let own = workspace.path("own.jinja");
    let text = "{% for m in messages %}{{ m.role + ': ' + m.content + eos_token }}{% endfor %}";
    fs::write(&own, text).unwrap();
    let run = finetune(&workspace).flag("--chat-template", own.display());
    run.succeeds();
    let saved = fs::read_to_string(workspace.output().join("chat_template.jinja")).unwrap();
    assert_eq!(saved, text);
    let run = finetune(&workspace);
    for (choice, parts) in [
        (
            "vicuna",
            [
                "cannot read the chat template vicuna",
                "chatml, llama3, qwen, mistral, gemma, zephyr",
            ],
        ),
        ("/", ["cannot read the chat template /", "hint: "]),
    ] {
        workspace.run_refused(&run.clone().flag("--chat-template", choice), &parts);
    }
}

#[test]
fn an_end_of_turn_in_pieces_is_warned_of() {
    let workspace = workspace();
    let run = finetune(&workspace).flag("--chat-template", "chatml");
    let said = run.succeeds_with_warnings().stderr;
    said.assert_has(&[
        "<|im_end|>, <|im_start|>",
        "do not end by themselves",
        "hint: mistral and zephyr",
    ]);
}

#[test]
fn an_adapter_brings_its_template_to_the_chat_the_merge_and_the_next_run() {
    let workspace = workspace();
    let run = finetune(&workspace).flag("--lora-rank", 2);
    run.flag("--chat-template", "zephyr")
        .succeeds_with_warnings();
    let adapter = workspace.output();
    let template = fs::read_to_string(adapter.join("chat_template.jinja")).unwrap();
    assert!(adapter.join("generation_config.json").is_file());
    let chat = candle_train("chat")
        .flag("--model", adapter.display())
        .flag("--prompt", "Begin")
        .flag("--max-new-tokens", 4);
    chat.succeeds();
    let merged = workspace.path("merged");
    let merge = candle_train("merge").flag("--adapter", adapter.display());
    merge.flag("--output", merged.display()).succeeds();
    assert_eq!(
        fs::read_to_string(merged.join("chat_template.jinja")).unwrap(),
        template
    );
    let ends = &read_json(&merged.join("generation_config.json"))["eos_token_id"];
    assert!(
        ends.as_array().is_some_and(|ends| !ends.is_empty()),
        "{ends}"
    );
    let further = workspace.path("further");
    let run = finetune(&workspace).flag("--adapter", adapter.display());
    run.flag("--output", further.display())
        .succeeds_with_warnings();
    assert_eq!(
        fs::read_to_string(further.join("chat_template.jinja")).unwrap(),
        template
    );
    // The base model alone has none, and one can be named.
    let base = candle_train("chat").flag("--model", workspace.path("model").display());
    let base = base.flag("--prompt", "Begin").flag("--max-new-tokens", 4);
    base.fails(&["has no chat template", "--chat-template"]);
    base.clone().flag("--chat-template", "mistral").succeeds();
    base.flag("--chat-template", "vicuna")
        .fails(&["cannot read the chat template vicuna"]);
    let text = candle_train("generate").flag("--model", workspace.path("model").display());
    let text = text.flag("--prompt", "a").flag("--chat-template", "chatml");
    text.fails(&["--chat-template is given without --chat"]);
}

#[test]
fn a_template_for_data_without_conversations_is_refused() {
    let workspace = workspace();
    fs::write(workspace.path("pairs.csv"), "prompt,completion\na,b\n").unwrap();
    let run = finetune(&workspace)
        .flag("--data", workspace.path("pairs.csv").display())
        .flag("--chat-template", "zephyr");
    let parts = [
        "--chat-template zephyr is given",
        "no conversations",
        "instruction=question",
    ];
    workspace.run_refused(&run, &parts);
    let run = run.flag("--columns", "instruction=prompt,output=completion");
    let said = run.succeeds_with_warnings().stdout;
    said.assert_has(&["chat template: zephyr"]);
}

#[test]
fn an_adapters_template_counts_wherever_it_is() {
    let workspace = workspace();
    let run = finetune(&workspace).flag("--lora-rank", 2);
    run.flag("--chat-template", "zephyr")
        .succeeds_with_warnings();
    let adapter = workspace.path("older");
    fs::rename(workspace.output(), &adapter).unwrap();
    // As older versions of transformers save it.
    let text = fs::read_to_string(adapter.join("chat_template.jinja")).unwrap();
    fs::remove_file(adapter.join("chat_template.jinja")).unwrap();
    edit_json(&adapter.join("tokenizer_config.json"), |config| {
        config["chat_template"] = json!([
            {"name": "default", "template": text},
            {"name": "tool_use", "template": "{{ 'tools' }}"}
        ]);
    });
    let run = finetune(&workspace).flag("--adapter", adapter.display());
    let said = run.succeeds_with_warnings().stdout;
    said.assert_has(&["chat template: ", "tokenizer_config.json"]);
    let merge = candle_train("merge").flag("--adapter", adapter.display());
    let merged = workspace.path("merged");
    merge.flag("--output", merged.display()).succeeds();
    for folder in [workspace.output(), merged] {
        assert_eq!(
            fs::read_to_string(folder.join("chat_template.jinja")).unwrap(),
            text
        );
        let tools = folder.join("additional_chat_templates/tool_use.jinja");
        assert_eq!(fs::read_to_string(tools).unwrap(), "{{ 'tools' }}");
    }
}
