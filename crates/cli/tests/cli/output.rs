//! Places that cannot be written to, and output folders that hold something already.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::time::Instant;

use candle_parallel::checkpoint::OutputFolder;
use nix::sys::signal::Signal;

use super::folder::{Snapshot, copy_folder, fixture, names, read_checkpoint, snapshot};
use super::program::Program;
use super::stop::run_and_signal;
use super::workspace::{Workspace, candle_train};

#[test]
fn an_output_that_cannot_be_a_folder_is_an_error_before_any_step() {
    let workspace = Workspace::new();
    let file = workspace.path("file");
    fs::write(&file, "in the way").unwrap();
    let below = file.join("below/output");
    for output in [&file, &below] {
        let output = output.display().to_string();
        let outcome = workspace
            .finetune()
            .flag("--output", &output)
            .fails(&["cannot write to the output folder", &output]);
        assert_eq!(outcome.stderr.lines().count(), 1, "{}", outcome.stderr);
    }
    assert_eq!(fs::read_to_string(&file).unwrap(), "in the way");
}

#[test]
fn a_run_that_fails_makes_no_folder() {
    let workspace = Workspace::new();
    let output = workspace.path("new/folders/output");
    let before = names(&workspace.path(""));
    let program = workspace.finetune().flag("--output", output.display());
    let refused = program.clone().flag("--tp", 5);
    refused.fails(&["tp(5)"]);
    assert_eq!(names(&workspace.path("")), before);
    let diverges = program.clone().flag("--steps", 6).flag("--lr", 1e30);
    diverges.fails(&["step 2 failed"]);
    assert_eq!(names(&workspace.path("")), before);
    program.succeeds();
    assert_eq!(names(&workspace.path("new/folders")), ["output"]);
}

#[test]
fn metrics_that_cannot_be_written_are_an_error_before_any_step() {
    let workspace = Workspace::new();
    for metrics in [
        workspace.path("missing/metrics.jsonl"),
        workspace.path("model"),
    ] {
        let program = workspace.finetune().flag("--metrics", metrics.display());
        let outcome = program
            .flag("--prompt", "a")
            .flag("--sample-tokens", 1)
            .fails(&["cannot write the metrics file", metrics.to_str().unwrap()]);
        assert!(!outcome.stdout.contains("before"), "{}", outcome.stdout);
        workspace.assert_output_is_untouched();
    }
}

#[test]
fn metrics_do_not_overwrite_what_is_no_metrics_file() {
    let workspace = Workspace::new();
    for file in ["model/model.safetensors", "model/config.json", "text.txt"] {
        let before = fs::read(workspace.path(file)).unwrap();
        let program = workspace.finetune();
        let program = program.flag("--metrics", workspace.path(file).display());
        workspace.refuses(&program, &[file, "is no metrics file", "hint:"]);
        assert!(fs::read(workspace.path(file)).unwrap() == before, "{file}");
    }
}

#[test]
fn metrics_in_the_folder_that_is_replaced_are_refused() {
    let workspace = Workspace::new();
    for output in ["output", "new"] {
        for flag in ["--metrics", "--tensorboard", "--trace"] {
            let output = workspace.path(output);
            let inside = output.join("steps");
            let program = workspace.finetune().flag("--output", output.display());
            let program = program.flag(flag, inside.display());
            workspace.refuses(&program, &["steps is in the output folder", "hint:"]);
        }
    }
}

#[test]
fn curves_go_to_a_folder_and_are_continued_in_another_file() {
    let workspace = Workspace::new();
    let program = workspace.finetune();
    let program = program.flag("--save-every", 1);
    let program = program.flag("--save-dir", workspace.path("saves").display());
    let curves = workspace.path("curves/a");
    let program = program.flag("--tensorboard", curves.display());
    program.succeeds();
    assert_eq!(names(&curves).len(), 1);
    program.flag("--resume", "latest").succeeds();
    assert_eq!(names(&curves).len(), 2);
    let file = workspace.path("text.txt");
    let program = workspace.finetune().flag("--tensorboard", file.display());
    workspace.run_refused(&program, &["text.txt is no folder"]);
}

