//! `--config`: flags from a file, the file that a run leaves, and files that are refused.

use std::fs;

use super::folder::read_checkpoint;
use super::program::{AssertText, Program};
use super::training::metrics;
use super::workspace::{Workspace, candle_train};

#[test]
fn the_file_that_a_run_leaves_makes_the_same_model() {
    let workspace = Workspace::new();
    let run = workspace
        .finetune()
        .flag("--lr", "3e-3")
        .flag("--prompt", "007")
        .flag("--zero", 2)
        // Rules out a flag that has a default.
        .flag("--quantize-gradients", "int8")
        .flag("--tp", 1)
        .switch("--no-shuffle")
        .flag("--metrics", workspace.path("metrics.jsonl").display());
    run.succeeds();
    let want = read_checkpoint(&workspace.output());
    let numbers = metrics(&workspace.path("metrics.jsonl"));
    let file = workspace.output().join("candle_train.toml");
    let text = fs::read_to_string(&file).unwrap();
    text.assert_has(&[
        "lr = 0.003\n",
        "prompt = \"007\"\n",
        "no-shuffle = true\n",
        "global-batch-size = 4\n",
    ]);
    let again = workspace.path("again");
    let with_config = candle_train("finetune")
        .flag("--config", file.display())
        .flag("--output", again.display());
    let outcome = with_config.succeeds();
    let said = format!("flags of {}\n", file.display());
    assert!(outcome.stdout.starts_with(&said), "{}", outcome.stdout);
    assert!(read_checkpoint(&again) == want);
    let losses = |lines: &[serde_json::Map<String, serde_json::Value>]| {
        lines
            .iter()
            .map(|line| line["loss"].clone())
            .collect::<Vec<_>>()
    };
    assert_eq!(
        losses(&metrics(&workspace.path("metrics.jsonl"))),
        losses(&numbers)
    );
    // The command line wins.
    with_config
        .flag("--lr", "1e-3")
        .switch("--overwrite")
        .succeeds();
    assert!(read_checkpoint(&again) != want);
}

fn with_file(workspace: &Workspace, text: &str) -> Program {
    fs::write(workspace.path("run.toml"), text).unwrap();
    workspace
        .finetune()
        .flag("--config", workspace.path("run.toml").display())
}

#[test]
fn files_that_are_refused() {
    let workspace = Workspace::new();
    for (text, parts) in [
        (
            "lerning_rate = 1",
            vec![
                "run.toml: lerning_rate is no flag of finetune",
                "hint: the nearest one is ",
            ],
        ),
        ("warmup = 1", vec!["warmup is no flag", "warmup-steps"]),
        ("config = 'other.toml'", vec!["config is no flag"]),
        (
            "no-shuffle = 1",
            vec!["no-shuffle is 1; expected true or false"],
        ),
        (
            "[weight-decay]\na = 1",
            vec!["weight-decay is ", "expected a number or a text"],
        ),
        ("a = 1\nlr = = 2", vec!["run.toml, line 2 is no TOML"]),
        (
            "min_lr_ratio = 2",
            vec!["--min-lr-ratio", "a number >= 0 and <= 1"],
        ),
    ] {
        let run = with_file(&workspace, text);
        workspace.refuses(&run, &parts);
        fs::remove_file(workspace.path("run.toml")).unwrap();
    }
    let missing = workspace.finetune().flag("--config", "nowhere.toml");
    workspace.refuses(&missing, &["cannot read the configuration nowhere.toml"]);
}

#[test]
fn keys_may_have_underscores_and_switches_may_be_off() {
    let workspace = Workspace::new();
    let path = workspace.path("metrics.jsonl");
    let file = format!("warmup_steps = 0\nlr = 0.125\nno_overlap = false\nmetrics = {path:?}\n");
    with_file(&workspace, &file).without("--lr").succeeds();
    assert_eq!(metrics(&path)[0]["learning_rate"], 0.125);
}

/// `candle-train finetune` with the file that a run has left in `output`.
fn again(output: &std::path::Path, to: &std::path::Path) -> Program {
    let file = output.join("candle_train.toml");
    let program = candle_train("finetune").flag("--config", file.display());
    program.flag("--output", to.display())
}

