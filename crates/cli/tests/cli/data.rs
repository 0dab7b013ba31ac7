//! Data that is missing, empty, too short or no data; records, weights, and what is shown of them.

use std::fs;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

use super::program::{AssertText, Program};
use super::workspace::{Workspace, candle_train, refuses_file};

#[test]
fn data_that_is_missing_empty_or_not_text_is_named() {
    let file = "text.txt";
    refuses_file(
        file,
        |path| fs::remove_file(path).unwrap(),
        &["cannot open data", "text.txt"],
    );
    refuses_file(
        file,
        |path| fs::write(path, "").unwrap(),
        &["text.txt", "is empty"],
    );
    refuses_file(
        file,
        |path| fs::write(path, " \n\t\r\n ").unwrap(),
        &["text.txt", "white space (6 bytes)"],
    );
    refuses_file(
        file,
        |path| fs::write(path, b"caf\xe9 au lait").unwrap(),
        &["not UTF-8", "offset 3 of 12"],
    );
}

#[test]
fn long_reading_is_shown() {
    let workspace = Workspace::new();
    let text = fs::File::create(workspace.path("text.txt")).unwrap();
    // Without a block on the disk.
    text.set_len(64 << 30).unwrap();
    let program = workspace.finetune();
    let program = program.variable("CANDLE_TRAIN_CACHE", workspace.path("cache").display());
    let mut is_shown = false;
    program.run_and_pid(|said, pid| {
        if said.contains("reading the data: ") && said.contains(" of 68.7 GB, ") {
            is_shown = true;
            let _ = kill(Pid::from_raw(pid as i32), Signal::SIGKILL);
        }
    });
    assert!(is_shown);
}

#[test]
fn a_text_that_is_shorter_than_one_sequence_is_one() {
    let workspace = Workspace::new();
    fs::write(workspace.path("text.txt"), "Once more").unwrap();
    let outcome = workspace.finetune().succeeds();
    outcome.prints(&["in 1 sequence, 2 steps of 4 sequences of 16 tokens"]);
}

#[test]
fn data_that_is_no_known_file_nor_a_folder_of_them_is_an_error() {
    let workspace = Workspace::new();
    let with = |name: &str| {
        workspace
            .finetune()
            .flag("--data", workspace.path(name).display())
    };
    fs::copy(workspace.path("text.txt"), workspace.path("text.doc")).unwrap();
    workspace.refuses(
        &with("text.doc"),
        &[
            "text.doc",
            "not a .txt, .jsonl, .json, .csv, .tsv or .parquet file",
        ],
    );
    workspace.refuses(&with("*.nothing"), &["no file matches"]);
    fs::create_dir(workspace.path("texts")).unwrap();
    workspace.refuses(&with("texts"), &["texts", "has no file that ends in"]);
    fs::create_dir(workspace.path("texts/inner.txt")).unwrap();
    fs::copy(
        workspace.path("text.txt"),
        workspace.path("texts/inner.txt/a.txt"),
    )
    .unwrap();
    fs::write(workspace.path("texts/b.txt"), "").unwrap();
    let outcome = with("texts").succeeds_with_warnings();
    outcome.says(&["b.txt: it is empty"]);
    fs::write(workspace.path("texts/b.txt"), "The second document.").unwrap();
    fs::write(workspace.path("texts/notes.md"), "no data").unwrap();
    let outcome = with("texts").succeeds();
    outcome.prints(&[": 2 texts, "]);
    outcome.says(&["notes.md"]);
}

const CHATML: &str = "{% for m in messages %}{{ m.role + '\\n' + m.content + eos_token + '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant\\n' }}{% endif %}";