#[test]
fn a_folder_that_must_not_be_replaced_is_refused_before_any_step() {
    let refuses = |spoil: &dyn Fn(&Path), parts: &[&str]| {
        let workspace = Workspace::new();
        let output = workspace.path("odd");
        copy_folder(&workspace.output(), &output);
        spoil(&output);
        let before = snapshot(&output);
        let program = workspace.finetune().flag("--output", output.display());
        let outcome = program
            .flag("--prompt", "a")
            .flag("--sample-tokens", 1)
            .fails(&["cannot write to the output folder", "odd"]);
        outcome.assert_error(parts);
        assert!(!outcome.stdout.contains("before"), "{}", outcome.stdout);
        assert_eq!(snapshot(&output), before);
    };
    let what = "it holds what is no part of a model";
    refuses(
        &|output| fs::write(output.join("notes.bin"), "x").unwrap(),
        &[what, "notes.bin"],
    );
    refuses(
        &|output| fs::create_dir(output.join("logs")).unwrap(),
        &[what, "logs"],
    );
    let in_the_way = |output: &Path| {
        fs::remove_file(output.join("config.json")).unwrap();
        fs::create_dir(output.join("config.json")).unwrap();
    };
    refuses(&in_the_way, &[what, "config.json"]);
    let no_model = |output: &Path| {
        for name in names(output) {
            fs::remove_file(output.join(name)).unwrap();
        }
        fs::write(output.join("README.md"), "mine").unwrap();
    };
    refuses(&no_model, &["it holds README.md, but no model"]);
}

#[test]
fn a_new_checkpoint_replaces_the_old_one() {
    let workspace = Workspace::new();
    workspace.finetune().succeeds();
    // The old one was in five files with an index.
    let expected = [
        ".candle_train.json",
        "candle_train.toml",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ];
    assert_eq!(names(&workspace.output()), expected);
    let read = |path| fs::read(path).unwrap();
    for file in ["config.json", "tokenizer.json", "tokenizer_config.json"] {
        assert_eq!(
            read(workspace.output().join(file)),
            read(workspace.model(file)),
            "{file}"
        );
    }
}

