//! `--save-every` and `--resume`: runs that were interrupted end with the weights of one that was not.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::folder::{Tensors, copy_folder, names, read_checkpoint};
use super::program::{AssertText, Program};
use super::training::{metrics, without_times};
use super::workspace::{Workspace, candle_train};

/// Six steps with a checkpoint after each, of which the newest `keep` stay.
fn saving(workspace: &Workspace, saves: &str, keep: usize) -> Program {
    workspace
        .finetune()
        .flag("--steps", 6)
        .flag("--save-every", 1)
        .flag("--save-dir", workspace.path(saves).display())
        .flag("--keep", keep)
}

/// A run from beginning to end: its flags, its metrics file, and the weights.
fn uninterrupted(workspace: &Workspace) -> (Program, PathBuf, Tensors) {
    let path = workspace.path("metrics.jsonl");
    let program = saving(workspace, "saves", 9).flag("--metrics", path.display());
    program.succeeds();
    (program, path, read_checkpoint(&workspace.output()))
}

/// A folder `saves` with the checkpoint after `step` steps alone.
fn only(workspace: &Workspace, step: usize, saves: &str) {
    let name = format!("step-{step:06}");
    fs::create_dir(workspace.path(saves)).unwrap();
    let to = workspace.path(saves).join(&name);
    copy_folder(&workspace.path("saves").join(name), &to);
}

#[test]
fn a_resumed_run_has_the_bits_of_one_that_was_not_interrupted() {
    let workspace = Workspace::new();
    let (program, path, want) = uninterrupted(&workspace);
    let all_steps: Vec<String> = (1..=6).map(|step| format!("step-{step:06}")).collect();
    assert_eq!(names(&workspace.path("saves")), all_steps);
    let numbers = without_times(metrics(&path));
    only(&workspace, 2, "again");
    let again = workspace.path("again");
    let program = program.flag("--save-dir", again.display());
    // The steps from the third on come again, the last one half of a line.
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, &text[..text.len() - 20]).unwrap();
    let outcome = program.flag("--resume", "latest").succeeds();
    let step = again.join("step-000002");
    outcome.prints(&[&format!("resumed after step 2 from {}\n", step.display())]);
    assert!(!outcome.stdout.contains("--- before"));
    outcome.stderr.assert_begins("step 3/6 ");
    assert!(read_checkpoint(&workspace.output()) == want);
    assert_eq!(without_times(metrics(&path)), numbers);
    assert_eq!(names(&again), all_steps[1..]);
}

/// Each layout goes on from what the one before has saved, a step later.
#[test]
fn other_layouts_go_on_too() {
    let workspace = Workspace::new();
    let (program, path, _) = uninterrupted(&workspace);
    let losses = || -> Vec<f64> {
        let steps = metrics(&path).into_iter();
        steps.map(|step| step["loss"].as_f64().unwrap()).collect()
    };
    let want = losses();
    let mut saves = workspace.path("saves");
    // With tp 4 two ranks share each of the two key/value heads.
    let layouts = [
        (1, 1, 4, 0),
        (1, 4, 1, 3),
        (4, 1, 2, 1),
        (1, 2, 4, 3),
        (1, 1, 1, 0),
    ];
    for (step, (pp, dp, tp, zero)) in layouts.into_iter().enumerate() {
        let step = saves.join(format!("step-{:06}", step + 1));
        saves = workspace.path(&format!("saves-{pp}-{dp}-{tp}"));
        let program = program.clone().flag("--save-dir", saves.display());
        let program = program.flag("--pp", pp).flag("--dp", dp).flag("--tp", tp);
        let program = program
            .flag("--zero", zero)
            .flag("--resume", step.display());
        let said = program.succeeds().stderr;
        let other_tp = format!("--tp is {tp}, and ");
        let order = "the same numbers are added in another order";
        let warning = said.lines().find(|line| line.contains(order));
        assert!(
            warning.is_some_and(|line| line.contains(&other_tp)),
            "{said}"
        );
        let losses = losses();
        assert_eq!(losses.len(), 6);
        for (loss, want) in losses.iter().zip(&want) {
            let what = format!("pp {pp} dp {dp} tp {tp}: {losses:?} {want:?}");
            assert!((loss - want).abs() <= 1e-5 * want, "{what}");
        }
    }
    // The ranks as before, and other micro-batches.
    let step = workspace.path("saves/step-000005");
    let program = program.flag("--save-dir", workspace.path("more").display());
    let program = program.flag("--resume", step.display());
    let said = program.flag("--micro-batch-size", 2).succeeds().stderr;
    let warning = "warning: --micro-batch-size is 2, and 1 in the checkpoint: the same numbers";
    assert!(said.starts_with(warning), "{said}");
}