/// Five conversations, a line that is none and one without an answer.
fn workspace_with_conversations() -> Workspace {
    let workspace = Workspace::new();
    fs::write(workspace.model("chat_template.jinja"), CHATML).unwrap();
    let record = |index: usize| {
        let answer = "word ".repeat(index);
        json!({"messages": [{"role": "user", "content": format!("Say {index} words")}, {"role": "assistant", "content": answer}]})
    };
    let mut lines: Vec<String> = (1..6).map(|index| record(index).to_string()).collect();
    lines.insert(2, "{\"messages\": [".to_string());
    lines.push(json!({"messages": [{"role": "user", "content": "no answer"}]}).to_string());
    fs::write(workspace.path("chat.jsonl"), lines.join("\n")).unwrap();
    workspace
}

fn preview(workspace: &Workspace) -> Program {
    candle_train("preview")
        .flag("--model", workspace.path("model").display())
        .flag("--data", workspace.path("chat.jsonl").display())
        .variable("CANDLE_TRAIN_CACHE", workspace.path("cache").display())
}

fn sequences(preview: &Program) -> Vec<Value> {
    let outcome = preview
        .clone()
        .switch("--json")
        .flag("--num", 100)
        .succeeds_with_warnings();
    outcome
        .stdout
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

#[test]
fn conversations_are_trained_on_and_what_is_left_out_is_told() {
    let workspace = workspace_with_conversations();
    let training = workspace
        .finetune()
        .without("--steps")
        .flag("--epochs", 3)
        .flag("--seq-len", 64)
        .flag("--data", workspace.path("chat.jsonl").display())
        .flag("--metrics", workspace.path("metrics.jsonl").display());
    let outcome = training
        .clone()
        .switch("--no-packing")
        .succeeds_with_warnings();
    outcome.prints(&["5 records of messages, "]);
    outcome.says(&[
        "chat.jsonl line 3: it is not valid JSON",
        "skipped 1 record without a token to learn",
    ]);
    let steps = fs::read_to_string(workspace.path("metrics.jsonl")).unwrap();
    let steps: Vec<Value> = steps
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    // 5 sequences in batches of 4: two steps an epoch.
    assert_eq!(steps.len(), 6);
    let num_tokens = |steps: &[Value]| {
        steps
            .iter()
            .map(|step| step["num_tokens"].as_u64().unwrap())
            .sum::<u64>()
    };
    let alone = num_tokens(&steps);
    assert_eq!(num_tokens(&steps[..2]) * 3, alone);
    training.succeeds_with_warnings();
    let packed = fs::read_to_string(workspace.path("metrics.jsonl")).unwrap();
    let packed: Vec<Value> = packed
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert!(packed.len() < steps.len());
    assert_eq!(num_tokens(&packed), alone);
}

#[test]
fn the_preview_shows_sequences_as_they_are_trained_on() {
    let workspace = workspace_with_conversations();
    let alone = sequences(&preview(&workspace).switch("--no-packing"));
    assert_eq!(alone.len(), 5);
    let list = |sequence: &Value, name: &str| -> Vec<i64> {
        let list = sequence[name].as_array().unwrap().iter();
        list.map(|value| value.as_i64().unwrap()).collect()
    };
    for sequence in &alone {
        let (ids, labels) = (list(sequence, "input_ids"), list(sequence, "labels"));
        assert_eq!(
            list(sequence, "position_ids"),
            (0..ids.len() as i64).collect::<Vec<_>>()
        );
        assert_eq!(list(sequence, "document_ids"), vec![0; ids.len()]);
        assert!(
            labels
                .iter()
                .zip(&ids)
                .all(|(label, id)| label == id || *label == -100)
        );
        assert_eq!(labels[0], -100);
        // The end of the turn has loss, the line break after it has none.
        assert_eq!(&labels[labels.len() - 2..], [1, -100]);
    }
    let packed = sequences(&preview(&workspace).flag("--seq-len", 1000));
    assert_eq!(packed.len(), 1);
    for name in ["input_ids", "labels", "position_ids"] {
        let joined: Vec<i64> = alone
            .iter()
            .flat_map(|sequence| list(sequence, name))
            .collect();
        assert_eq!(list(&packed[0], name), joined);
    }
    let documents: Vec<i64> = alone
        .iter()
        .zip(0..)
        .flat_map(|(sequence, index)| vec![index; list(sequence, "labels").len()])
        .collect();
    assert_eq!(list(&packed[0], "document_ids"), documents);
    let unmasked = sequences(
        &preview(&workspace)
            .flag("--seq-len", 1000)
            .switch("--no-document-mask"),
    );
    assert_eq!(
        list(&unmasked[0], "position_ids"),
        (0..documents.len() as i64).collect::<Vec<_>>()
    );
    let all = sequences(
        &preview(&workspace)
            .flag("--seq-len", 1000)
            .switch("--train-on-prompt"),
    );
    assert_eq!(
        list(&all[0], "labels")
            .iter()
            .filter(|&&label| label == -100)
            .count(),
        6
    );

    let text = preview(&workspace)
        .flag("--num", 1)
        .succeeds_with_warnings()
        .stdout;
    text.assert_has(&["Say 2 words<|end_of_text|>\nassistant\n⟦word word <|end_of_text|>⟧"]);
    assert!(!text.contains('\x1b'));
}

#[test]
fn a_cache_is_used_again_and_never_for_other_data() {
    let workspace = workspace_with_conversations();
    let first = sequences(&preview(&workspace));
    let files = || {
        let files = fs::read_dir(workspace.path("cache/tokens")).unwrap();
        let mut files: Vec<_> = files.map(|file| file.unwrap().path()).collect();
        files.sort();
        files
    };
    let cached = files();
    assert_eq!(cached.len(), 1);
    assert_eq!(sequences(&preview(&workspace)), first);
    assert_eq!(files(), cached);
    // A damaged file is made anew.
    let content = fs::read(&cached[0]).unwrap();
    fs::write(&cached[0], &content[..content.len() - 1]).unwrap();
    let outcome = preview(&workspace).succeeds_with_warnings();
    outcome.says(&["are damaged and are made again"]);
    assert_eq!(fs::read(&cached[0]).unwrap(), content);
    assert_eq!(sequences(&preview(&workspace)), first);
    // What is made of the data depends on template, tokenizer, flag and the data itself.
    sequences(&preview(&workspace).switch("--train-on-prompt"));
    assert_eq!(files().len(), 2);
    fs::write(
        workspace.model("chat_template.jinja"),
        CHATML.replace("assistant", "bot"),
    )
    .unwrap();
    sequences(&preview(&workspace));
    assert_eq!(files().len(), 3);
    let text = fs::read_to_string(workspace.path("chat.jsonl")).unwrap();
    fs::write(workspace.path("chat.jsonl"), text.replace("Say 1", "Say 7")).unwrap();
    assert_ne!(sequences(&preview(&workspace)), first);
    assert_eq!(files().len(), 4);
    // A cache that cannot be written costs time only.
    let without =
        preview(&workspace).variable("CANDLE_TRAIN_CACHE", workspace.path("chat.jsonl").display());
    assert_eq!(sequences(&without), sequences(&preview(&workspace)));
}

#[test]
fn records_that_are_too_long_follow_the_flag_and_nothing_left_is_an_error() {
    let workspace = workspace_with_conversations();
    let long = |overlong: &str| {
        preview(&workspace)
            .flag("--seq-len", 32)
            .flag("--overlong", overlong)
    };
    long("error").fails(&[
        "chat.jsonl line ",
        "tokens, more than a sequence of 32",
        "--overlong",
    ]);
    let truncated = long("truncate").succeeds_with_warnings();
    truncated.says(&[" longer than 32 tokens, and left out "]);
    let dropped = long("drop").succeeds_with_warnings();
    dropped.says(&["dropped "]);
    preview(&workspace)
        .flag("--seq-len", 4)
        .flag("--overlong", "drop")
        .fails(&["nothing to learn is left"]);
    fs::write(workspace.path("chat.jsonl"), "{}\n[]\n").unwrap();
    preview(&workspace).fails(&[
        "no record from which anything can be learned",
        "line 1",
        "line 2",
    ]);
    fs::remove_file(workspace.model("chat_template.jinja")).unwrap();
    let workspace = workspace_with_conversations();
    fs::remove_file(workspace.model("chat_template.jinja")).unwrap();
    let outcome = preview(&workspace).fails(&[
        "skipped 6 records, the first ",
        "chat.jsonl line 1: it is a conversation, and the checkpoint has no chat template",
        "hint: --chat-template llama3",
    ]);
    assert_eq!(outcome.stderr.matches("no chat template").count(), 1);
}

const QUESTIONS: &str =
    "question,answer\nFirst Citizen,\"Before we proceed,\nhear me\"\nAll,Speak\n";

#[test]
fn columns_are_named_for_data_and_evaluation_kept_and_compared() {
    let workspace = Workspace::new();
    let (data, eval_data) = (workspace.path("a.csv"), workspace.path("b.csv"));
    fs::write(&data, QUESTIONS).unwrap();
    let others = QUESTIONS.replace("First", "Second").replace("All", "First");
    fs::write(&eval_data, others).unwrap();
    let columns = "prompt=question,completion=answer";
    let shown = preview(&workspace)
        .flag("--data", data.display())
        .flag("--columns", columns)
        .succeeds()
        .stdout;
    shown.assert_has(&[
        "2 records of prompt and completion, ",
        "⟦Before we proceed,\nhear me<|end_of_text|>⟧",
    ]);
    let run = workspace
        .finetune()
        .flag("--tp", 1)
        .flag("--pp", 1)
        .flag("--seq-len", 64)
        .flag("--data", data.display())
        .flag("--eval-data", eval_data.display())
        .flag("--save-every", 1)
        .flag("--save-dir", workspace.path("saves").display());
    let outcome = run.clone().flag("--columns", columns).succeeds();
    outcome.prints(&["evaluation on 2 records of prompt and completion"]);
    let flags = fs::read_to_string(workspace.output().join("candle_train.toml")).unwrap();
    flags.assert_has(&[&format!("columns = {columns:?}\n")]);
    let resumed = run.flag("--resume", workspace.path("saves/step-000001").display());
    workspace.run_refused(
        &resumed
            .clone()
            .flag("--columns", "completion=question,prompt=answer"),
        &["the data is ", " in the checkpoint"],
    );
    fs::write(&eval_data, "prompt,completion\na,b\n").unwrap();
    workspace.run_refused(
        &resumed.flag("--columns", columns),
        &[
            "b.csv",
            "--columns prompt=question: no record has a column \"question\"",
            "\"completion\", \"prompt\"",
        ],
    );
}

#[test]
fn a_new_tokenizer_is_learned_from_the_columns_that_are_named() {
    let workspace = Workspace::new();
    let text = fs::read_to_string(workspace.path("text.txt")).unwrap();
    let line = json!({"body": text, "text": "x"});
    fs::write(workspace.path("a.jsonl"), line.to_string()).unwrap();
    let pretrain = |columns: &str| {
        candle_train("pretrain")
            .flag("--data", workspace.path("a.jsonl").display())
            .flag("--columns", columns)
            .flag("--output", workspace.output().display())
            .switch("--overwrite")
            .flag("--vocab-size", 300)
            .flag("--hidden-size", 24)
            .flag("--intermediate-size", 16)
            .flag("--layers", 1)
            .flag("--steps", 1)
            .flag("--seq-len", 16)
            .flag("--sample-tokens", 0)
    };
    workspace.refuses(
        &pretrain("text=missing"),
        &["no record has a column \"missing\"", "\"body\", \"text\""],
    );
    workspace.refuses(
        &pretrain("reply=body"),
        &[
            "--columns",
            "no field \"reply\"",
            "text, prompt, completion",
        ],
    );
    let outcome = pretrain("text=body").succeeds_with_warnings();
    outcome.prints(&["1 text, "]);
}
