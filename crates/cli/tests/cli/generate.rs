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
fn a_text_ends_with_an_error_at_the_models_positions_or_a_line_says_why_it_goes_on() {
    let workspace = Workspace::new();
    workspace.edit_config(|config| config["max_position_embeddings"] = 8.into());
    let program = |tokens: usize| {
        let program = generate(&workspace).flag("--prompt", "The Queen");
        program.flag("--max-new-tokens", tokens)
    };
    let refused = |program: Program, parts: &[&str]| {
        let outcome = program.run().exited(1);
        outcome.says(parts);
        outcome
    };
    let parts = ["has reached the model's 8 positions", "--max-new-tokens "];
    let long = refused(program(30), &parts);
    // What there was room for has been written, and is what a shorter text has.
    let room = long.stderr.split("--max-new-tokens ").nth(1).unwrap();
    let room: usize = room.trim().parse().unwrap();
    assert_eq!(program(room).succeeds().stdout, long.stdout);
    // Nobody has asked for more.
    let open = program(1).without("--max-new-tokens").succeeds();
    assert_eq!(open.stdout, long.stdout);
    open.says(&[parts[0]]);
    let prompt = program(1).flag("--prompt", "The Queen of Hearts made some tarts");
    refused(prompt, &["error: the prompt has ", "takes 8 at most"]);
    workspace.edit_config(|config| {
        config["rope_scaling"] = serde_json::json!({"rope_type": "dynamic", "factor": 2.0});
    });
    let outcome = program(30).succeeds();
    let line = "longer than the model's 8 positions: from here on rope_type dynamic";
    assert_eq!(
        outcome.stderr.matches(line).count(),
        1,
        "{}",
        outcome.stderr
    );
    assert!(
        outcome.stdout.len() > long.stdout.len(),
        "{}",
        outcome.stdout
    );
}

#[test]
fn samples_of_a_run_end_where_texts_do() {
    let workspace = Workspace::new();
    let prompt = "The Queen of Hearts made some tarts";
    workspace.edit_config(|config| config["max_position_embeddings"] = 16.into());
    let program = workspace.finetune().flag("--prompt", prompt);
    let program = program.flag("--sample-tokens", 30);
    let parts = ["--prompt has ", "the model takes 16 at most"];
    workspace.refuses(&program, &parts);
    workspace.edit_config(|config| {
        config["model_type"] = "mistral".into();
        config["architectures"] = serde_json::json!(["MistralForCausalLM"]);
        config["sliding_window"] = 8.into();
    });
    let sample = program.flag("--temperature", 0).succeeds().stdout;
    let text = generate(&workspace).flag("--max-new-tokens", 30);
    let text = text.flag("--prompt", prompt).succeeds().stdout;
    assert!(text.len() > prompt.len() + 20, "{text}");
    assert!(sample.contains(text.trim_end()), "{text:?} {sample:?}");
}

/// Weights in another form are others, which a long text of unlikely tokens shows.
#[test]
fn weights_are_held_in_the_form_that_is_asked_for() {
    let workspace = Workspace::new();
    let program = || {
        let program = generate(&workspace).flag("--prompt", "The Queen");
        program
            .flag("--max-new-tokens", 200)
            .flag("--temperature", 5)
    };
    let text = |form: &str| program().flag("--base-dtype", form).succeeds().stdout;
    let whole = program().succeeds().stdout;
    assert_eq!(text("f32"), whole);
    let [wide, blocks] = ["bf16", "q8_0"].map(text);
    assert!(
        whole != wide && wide != blocks && whole != blocks,
        "{whole}"
    );
    // The rows of this model are shorter than the blocks of the one form, and are held in the other.
    assert_eq!(text("q4k"), blocks);
    let tp = program().flag("--base-dtype", "bf16").flag("--tp", 2);
    assert_eq!(tp.succeeds().stdout, wide);
    program()
        .flag("--base-dtype", "q5_k")
        .fails(&["--base-dtype", "q8_0", "q4k"]);
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
    chat().fails(&["has no chat template", "hint: "]);
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
    let silent = generate(&workspace).switch("--chat");
    silent.fails(&["--chat: stdin ended before", "hint: ", "--prompt"]);
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
    generate(&workspace).fails(&["neither --prompt nor --chat"]);
    let empty = generate(&workspace).flag("--prompt", "");
    empty.fails(&["the prompt has no tokens"]);
    let system = generate(&workspace)
        .flag("--prompt", "a")
        .flag("--system", "b");
    system.fails(&["--chat"]);
    let tp = generate(&workspace).flag("--prompt", "a").flag("--tp", 5);
    tp.fails(&["tp(5)", "num_attention_heads(4)"]);
    edit_json(&workspace.model("config.json"), |config| {
        config["vocab_size"] = 5.into()
    });
    let other = generate(&workspace).flag("--prompt", "The Queen");
    other.fails(&["embed_tokens", "[307, 32]", "expected [5, 32]"]);
}

#[test]
fn the_models_file_is_taken_as_transformers_takes_it_and_flags_win() {
    let workspace = Workspace::new();
    let config = workspace.model("generation_config.json");
    let file = r#"{"do_sample": true, "temperature": 0.7, "top_k": 1, "top_p": 0.8, "repetition_penalty": 1.5,
        "eos_token_id": [300, 301]}"#;
    fs::write(&config, file).unwrap();
    let run = |flags: &[(&str, &str)]| {
        let program = generate(&workspace).flag("--prompt", "The Queen");
        program.flags(flags).succeeds()
    };
    let of_file = run(&[("--seed", "1")]);
    let said = "temperature 0.7, top_k 1, top_p 0.8, repetition_penalty 1.5, ends [300, 301]\n";
    of_file.says(&[said]);
    // One token is left to draw from.
    let greedy = run(&[("--temperature", "0")]);
    greedy.says(&["the most likely token, repetition_penalty 1.5"]);
    assert_eq!(greedy.stdout, of_file.stdout);
    let free = run(&[("--temperature", "0"), ("--repetition-penalty", "1")]);
    assert_ne!(free.stdout, greedy.stdout);
    assert_ne!(
        run(&[("--temperature", "5"), ("--top-k", "0"), ("--top-p", "1")]).stdout,
        of_file.stdout
    );
    fs::remove_file(&config).unwrap();
    let hot = run(&[("--temperature", "2")]);
    hot.says(&["temperature 2, top_k 50, top_p 1, "]);
    for flag in ["--top-p", "--top-k"] {
        let idle = generate(&workspace).flag("--prompt", "a").flag(flag, 1);
        idle.fails(&[flag, "the temperature is 0", "hint: "]);
    }
}

#[test]
fn a_reader_that_has_enough_ends_it_quietly() {
    let workspace = Workspace::new();
    for tp in [1, 2] {
        let program = generate(&workspace)
            .flag("--prompt", "The Queen")
            .flag("--tp", tp);
        let outcome = program.without_reader().succeeds();
        assert_eq!(outcome.stderr.lines().count(), 1, "{}", outcome.stderr);
    }
}