#[test]
fn the_newest_valid_checkpoint_counts_and_none_is_the_beginning() {
    let workspace = Workspace::new();
    let program = saving(&workspace, "saves", 2).flag("--resume", "latest");
    let first = program.succeeds();
    first.prints(&["no checkpoint in "]);
    let want = read_checkpoint(&workspace.output());
    let saves = workspace.path("saves");
    assert_eq!(names(&saves), ["step-000005", "step-000006"]);
    let file = saves.join("step-000006/rank-00003.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(file, bytes).unwrap();
    let outcome = program.succeeds_with_warnings();
    let said = "warning: a newer checkpoint is skipped: rank ";
    assert!(outcome.stderr.starts_with(said), "{}", outcome.stderr);
    outcome.says(&["rank-00003.safetensors was changed"]);
    outcome.prints(&["resumed after step 5 from"]);
    assert!(read_checkpoint(&workspace.output()) == want);
}

#[test]
fn flags_that_contradict_each_other_are_refused() {
    let workspace = Workspace::new();
    let run = workspace.finetune();
    let saves = workspace.path("saves").display().to_string();
    let output = workspace.output().join("saves").display().to_string();
    for (flags, parts) in [
        (
            vec![("--save-every", "1")],
            vec!["--save-every 1 is given without --save-dir", "hint:"],
        ),
        (
            vec![("--resume", "latest")],
            vec!["--resume latest is given without --save-dir"],
        ),
        (
            vec![("--resume", saves.as_str())],
            vec!["saves does not exist"],
        ),
        (vec![("--save-every", "0")], vec!["--save-every", "0"]),
        (
            vec![("--save-every", "1"), ("--save-dir", &output)],
            vec!["are in one another", "hint:"],
        ),
    ] {
        let run = run.clone().flags(&flags);
        workspace.refuses(&run, &parts);
    }
    workspace.refuses(
        &run.switch("--resume-anyway"),
        &["--resume-anyway is given without --resume"],
    );
    // Before the model or the data is looked for.
    let nothing = workspace.path("nothing").display().to_string();
    let run = workspace.finetune_by_default();
    let run = run.flag("--model", &nothing).flag("--data", &nothing);
    for (flag, value, part) in [
        ("--save-every", "1", "without --save-dir"),
        ("--eval-every", "1", "without samples to evaluate on"),
        ("--lora-alpha", "8", "without --lora-rank"),
        ("--zero-group", "3", "zero-group(3)"),
    ] {
        workspace.refuses(
            &run.clone().flag(flag, value),
            &[flag.trim_start_matches('-'), part],
        );
    }
    let metrics = workspace.output().join("metrics.jsonl");
    let inside = run.clone().flag("--metrics", metrics.display());
    workspace.refuses(&inside, &["is in the output folder"]);
    let late = run.flag("--steps", 3).flag("--trace-steps", "3..5");
    let late = late.flag("--trace", workspace.path("trace.json").display());
    workspace.refuses(&late, &["begins after the last of the run's 3 steps"]);
    let run = workspace.finetune().flag("--data", &nothing);
    workspace.refuses(
        &run.flag("--global-batch-size", 3),
        &["global_batch_size(3)"],
    );
    let run = candle_train("pretrain").flag("--data", &nothing);
    let run = run.flag("--output", workspace.path("new").display());
    for (flag, value, part) in [
        ("--tp", "7", "tp(7) > num_attention_heads(6)"),
        ("--heads", "7", "--hidden-size(192) % --heads(7)"),
        ("--seq-len", "64", "--seq-len 64"),
    ] {
        let run = run.clone().flag("--max-positions", 32).flag(flag, value);
        workspace.refuses(&run, &[part]);
    }
    // After the folder was made.
    let saving = saving(&workspace, "saves", 1).flag("--freeze", "nothing");
    workspace.refuses(&saving, &["--freeze nothing matches none"]);
    assert!(!workspace.path("saves").exists());
}

#[test]
fn another_run_is_refused_by_name() {
    let workspace = Workspace::new();
    let (program, ..) = uninterrupted(&workspace);
    only(&workspace, 2, "again");
    let again = workspace.path("again").display().to_string();
    workspace.run_refused(
        &program,
        &["is a checkpoint already", "(--resume latest)", "hint: "],
    );
    let resumed = program
        .flag("--save-dir", &again)
        .flag("--resume", "latest");
    fs::write(workspace.path("other.txt"), "Another text. ".repeat(500)).unwrap();
    let other = workspace.path("other.txt").display().to_string();
    for (flag, value, parts) in [
        (
            "--lr",
            "0.002",
            vec!["--lr is 0.002, and 0.001 in the checkpoint"],
        ),
        (
            "--data",
            &other,
            vec!["the data is ", "tokens (xxh3 ", "in the checkpoint"],
        ),
        (
            "--steps",
            "7",
            vec!["the number of steps is 7, and 6 in the checkpoint"],
        ),
        (
            "--global-batch-size",
            "8",
            vec!["--global-batch-size is 8, and 4"],
        ),
        (
            "--matmul-precision",
            "high",
            vec!["--matmul-precision is high, and not given in the checkpoint"],
        ),
        (
            "--dtype",
            "bf16",
            vec!["--dtype is bf16, and f32 in the checkpoint"],
        ),
    ] {
        let changed = resumed.clone().flag(flag, value);
        let hint = "hint: give the values of the checkpoint, or --resume-anyway";
        workspace.run_refused(&changed, &[parts, vec![hint]].concat());
        let outcome = changed.switch("--resume-anyway").succeeds_with_warnings();
        outcome.stderr.assert_begins("warning: ");
        fs::remove_dir_all(&again).unwrap();
        only(&workspace, 2, "again");
    }
    workspace.edit_config(|config| config["rms_norm_eps"] = 1e-3.into());
    let parts = [
        "the model is not that of the checkpoint",
        "rms_norm_eps is 0.001, and ",
    ];
    workspace.run_refused(&resumed.switch("--resume-anyway"), &parts);
}

#[test]
#[cfg(unix)]
fn a_full_disk_is_a_warning_and_where_no_checkpoint_fits_the_end_says_so_with_a_code_of_its_own() {
    // The state of the first layer is too large for a file, its weights in f16 are not.
    let workspace = Workspace::new();
    workspace.edit_config(|config| config["num_hidden_layers"] = 1.into());
    workspace.edit_weights(|tensors| {
        tensors.retain(|name, _| {
            !name.starts_with("model.layers.") || name.starts_with("model.layers.0.")
        });
    });
    let program = saving(&workspace, "saves", 1).flag("--save-dtype", "f16");
    let program = program.flag("--tp", 1).flag("--pp", 1).flag("--dp", 1);
    let outcome = program.with_limited_files().run().exited(88);
    let last = "error: the model is saved, but not one of 6 checkpoints could be: see the warnings above\n";
    assert!(outcome.stderr.ends_with(last), "{}", outcome.stderr);
    outcome.prints(&["saved to"]);
    for step in 1..=6 {
        let said = match step {
            6 => "there is no checkpoint after step 6: cannot write".to_string(),
            _ => {
                format!(
                    "there is no checkpoint after step {step}, and training goes on: cannot write"
                )
            }
        };
        outcome.says(&[&said]);
    }
    outcome.says(&["File too large"]);
    // Nothing has come into it.
    assert!(!workspace.path("saves").exists());
}

/// A run is killed again and again until it ends by itself.
#[test]
fn kill_9_at_any_moment() {
    let workspace = Workspace::new();
    let start = Instant::now();
    let (program, path, want) = uninterrupted(&workspace);
    let mut whole = start.elapsed();
    let numbers = without_times(metrics(&path));
    let begin_again = || {
        fs::remove_dir_all(workspace.path("saves")).unwrap();
        fs::remove_file(&path).unwrap();
    };
    begin_again();
    let program = program.flag("--resume", "latest").flag("--keep", 2);
    // Spread over the length of a run, in an order that looks random; each attempt gets some steps further.
    let mut num_killed = 0;
    for moment in (1..).map(|attempt| attempt * 7 % 11) {
        let time = whole * moment / 11 + Duration::from_millis(u64::from(moment));
        match (program.is_killed_after(time), num_killed) {
            (true, _) => num_killed += 1,
            // The machine has become faster.
            (false, 0) => {
                whole /= 2;
                begin_again();
            }
            (false, _) => break,
        }
        assert!(num_killed < 40, "the run does not get any further");
    }
    assert!(
        read_checkpoint(&workspace.output()) == want,
        "{num_killed} kills"
    );
    assert_eq!(without_times(metrics(&path)), numbers);
}

#[test]
fn inspecting_beside_a_run_that_saves_gives_no_false_alarm() {
    let workspace = Workspace::new();
    let saves = workspace.path("saves");
    let program = workspace.finetune().flag("--tp", 1).flag("--pp", 1);
    let program = program.flag("--dp", 1).flag("--steps", 60);
    let program = program.flag("--save-every", 1).flag("--keep", 1);
    let program = program.flag("--save-dir", saves.display());
    let inspect = candle_train("inspect").argument(saves.display());
    let inspect = inspect.switch("--verify");
    std::thread::scope(|scope| {
        let training = scope.spawn(|| program.succeeds());
        let mut num_looks = 0;
        while !training.is_finished() {
            let has_any =
                saves.is_dir() && names(&saves).iter().any(|name| name.starts_with("step-"));
            if has_any {
                let outcome = inspect.run();
                let said = format!("{}\n{}", outcome.stdout, outcome.stderr);
                assert_eq!(outcome.code, Some(0), "look {num_looks}: {said}");
                num_looks += 1;
            }
        }
        assert!(num_looks > 0);
    });
}