#[test]
fn without_overwrite_only_what_the_same_command_has_made_is_replaced() {
    let workspace = Workspace::new();
    let already = "it holds a model already";
    let program = workspace.finetune().without("--overwrite");
    workspace.refuses(&program, &[already, "--overwrite"]);
    let output = workspace.path("mine");
    let program = program.flag("--output", output.display());
    program.succeeds();
    let made = || {
        let mut files = snapshot(&output);
        // Of this run and of its flags.
        for name in [".candle_train.json", "candle_train.toml"] {
            assert!(files.remove(Path::new(name)).is_some());
        }
        files
    };
    let first = made();
    program.succeeds();
    assert_eq!(made(), first);
    // What does not change the weights may be another.
    program
        .clone()
        .flag("--prompt", "a")
        .flag("--sample-tokens", 2)
        .succeeds();
    assert_eq!(made(), first);
    let refused = |program: &Program| {
        program.fails(&[already, "--overwrite", "mine"]);
        assert_eq!(made(), first);
    };
    refused(&program.clone().flag("--lr", 2e-3));
    refused(&program.clone().flag("--matmul-precision", "high"));
    let text = fs::read_to_string(workspace.path("text.txt")).unwrap();
    fs::write(workspace.path("other.txt"), format!("{text}.")).unwrap();
    let other = workspace.path("other.txt");
    refused(&program.clone().flag("--data", other.display()));
    copy_folder(&workspace.path("model"), &workspace.path("twin"));
    let twin = workspace.path("twin");
    let of_twin = program.clone().flag("--model", twin.display());
    of_twin.succeeds();
    assert_eq!(made(), first);
    // What the model's files hold counts, not where they are.
    let weights = twin.join("model.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    let last_mantissa = bytes.len() - 4;
    bytes[last_mantissa] ^= 1;
    fs::write(&weights, bytes).unwrap();
    refused(&of_twin);
    refused(&program.clone().flag("--tp", 1));
    fs::write(output.join("README.md"), "what I found").unwrap();
    program.fails(&[already]);
    program.switch("--overwrite").succeeds();
    assert_eq!(made(), first);
}

#[test]
fn the_input_model_is_never_replaced() {
    let workspace = Workspace::new();
    let model = workspace.path("model");
    std::os::unix::fs::symlink(&model, workspace.path("link")).unwrap();
    let before = snapshot(&model);
    for (input, output) in [
        ("model", "model"),
        ("model", "link"),
        ("link", "model/../model"),
    ] {
        let program = workspace.finetune();
        let program = program.flag("--model", workspace.path(input).display());
        let program = program.flag("--output", workspace.path(output).display());
        workspace.refuses(&program, &["which this run reads", input]);
        assert_eq!(snapshot(&model), before);
    }
    // Nor the tokenizer's folder.
    let program = candle_train("pretrain");
    let program = program.flag("--data", workspace.path("text.txt").display());
    let program = program
        .flag("--tokenizer", model.display())
        .switch("--overwrite");
    let program = program.flag("--output", model.display());
    workspace.refuses(&program, &["which this run reads"]);
    assert_eq!(snapshot(&model), before);
}

#[test]
fn two_runs_into_one_folder() {
    let workspace = Workspace::new();
    let long = workspace.finetune().flag("--steps", 100_000);
    let mut second = None;
    // Whoever has it is told, and the first one ends when its process does.
    let first = run_and_signal(&long, |stderr| {
        let is_time = second.is_none() && stderr.contains("step 1/");
        if is_time {
            second = Some(workspace.finetune().run());
        }
        is_time.then_some(Signal::SIGKILL)
    });
    assert_eq!(first.code, None);
    second
        .unwrap()
        .assert_error(&["another run is writing to it", "process", "hint:"]);
    workspace.assert_output_is_untouched();
    workspace.finetune().succeeds();
    assert_eq!(names(&workspace.path("")), ["model", "output", "text.txt"]);
}

#[test]
fn what_cannot_be_saved_goes_beside_the_output_or_where_it_is_told_to() {
    for rescue in [None, Some("new/rescues")] {
        let workspace = Workspace::new();
        let program = workspace
            .finetune()
            .flag("--output", workspace.path("mine").display());
        let program = match rescue {
            None => program,
            Some(dir) => program.flag("--rescue-dir", workspace.path(dir).display()),
        };
        let notes = workspace.path("mine/notes.txt");
        // Somebody puts something there while the run is under way.
        let outcome = program.flag("--steps", 20).run_and(|stderr| {
            if stderr.contains("step 1/") && !notes.exists() {
                fs::create_dir_all(notes.parent().unwrap()).unwrap();
                fs::write(&notes, "mine").unwrap();
            }
        });
        let place = workspace.path(rescue.unwrap_or("")).join("mine-rescued");
        let said = format!("hint: the model was saved to {} instead", place.display());
        outcome.assert_error(&["no part of a model (notes.txt)", &said]);
        assert_eq!(names(&workspace.path("mine")), ["notes.txt"]);
        assert!(
            read_checkpoint(&place)
                .keys()
                .eq(read_checkpoint(&workspace.path("model")).keys())
        );
    }
}

/// Without the note of sizes and times.
fn model_files(dir: &Path) -> Snapshot {
    let mut files = snapshot(dir);
    files.remove(Path::new(".candle_train.json"));
    files
}

#[test]
fn a_kill_at_any_moment_leaves_the_old_model_or_the_new_one() {
    let workspace = Workspace::new();
    let old = model_files(&workspace.output());
    let program = workspace.finetune().flag("--steps", 1);
    let start = Instant::now();
    program.succeeds();
    let (new, took) = (model_files(&workspace.output()), start.elapsed());
    // Most of them in the save, at the end.
    for turn in 0..12 {
        copy_folder(&fixture("bf16_sharded/model"), &workspace.path("old"));
        fs::remove_dir_all(workspace.output()).unwrap();
        fs::rename(workspace.path("old"), workspace.output()).unwrap();
        let (start, delay) = (Instant::now(), took.mul_f64(0.7 + 0.03 * f64::from(turn)));
        run_and_signal(&program, |_| {
            (start.elapsed() >= delay).then_some(Signal::SIGKILL)
        });
        // What a kill between two renames leaves gets its name from the next run that claims the folder.
        drop(OutputFolder::new(workspace.output()).claim().unwrap());
        let left = model_files(&workspace.output());
        assert!(left == old || left == new, "turn {turn}: {:?}", left.keys());
        assert_eq!(names(&workspace.path("")), ["model", "output", "text.txt"]);
    }
}

/// Somebody else who may write to the folder has put links there that lead to another's file.
#[test]
fn a_link_in_the_place_of_a_lock_is_refused() {
    let workspace = Workspace::new();
    let thesis = workspace.path("thesis");
    fs::write(&thesis, "years of work").unwrap();
    let program = workspace
        .finetune()
        .flag("--save-dir", workspace.path("saves").display())
        .flag("--save-every", 1)
        .flag("--tensorboard", workspace.path("curves").display());
    let program = program.flags(&["--tp", "--pp", "--dp"].map(|flag| (flag, 1)));
    fs::create_dir(workspace.path("saves")).unwrap();
    for lock in [".output.lock", "saves/.lock", "curves/.tensorboard.lock"] {
        let lock = workspace.path(lock);
        fs::create_dir_all(lock.parent().unwrap()).unwrap();
        symlink(&thesis, &lock).unwrap();
        let said = [
            &*lock.display().to_string(),
            "is a link to",
            "hint: nothing was written to it",
        ];
        workspace.refuses(&program, &said);
        assert_eq!(fs::read_to_string(&thesis).unwrap(), "years of work");
        fs::remove_file(&lock).unwrap();
    }
}
