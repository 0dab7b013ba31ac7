//! `candle-train generate`: texts and chats, with adapters and tensor-parallel ranks.

use std::fs;

use super::folder::edit_json;
use super::program::Program;
use super::workspace::{Workspace, candle_train};

fn generate(workspace: &Workspace) -> Program {
    candle_train("generate")
        .flag("--model", workspace.path("model").display())
        .flag("--max-new-tokens", 12)
}

#[test]
fn a_text_goes_on_the_same_way_on_any_number_of_ranks() {
    let workspace = Workspace::new();
    let text = |program: Program| program.flag("--prompt", "The Queen").succeeds().stdout;
    let greedy = text(generate(&workspace));
    assert!(
        greedy.starts_with("The Queen") && greedy.len() > 12,
        "{greedy}"
    );
    assert_eq!(text(generate(&workspace).flag("--tp", 2)), greedy);
    let hot = |seed| {
        generate(&workspace)
            .flag("--temperature", 5)
            .flag("--seed", seed)
    };
    let first = text(hot(1));
    assert_eq!(text(hot(1)), first);
    assert_ne!(text(hot(2)), first);
    // What the model's own file says is the default.
    let config = workspace.model("generation_config.json");
    let said = r#"{"do_sample": true, "temperature": 5.0, "eos_token_id": [1]}"#;
    fs::write(&config, said).unwrap();
    assert_eq!(text(generate(&workspace).flag("--seed", 1)), first);
    assert_eq!(text(generate(&workspace).flag("--temperature", 0)), greedy);
}

#[test]
fn a_conversation_is_answered_in_the_models_template() {
    let workspace = Workspace::new();
    let _ = fs::remove_file(workspace.model("chat_template.jinja"));
    edit_json(&workspace.model("tokenizer_config.json"), |config| {
        config.as_object_mut().unwrap().remove("chat_template");
    });
    let chat = || {
        generate(&workspace)
            .switch("--chat")
            .flag("--prompt", "Who are you?")
    };
    chat()
        .run()
        .assert_error(&["has no chat template", "hint: "]);
    let template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>";
    fs::write(workspace.model("chat_template.jinja"), template).unwrap();
    // Its stdin is empty, so the conversation ends after the first answer.
    let answer = chat().succeeds().stdout;
    let rendered = generate(&workspace).flag("--prompt", "<user>Who are you?<assistant>");
    let text = rendered.succeeds().stdout;
    assert_eq!(
        text.strip_prefix("<user>Who are you?<assistant>"),
        Some(answer.as_str())
    );
    let system = chat().flag("--system", "Be brief.").succeeds().stdout;
    assert_ne!(system, answer);
}

#[test]
fn an_adapter_changes_what_is_written() {
    let workspace = Workspace::new();
    let adapter = workspace.path("adapter");
    let program = workspace
        .finetune()
        .flag("--lora-rank", 4)
        .flag("--lr", 0.5);
    program.flag("--output", adapter.display()).succeeds();
    let text = |program: Program| program.flag("--prompt", "The Queen").succeeds().stdout;
    let with = text(generate(&workspace).flag("--adapter", adapter.display()));
    assert_ne!(with, text(generate(&workspace)));
}

#[test]
fn what_cannot_be_generated_is_said() {
    let workspace = Workspace::new();
    generate(&workspace)
        .run()
        .assert_error(&["neither --prompt nor --chat"]);
    let empty = generate(&workspace).flag("--prompt", "");
    empty.run().assert_error(&["the prompt has no tokens"]);
    let system = generate(&workspace)
        .flag("--prompt", "a")
        .flag("--system", "b");
    system.run().assert_error(&["--chat"]);
    let tp = generate(&workspace).flag("--prompt", "a").flag("--tp", 5);
    tp.run().assert_error(&["tp(5)", "num_attention_heads(4)"]);
    edit_json(&workspace.model("config.json"), |config| {
        config["vocab_size"] = 5.into()
    });
    let other = generate(&workspace).flag("--prompt", "The Queen");
    other
        .run()
        .assert_error(&["embed_tokens", "[307, 32]", "expected [5, 32]"]);
}
