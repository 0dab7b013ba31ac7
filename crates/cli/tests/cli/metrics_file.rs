//! `--metrics`: whose lines a file has, and what they and the progress lines count.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

use candle_trainer::TensorBoard;
use serde_json::Value;

use super::folder::names;
use super::program::Program;
use super::training::metrics;
use super::workspace::{Workspace, candle_train};

/// A run of two steps that replaces nothing.
fn run(workspace: &Workspace, output: &str) -> Program {
    workspace
        .finetune()
        .without("--overwrite")
        .flag("--output", workspace.path(output).display())
        .flag("--metrics", workspace.path("metrics.jsonl").display())
}

fn saving(program: Program, workspace: &Workspace, saves: &str) -> Program {
    program
        .flag("--save-every", 2)
        .flag("--save-dir", workspace.path(saves).display())
}

#[test]
fn a_pipe_gets_the_lines_of_all_steps() {
    let workspace = Workspace::new();
    let pipe = workspace.path("pipe");
    let made = Command::new("mkfifo").arg(&pipe).status().unwrap();
    assert!(made.success());
    let reader = {
        let pipe = pipe.clone();
        std::thread::spawn(move || fs::read_to_string(pipe).unwrap())
    };
    let program = run(&workspace, "out").without("--metrics");
    program.flag("--metrics", pipe.display()).succeeds();
    assert_eq!(reader.join().unwrap().lines().count(), 2);
}

/// The runs of the lines, and their steps.
fn lines(path: &Path) -> (BTreeSet<String>, Vec<u64>) {
    let lines = metrics(path);
    let run = |line: &serde_json::Map<String, Value>| line["run"].as_str().unwrap().to_string();
    let steps = lines.iter().map(|line| line["step"].as_u64().unwrap());
    (lines.iter().map(run).collect(), steps.collect())
}

#[test]
fn the_file_of_another_run_is_refused_before_any_step_or_replaced_if_that_is_asked_for() {
    let workspace = Workspace::new();
    let path = workspace.path("metrics.jsonl");
    run(&workspace, "first").succeeds();
    let (first, steps) = lines(&path);
    assert_eq!((first.len(), steps), (1, vec![0, 1]));
    let before = fs::read(&path).unwrap();
    // The same flags, and others; one that was to go on and has other settings.
    let named = first.first().unwrap();
    for program in [
        run(&workspace, "second"),
        run(&workspace, "second").flag("--steps", 3),
        saving(run(&workspace, "second"), &workspace, "none")
            .flag("--resume", "latest")
            .flag("--lr", 0.5),
    ] {
        let outcome = program.run();
        let parts = [
            "metrics.jsonl",
            named,
            "and is not overwritten",
            "hint:",
            "--overwrite",
        ];
        outcome.assert_error(&parts);
        assert_eq!(outcome.code, Some(2));
        assert!(!outcome.stderr.contains("step 1/"), "{}", outcome.stderr);
        assert!(fs::read(&path).unwrap() == before);
        assert!(!workspace.path("second").exists());
    }
    run(&workspace, "second").switch("--overwrite").succeeds();
    let (second, steps) = lines(&path);
    assert_eq!((second.len(), steps), (1, vec![0, 1]));
    assert!(second != first);
    // Whoever repeats the run from its file has metrics of their own, or none.
    let config = fs::read_to_string(workspace.path("first/candle_train.toml")).unwrap();
    assert!(!config.contains("metrics"), "{config}");
}

#[test]
fn a_run_that_is_resumed_continues_its_file_with_its_name() {
    let workspace = Workspace::new();
    let path = workspace.path("metrics.jsonl");
    let program = saving(run(&workspace, "first"), &workspace, "saves").flag("--steps", 3);
    program.succeeds();
    let (first, _) = lines(&path);
    // The checkpoint after two steps has the name, which `inspect` prints.
    let inspect = candle_train("inspect").argument(workspace.path("saves/step-000002").display());
    let said = inspect.succeeds().stdout;
    let name = first.first().unwrap();
    assert!(said.contains(name), "{name} is not in {said}");
    let program = program.flag("--output", workspace.path("second").display());
    let again = program.clone().flag("--resume", "latest");
    again.succeeds();
    assert_eq!(lines(&path), (first.clone(), vec![0, 1, 2]));
    // To replace the model is no reason to lose the run's own lines.
    again.clone().switch("--overwrite").succeeds();
    assert_eq!(lines(&path), (first, vec![0, 1, 2]));
    // Another run's file is not gone on with.
    let other = path.with_file_name("other.jsonl");
    run(&workspace, "third")
        .flag("--metrics", other.display())
        .succeeds();
    let before = fs::read(&other).unwrap();
    let refused = again
        .flag("--metrics", other.display())
        .switch("--overwrite");
    refused
        .clone()
        .without("--overwrite")
        .flag("--output", workspace.path("fourth").display())
        .fails(&["other.jsonl", "is of another run"]);
    assert!(fs::read(&other).unwrap() == before);
    refused.succeeds();
    assert_eq!(lines(&other).1, [2]);
}

