//! `--dry-run`: what a run would do, told without doing it. That it refuses what a start refuses is tested where that is.

use std::fs;
use std::path::Path;
use std::time::SystemTime;

use serde_json::Value;

use super::folder::{Snapshot, read_checkpoint, snapshot};
use super::program::{AssertText, Program};
use super::training::metrics;
use super::workspace::{Workspace, candle_train};

/// What the last line of `--json` has.
fn told(program: &Program) -> Value {
    let said = program.clone().switch("--dry-run").switch("--json");
    let said = said.succeeds().stdout;
    let last = said.lines().last().unwrap();
    serde_json::from_str(last).unwrap_or_else(|err| panic!("{err}: {said}"))
}

type State = (Snapshot, Vec<Option<SystemTime>>);

/// Contents of all files below, and when each file and folder was changed.
fn state(dir: &Path) -> State {
    let files = snapshot(dir);
    let changed = |path: &Path| fs::metadata(dir.join(path)).unwrap().modified().ok();
    let times = files.keys().map(|path| changed(path));
    let times = times.chain([changed(Path::new(""))]).collect();
    (files, times)
}

#[track_caller]
fn assert_same(after: &State, before: &State) {
    let names = |state: &State| state.0.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(after), names(before));
    let pairs = after
        .1
        .iter()
        .zip(&before.1)
        .zip(names(before).into_iter().map(Some).chain([None]));
    for ((after, before), name) in pairs {
        assert_eq!(after, before, "{name:?}");
    }
    assert!(after == before);
}

#[test]
fn what_is_told_is_what_is_done_on_any_layout_and_nothing_is_written() {
    let workspace = Workspace::new();
    let metrics_file = workspace.path("metrics.jsonl");
    for flags in [
        "--tp 2 --pp 2 --dp 2",
        "--dp 3 --zero 3 --epochs 0.1",
        "--lora-rank 4 --base-dtype q8_0 --dtype bf16",
        "--freeze embed_tokens",
        "--batch-ramp 2,1,20 --eval-fraction 0.1",
        "--strategy parameter-server --servers 2 --dp 2",
    ] {
        let mut program = workspace.finetune_by_default().flag("--seq-len", 16);
        program = program.flag("--sample-tokens", 0).flag("--epochs", "0.05");
        program = program.flag("--metrics", metrics_file.display());
        let mut words = flags.split(' ');
        while let (Some(flag), Some(value)) = (words.next(), words.next()) {
            program = program.flag(flag, value);
        }
        let before = state(&workspace.path(""));
        let told = told(&program);
        assert_same(&state(&workspace.path("")), &before);
        program.succeeds();
        let num_values = |dir: &Path, is_counted: &dyn Fn(&str) -> bool| -> usize {
            let tensors = read_checkpoint(dir);
            let tensors = tensors.iter().filter(|(name, _)| is_counted(name));
            tensors
                .map(|(_, (_, shape, _))| shape.iter().product::<usize>())
                .sum()
        };
        let saved = num_values(&workspace.output(), &|_| true);
        let model = num_values(&workspace.path("model"), &|_| true);
        let frozen = num_values(&workspace.path("model"), &|name| {
            flags.contains("--lora") || flags.contains("--freeze") && name.contains("embed_tokens")
        });
        let adapters = if flags.contains("--lora") { saved } else { 0 };
        assert_eq!(told["parameters"], model + adapters, "{flags}");
        let trained = model + adapters - frozen;
        assert_eq!(told["trained_parameters"], trained, "{flags}");
        let lines = metrics(&metrics_file);
        let steps = lines.iter().filter_map(|line| line["step"].as_u64());
        let steps = steps.max().unwrap() + 1;
        assert_eq!(told["steps"], steps, "{flags}");
        let held = &lines.iter().find(|line| line.contains_key("memory"));
        let held = held.unwrap()["memory"].as_object().unwrap();
        let memory = told["memory"].as_object().unwrap();
        let names = |of: &serde_json::Map<String, Value>| of.keys().cloned().collect::<Vec<_>>();
        assert_eq!(names(memory), names(held), "{flags}");
        for what in ["weights_bytes", "gradients_bytes", "optimizer_bytes"] {
            assert_eq!(memory[what], held[what], "{flags}: {what}");
        }
        fs::remove_file(&metrics_file).unwrap();
    }
}

#[test]
fn it_says_what_a_start_says() {
    let workspace = Workspace::new();
    let saves = workspace.path("saves");
    let program = workspace.finetune().flag("--save-dir", saves.display());
    let program = program.flag("--save-every", 1);
    let dry = program.clone().switch("--dry-run").succeeds().stdout;
    let done = program.succeeds().stdout;
    let lines: Vec<&str> = dry.lines().collect();
    let [start @ .., room, of_checkpoints, last] = lines.as_slice() else {
        panic!("{dry}")
    };
    assert_eq!(
        start,
        &done.lines().take(start.len()).collect::<Vec<_>>()[..]
    );
    assert!(start.len() >= 4, "{dry}");
    assert!(
        room.starts_with("room for the model: 229.6 kB in "),
        "{dry}"
    );
    let places = [" in ", &*saves.display().to_string(), " free"];
    assert!(of_checkpoints.starts_with("room for checkpoints: "));
    assert!(
        places.iter().all(|part| of_checkpoints.contains(part)),
        "{dry}"
    );
    assert_eq!(*last, "dry run: nothing was trained or written");
    // What goes on from there.
    let on = program.flag("--resume", "latest").flag("--steps", 5);
    let on = on.switch("--resume-anyway");
    let before = state(&workspace.path(""));
    let told = on.clone().switch("--dry-run").succeeds_with_warnings();
    told.prints(&["resumed after step 2"]);
    assert_same(&state(&workspace.path("")), &before);
}