#[test]
fn a_run_with_checkpoints_and_accumulated_gradients_can_be_done_again() {
    let workspace = Workspace::new();
    let program = workspace
        .finetune()
        .without("--global-batch-size")
        .flag("--gradient-accumulation-steps", 3)
        .flag("--save-every", 1)
        .flag("--save-dir", workspace.path("saves").display());
    program.succeeds();
    let [first, second] = [workspace.output(), workspace.path("second")];
    again(&first, &second).succeeds();
    let weights = |dir: &std::path::Path| std::fs::read(dir.join("model.safetensors")).unwrap();
    assert!(weights(&first) == weights(&second));
}

#[test]
fn flags_win_over_what_contradicts_them_in_the_file() {
    let workspace = Workspace::new();
    workspace.finetune().succeeds();
    let said = |flag: &str, value: Option<&str>| {
        let program = again(&workspace.output(), &workspace.path(flag));
        let program = match value {
            Some(value) => program.flag(flag, value),
            None => program.switch(flag),
        };
        program.succeeds().stdout
    };
    said("--bf16", None);
    let out = said("--gradient-accumulation-steps", Some("5"));
    out.assert_has(&["2 steps of 10 sequences"]);
    let out = said("--epochs", Some("1"));
    assert!(!out.contains(" 2 steps"), "the file's steps: {out}");
}

#[test]
fn pretrain_takes_accumulated_gradients_and_a_warm_up_in_parts() {
    let workspace = Workspace::new();
    let metrics = workspace.path("metrics.jsonl");
    let program = candle_train("pretrain")
        .flag("--data", workspace.path("text.txt").display())
        .flag("--output", workspace.path("new").display())
        .flag("--vocab-size", 300)
        .flag("--seq-len", 16)
        .flag("--steps", 4)
        .flag("--gradient-accumulation-steps", 2)
        .flag("--warmup-ratio", 1)
        .flag("--metrics", metrics.display());
    let out = program.succeeds().stdout;
    out.assert_has(&["4 steps of 8 sequences"]);
    let text = std::fs::read_to_string(metrics).unwrap();
    let rates = text.lines().map(|line| {
        let line: serde_json::Value = serde_json::from_str(line).unwrap();
        line["learning_rate"].as_f64().unwrap()
    });
    assert_eq!(rates.collect::<Vec<_>>(), [0.25e-3, 0.5e-3, 0.75e-3, 1e-3]);
}

#[test]
fn the_file_of_a_run_says_nothing_that_would_be_refused() {
    let workspace = Workspace::new();
    let program = workspace
        .finetune()
        .without("--sample-tokens")
        .flag("--lr-schedule", "constant")
        .flag("--eval-fraction", 0.1)
        .flag("--eval-every", 1)
        .flag("--patience", 1);
    program.succeeds();
    let [first, second] = [workspace.output(), workspace.path("second")];
    let text = fs::read_to_string(first.join("candle_train.toml")).unwrap();
    for flag in [
        "temperature",
        "top-p",
        "sample-tokens",
        "min-lr-ratio",
        "epochs",
    ] {
        assert!(!text.contains(&format!("{flag} =")), "{flag} is in {text}");
    }
    let run = again(&first, &second);
    run.succeeds();
    assert!(read_checkpoint(&second) == read_checkpoint(&first));
    // What a flag makes idle in the file is left out.
    let sampled = again(&first, &workspace.path("sampled")).flag("--prompt", "The Queen");
    let file = workspace.path("sampled/candle_train.toml");
    sampled
        .flag("--temperature", 0.3)
        .flag("--sample-tokens", 2)
        .succeeds();
    assert!(
        fs::read_to_string(&file)
            .unwrap()
            .contains("temperature = 0.3")
    );
    let third = candle_train("finetune").flag("--config", file.display());
    let third = third.flag("--output", workspace.path("third").display());
    third.clone().flag("--sample-tokens", 0).succeeds();
    let with_wsd = third.switch("--overwrite").flag("--lr-schedule", "wsd");
    with_wsd.flag("--lr-decay-ratio", 0.5).succeeds();
    let file = workspace.path("third/candle_train.toml");
    let cosine = candle_train("finetune").flag("--config", file.display());
    let cosine = cosine.flag("--output", workspace.path("fourth").display());
    cosine.flag("--lr-schedule", "cosine").succeeds();
    // In a file alone it is an error, as on a command line.
    let idle = with_file(&workspace, "lr-decay-ratio = 0.5");
    idle.fails(&["--lr-decay-ratio is given without --lr-schedule wsd"]);
}