#[test]
fn a_file_that_lacks_steps_is_told_and_one_that_cannot_be_read_ends_the_run_before_any() {
    let workspace = Workspace::new();
    let path = workspace.path("metrics.jsonl");
    let program = saving(run(&workspace, "first"), &workspace, "saves").flag("--steps", 3);
    program.succeeds();
    let whole = fs::read_to_string(&path).unwrap();
    let first = whole.split_inclusive('\n').next().unwrap();
    let program = program.flag("--resume", "latest").switch("--overwrite");
    for (text, num_there) in [(Some(first), 1), (Some(""), 0), (None, 0)] {
        fs::remove_file(&path).unwrap();
        text.iter().for_each(|text| fs::write(&path, text).unwrap());
        let said = program.succeeds().stderr;
        let warning = format!("ends after step {num_there} of the 2 that are done");
        assert_eq!(said.matches(&warning).count(), 1, "{said}");
    }
    fs::write(&path, whole.replacen("{\"step\":1,", "something else", 1)).unwrap();
    let outcome = program.fails(&["line 2 of ", "is no step of a metrics file"]);
    assert_eq!(outcome.code, Some(2));
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    let outcome = program.fails(&["cannot write the metrics file", "hint:"]);
    assert_eq!(outcome.code, Some(2));
}

#[test]
fn a_folder_of_curves_that_another_run_writes_is_refused_before_any_step() {
    let workspace = Workspace::new();
    let curves = workspace.path("curves");
    let other = TensorBoard::create(&curves, "other", 0).unwrap();
    // Checkpoints may be in the same folder.
    let program = saving(run(&workspace, "first"), &workspace, "curves");
    let program = program.flag("--tensorboard", curves.display());
    let outcome = program.run();
    let process = format!("process {}", std::process::id());
    outcome.assert_error(&["TensorBoard", "another run is writing to it", &process]);
    assert_eq!(outcome.code, Some(2));
    drop(other);
    // Nor those of one that is over, unless that is asked for.
    program.fails(&[
        "the TensorBoard folder",
        "is of another run, other",
        "--overwrite",
    ]);
    program.switch("--overwrite").succeeds();
    // The event files of both, the checkpoint, and no lock.
    assert_eq!(names(&curves).len(), 3);
}

/// As after a kill before the first checkpoint.
#[test]
fn a_run_that_begins_again_for_want_of_a_checkpoint_keeps_its_file() {
    let workspace = Workspace::new();
    let path = workspace.path("metrics.jsonl");
    let program = saving(run(&workspace, "first"), &workspace, "saves");
    program.succeeds();
    let (first, _) = lines(&path);
    fs::remove_dir_all(workspace.path("saves")).unwrap();
    let again = program
        .flag("--output", workspace.path("second").display())
        .flag("--resume", "latest");
    let outcome = again.succeeds();
    outcome.prints(&["no checkpoint in"]);
    assert_eq!(lines(&path), (first, vec![0, 1]));
}

#[test]
fn lines_metrics_and_checkpoints_call_a_step_by_one_number_and_epochs_have_fractions() {
    let workspace = Workspace::new();
    let path = workspace.path("metrics.jsonl");
    let eval_data = workspace.path("text.txt");
    // 8 sequences in batches of 3 and then of 2.
    let program = saving(run(&workspace, "first"), &workspace, "saves")
        .without("--steps")
        .without("--dp")
        .flag("--seq-len", 1000)
        .flag("--global-batch-size", 3)
        .flag("--epochs", 2)
        .flag("--eval-data", eval_data.display())
        .flag("--eval-every", 3);
    let outcome = program.succeeds();
    let lines = metrics(&path);
    let (evals, steps): (Vec<_>, Vec<_>) = lines
        .iter()
        .partition(|line| line.contains_key("eval_loss"));
    let number = |line: &serde_json::Map<String, Value>, name: &str| line[name].as_f64().unwrap();
    let of = |lines: &[&serde_json::Map<String, Value>], name: &str| -> Vec<f64> {
        lines.iter().map(|line| number(line, name)).collect()
    };
    assert_eq!(of(&steps, "global_step"), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    assert_eq!(of(&steps, "epoch"), [0.375, 0.75, 1.0, 1.375, 1.75, 2.0]);
    assert_eq!(of(&evals, "global_step"), [3.0, 6.0]);
    assert_eq!(of(&evals, "epoch"), [1.0, 2.0]);
    outcome.says(&["evaluation after step 6: ", "step 6/6 loss "]);
    assert!(names(&workspace.path("saves")).contains(&"step-000006".to_string()));
}

#[test]
fn positions_and_tokens_with_loss_are_counted_apart() {
    let workspace = Workspace::new();
    let path = workspace.path("metrics.jsonl");
    // One token of loss in each record, and records of unequal lengths over two replicas.
    let record = |num_words: usize| {
        let record = serde_json::json!({"prompt": "a ".repeat(num_words), "completion": "b"});
        record.to_string() + "\n"
    };
    let text: String = [14, 29, 15, 27].into_iter().map(record).collect();
    fs::write(workspace.path("data.jsonl"), text).unwrap();
    let program = run(&workspace, "first")
        .flag("--data", workspace.path("data.jsonl").display())
        .flag("--seq-len", 64)
        .flag("--steps", 1)
        .switch("--no-packing");
    let outcome = program.succeeds();
    let line = metrics(&path).pop().unwrap();
    let number = |name: &str| line[name].as_f64().unwrap();
    let (targets, positions) = (number("num_tokens"), number("num_positions"));
    assert!(targets >= 4.0 && 3.0 * targets < positions, "{line:?}");
    // Each record is a micro-batch of its own: there is no padding.
    assert_eq!(number("padding"), 0.0);
    let secs = number("step_secs");
    for (rate, count) in [
        ("tokens_per_sec", targets),
        ("positions_per_sec", positions),
    ] {
        assert!(
            (number(rate) * secs - count).abs() < 1e-6 * count,
            "{line:?}"
        );
    }
    let said = format!(
        " {:.0} positions/s {:.0} loss tokens/s ",
        number("positions_per_sec"),
        number("tokens_per_sec")
    );
    assert!(outcome.stderr.contains(&said), "{said}: {}", outcome.stderr);
}