#[test]
fn a_model_may_have_no_more_than_its_configuration() {
    let workspace = Workspace::new();
    let whole = told(&workspace.finetune());
    let model = workspace.path("model");
    for entry in fs::read_dir(&model).unwrap().flatten() {
        if entry.file_name() != "config.json" {
            fs::remove_file(entry.path()).unwrap();
        }
    }
    let before = state(&workspace.path(""));
    assert_eq!(told(&workspace.finetune()), whole);
    let by_epochs = workspace.finetune().without("--steps");
    let unknown = told(&by_epochs);
    assert_eq!(unknown["steps"], Value::Null);
    assert_eq!(unknown["memory"], whole["memory"]);
    let said = by_epochs.switch("--dry-run").succeeds().stdout;
    said.assert_has(&["the data is not read: the model has no tokenizer.json\n"]);
    for (flag, value, part) in [
        ("--tp", "5", "hint: use tp <= 4"),
        ("--data", "nowhere.txt", "nowhere.txt"),
        ("--seq-len", "100000", "hint: --seq-len "),
    ] {
        let program = workspace.finetune().switch("--dry-run").flag(flag, value);
        program.fails(&[part]);
    }
    // With a tokenizer the data is read.
    let of_model = super::folder::fixture("gqa").join("model/tokenizer.json");
    fs::copy(of_model, model.join("tokenizer.json")).unwrap();
    let program = workspace.finetune().without("--steps");
    assert_eq!(told(&program)["steps"], 342);
    fs::remove_file(model.join("tokenizer.json")).unwrap();
    assert!(state(&workspace.path("")).0 == before.0);
}

#[test]
fn a_new_model_and_its_tokens_are_told_too() {
    let workspace = Workspace::new();
    let program = candle_train("pretrain")
        .flag("--data", workspace.path("text.txt").display())
        .flag("--output", workspace.path("new/model").display())
        .flag("--vocab-size", 300)
        .flag("--steps", 2);
    let before = state(&workspace.path(""));
    let told = told(&program);
    assert!(state(&workspace.path("")) == before);
    assert_eq!(told["steps"], 2);
    assert_eq!(told["parameters"], told["trained_parameters"]);
    let wrong = program.switch("--json").run().exited(2);
    wrong.says(&["\n  --dry-run\n"]);
}

#[test]
fn the_cache_of_tokens_is_read_and_not_written() {
    let workspace = Workspace::new();
    let cache = workspace.path("cache");
    let dir = cache.display();
    let program = workspace.finetune().variable("CANDLE_TRAIN_CACHE", dir);
    let first = told(&program);
    assert!(!cache.exists());
    program.succeeds();
    let before = state(&cache);
    assert!(!before.0.is_empty());
    assert_eq!(told(&program), first);
    assert!(state(&cache) == before);
    // A damaged file is left to the run.
    let file = before.0.iter().find(|(_, content)| content.is_some());
    fs::write(cache.join(file.unwrap().0), "damaged").unwrap();
    let before = state(&cache);
    assert_eq!(told(&program), first);
    assert!(state(&cache) == before);
}

#[test]
fn of_several_processes_one_tells_it() {
    let workspace = Workspace::new();
    let program = workspace.finetune().switch("--dry-run").switch("--json");
    let program = program.flag("--tp", 1).flag("--pp", 1).without("--dp");
    let program = program.flag("--strategy", "parameter-server");
    let program = program.flag("--servers", 2);
    for (rank, lines) in [(0, 1), (3, 0)] {
        let mut process = program.clone();
        for (name, value) in [
            ("RANK", rank),
            ("WORLD_SIZE", 4),
            ("LOCAL_RANK", rank),
            ("LOCAL_WORLD_SIZE", 4),
            ("MASTER_PORT", 1),
        ] {
            process = process.variable(name, value);
        }
        let said = process.variable("MASTER_ADDR", "127.0.0.1").succeeds();
        let told = said.stdout.lines().filter(|line| line.starts_with('{'));
        assert_eq!(told.count(), lines, "{}", said.stdout);
        assert_eq!(said.stdout.is_empty(), lines == 0, "{}", said.stdout);
    }
}

