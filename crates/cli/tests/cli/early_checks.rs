//! What is wrong with model, adapters, patterns and folders is said before data is read, which may take an hour.

use std::fs;

use super::program::{AssertText, Program};
use super::workspace::Workspace;

/// The command with data that is not there: what is said instead was found before that.
fn without_data(workspace: &Workspace) -> Program {
    workspace
        .finetune()
        .flag("--data", workspace.path("missing.txt").display())
}

#[test]
fn everything_that_costs_little_is_checked_before_data_is_read() {
    let workspace = Workspace::new();
    let run = without_data(&workspace);
    workspace.refuses(&run, &["missing.txt"]);
    let path = |name: &str| workspace.path(name).display().to_string();
    fs::create_dir(workspace.path("empty")).unwrap();
    fs::create_dir(workspace.path("notes")).unwrap();
    fs::write(workspace.path("notes/plan.txt"), "keep me").unwrap();
    for (flag, value, parts) in [
        (
            "--freeze",
            "lm_heads".to_string(),
            ["--freeze lm_heads", "none of the 39 parameters"],
        ),
        ("--lora-targets", "q_prj".to_string(), ["q_prj", "q_proj"]),
        ("--adapter", path("empty"), ["empty", "adapter_config.json"]),
        ("--resume", path("empty"), ["empty", "checkpoint"]),
        (
            "--output",
            path("notes"),
            ["plan.txt", "choose another folder"],
        ),
        (
            "--output",
            path("model"),
            ["which this run reads", "choose another folder"],
        ),
        (
            "--tokens-of-no-flag",
            "1".to_string(),
            ["--tokens-of-no-flag", "unexpected argument"],
        ),
    ] {
        let run = run.clone().flag(flag, value);
        let run = match flag {
            "--lora-targets" => run.flag("--lora-rank", 4),
            _ => run,
        };
        workspace.refuses(&run, &parts);
    }
    let pretrain = super::workspace::candle_train("pretrain")
        .flag("--data", path("missing.txt"))
        .flag("--output", path("notes"));
    workspace.refuses(&pretrain, &["plan.txt"]);
    workspace.edit_weights(|weights| {
        weights.remove("model.layers.1.mlp.up_proj.weight");
    });
    workspace.refuses(&run, &["model.layers.1.mlp.up_proj.weight"]);
}

#[test]
fn the_same_command_again_is_told_how_to_go_on() {
    let workspace = Workspace::new();
    let saves = workspace.path("saves");
    let run = workspace.finetune().flag("--save-dir", saves.display());
    // The folder alone is for a run that is stopped: nothing is saved there before.
    run.succeeds();
    assert!(
        !saves.exists()
            || fs::read_dir(&saves).unwrap().all(|entry| {
                !entry
                    .unwrap()
                    .file_name()
                    .to_string_lossy()
                    .starts_with("step-")
            })
    );
    let run = run.flag("--save-every", 1);
    run.succeeds();
    let again = run
        .clone()
        .flag("--data", workspace.path("missing.txt").display());
    let parts = [
        "is a checkpoint already, and this run would begin anew",
        "(--resume latest) goes on",
    ];
    workspace.run_refused(&again, &parts);
    let outcome = run
        .flag("--resume", "latest")
        .flag("--steps", 3)
        .switch("--resume-anyway")
        .succeeds_with_warnings();
    outcome.prints(&["resumed after step 2"]);
}

#[test]
fn a_run_tells_more_to_those_who_debug() {
    let workspace = Workspace::new();
    let run = workspace.finetune().flag("--steps", 1);
    let quiet = run.succeeds().stderr;
    assert!(!quiet.contains("DEBUG"), "{quiet}");
    let said = run
        .variable("RUST_LOG", "debug")
        .succeeds_with_warnings()
        .stderr;
    said.assert_has(&[
        "text.txt",
        "model.safetensors",
        "rank 7: stage 1 of 2, replica 1 of 2, tensor-parallel part 1 of 2",
        "buckets",
        "rank 0, step 1: forward",
        "tp all_reduce",
        "waiting for others",
    ]);
}