/// Refusals of a start that come when its data is read, or its checkpoint is.
#[test]
fn what_a_start_finds_late_is_told_too() {
    let workspace = Workspace::new();
    let saves = workspace.path("saves");
    let program = workspace.finetune().flag("--save-dir", saves.display());
    program.clone().flag("--save-every", 1).succeeds();
    let output = workspace.path("more");
    let again = program.flag("--output", output.display());
    let refused = |program: Program, part: &str| {
        let told = program.clone().switch("--dry-run").run();
        told.says(&[part]);
        let done = program.run();
        let said = done.stderr.replace("rank 0: ", "");
        assert_eq!((told.code, told.stderr), (done.code, said));
    };
    let first = saves.join("step-000001");
    let earlier = again.clone().flag("--resume", first.display());
    refused(earlier, "is newer than the checkpoint after step 1");
    let latest = again.flag("--resume", "latest").switch("--resume-anyway");
    let frozen = latest.flag("--freeze", "embed_tokens");
    refused(frozen, "embed_tokens.weight is trained in the checkpoint");
    fs::write(workspace.path("file"), "").unwrap();
    let place = workspace.path("file/x");
    for flag in ["--metrics", "--trace", "--tensorboard"] {
        let program = workspace.finetune().flag(flag, place.display());
        refused(program, "file/x");
    }
}

#[test]
fn a_model_that_lacks_files_is_checked_as_far_as_they_do_not_matter() {
    let workspace = Workspace::new();
    workspace.finetune().succeeds();
    fs::remove_file(workspace.model("model.safetensors")).unwrap();
    // Of this run, as far as can be known.
    let program = workspace.finetune().without("--overwrite");
    let with_tokens = program.clone().switch("--dry-run").succeeds().stdout;
    fs::remove_file(workspace.model("tokenizer.json")).unwrap();
    let without = program.clone().switch("--dry-run").succeeds().stdout;
    let room = |said: &str| {
        let mut lines = said.lines();
        let room = lines.find_map(|line| line.strip_prefix("room for the model: "));
        let words: Vec<&str> = room.unwrap().split(' ').collect();
        words[0].parse::<f64>().unwrap()
    };
    let saved = fs::metadata(workspace.output().join("model.safetensors")).unwrap();
    for said in [with_tokens, without] {
        let kilobytes = saved.len() as f64 / 1e3;
        assert!((room(&said) / kilobytes - 1.0).abs() < 0.2, "{said}");
    }
    fs::write(workspace.path("file"), "").unwrap();
    let place = workspace.path("file/x");
    for flag in [
        "--metrics",
        "--trace",
        "--tensorboard",
        "--save-dir",
        "--eval-data",
    ] {
        let program = program
            .clone()
            .switch("--dry-run")
            .flag(flag, place.display());
        program.fails(&["file"]);
    }
    // A folder that was copied in part.
    let index = r#"{"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}"#;
    fs::write(workspace.model("model.safetensors.index.json"), index).unwrap();
    let part = "model-00001-of-00002.safetensors";
    fs::copy(
        super::folder::fixture("gqa").join("model/tokenizer.json"),
        workspace.model("tokenizer.json"),
    )
    .unwrap();
    program.clone().switch("--dry-run").fails(&[part]);
    program.fails(&[part]);
}

#[test]
fn best_weights_that_are_kept_beside_the_output_take_room() {
    let workspace = Workspace::new();
    let program = workspace.finetune().flag("--eval-fraction", "0.1");
    let program = program.flag("--eval-every", 1).flag("--patience", 2);
    let program = program.switch("--dry-run");
    let said = program.clone().succeeds().stdout;
    said.assert_has(&["\nroom for checkpoints: ", ".output.best"]);
    // More than any number of bytes.
    let saves = workspace.path("saves").display().to_string();
    let program = program.flag("--save-dir", saves).flag("--keep", i64::MAX);
    program.fails(&["not enough space", "checkpoints"]);
}

/// Of one replica is counted what its ranks hold together, and not the largest rank times their number.
#[test]
fn the_memory_of_a_machine_is_that_of_its_ranks_together() {
    let workspace = Workspace::new();
    workspace.edit_config(|config| {
        config["hidden_size"] = 2048.into();
        config["intermediate_size"] = 5632.into();
        config["num_hidden_layers"] = 16.into();
        config["vocab_size"] = 32_000.into();
        config["head_dim"] = serde_json::Value::Null;
    });
    for name in ["model.safetensors", "tokenizer.json"] {
        fs::remove_file(workspace.model(name)).unwrap();
    }
    let program = workspace.finetune().switch("--dry-run").flag("--dp", 1);
    let program = program.flag("--micro-batch-size", 1).flag("--tp", 1);
    let peak = |pp: usize| {
        let said = program.clone().flag("--pp", pp).run();
        let said = format!("{}{}", said.stdout, said.stderr);
        let (_, after) = said
            .split_once("expected at a time: ")
            .unwrap_or_else(|| panic!("{said}"));
        let peak = after.split(' ').next().unwrap().parse::<f64>().unwrap();
        (peak, said.contains("error:"))
    };
    let ((whole, is_refused), (part, is_part_refused)) = (peak(1), peak(16));
    // All together hold a little more than one.
    assert!(part * 16.0 > 1.3 * whole, "{part} {whole}");
    assert_eq!(is_refused, is_part_refused);
}
