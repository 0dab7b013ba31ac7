//! `--offload`: the same checkpoint, and folders that cannot be used.

use std::fs;

use super::folder::{names, read_checkpoint};
use super::program::AssertText;
use super::workspace::Workspace;

#[test]
fn the_checkpoint_is_the_same_wherever_weights_and_state_are() {
    let workspace = Workspace::new();
    let dir = workspace.path("state");
    fs::create_dir(&dir).unwrap();
    let other = workspace.path("other");
    fs::create_dir(&other).unwrap();
    let file = format!("nvme:{}", dir.display());
    let folders = [&dir, &other].map(|dir| dir.display().to_string());
    for dtype in ["f32", "bf16"] {
        let saved = |places: &[(&str, &str)]| {
            let program = workspace.finetune().flag("--dtype", dtype);
            let flags = places.iter();
            flags
                .fold(program, |program, (flag, value)| {
                    program.argument(flag).argument(value)
                })
                .succeeds();
            read_checkpoint(&workspace.output())
        };
        let want = saved(&[]);
        let places: [&[(&str, &str)]; 4] = [
            &[("--offload", "optimizer")],
            &[("--offload", &file)],
            &[("--offload", "params"), ("--offload-dir", &folders[0])],
            &[
                ("--offload", "params,optimizer"),
                ("--offload-dir", &folders[0]),
                ("--offload-dir", &folders[1]),
            ],
        ];
        for place in places {
            assert!(saved(place) == want, "{dtype} {place:?}");
        }
    }
    for dir in [dir, other] {
        assert!(names(&dir).is_empty(), "{:?}", names(&dir));
    }
}

#[test]
fn a_run_goes_on_from_weights_in_files_to_weights_in_memory_and_back() {
    let workspace = Workspace::new();
    let (dir, checkpoints) = (workspace.path("scratch"), workspace.path("checkpoints"));
    fs::create_dir(&dir).unwrap();
    let trained = |is_offloaded: bool| {
        let program = (workspace.finetune().flag("--dtype", "bf16"))
            .flag("--steps", 3)
            .flag("--save-dir", checkpoints.display())
            .flag("--save-every", 1)
            .flag("--resume", "latest");
        let program = match is_offloaded {
            true => program
                .flag("--offload", "all")
                .flag("--offload-dir", dir.display()),
            false => program,
        };
        program.succeeds();
        read_checkpoint(&workspace.output())
    };
    let want = trained(false);
    fs::remove_dir_all(&checkpoints).unwrap();
    for is_offloaded in [true, false, true] {
        assert!(trained(is_offloaded) == want, "{is_offloaded}");
        // The next one goes on after the first step.
        for step in ["step-000002", "step-000003"] {
            fs::remove_dir_all(checkpoints.join(step)).unwrap();
        }
    }
}

#[test]
fn inputs_stay_where_memory_is_left_and_the_plan_knows_it() {
    let workspace = Workspace::new();
    let dir = workspace.path("scratch");
    fs::create_dir(&dir).unwrap();
    let program = || {
        // The first steps may seem to hold less, as in the tests of memory.
        let program = (workspace.finetune().flag("--steps", 4)).flag("--recompute", "full");
        let program = program
            .flag("--tp", 1)
            .flag("--pp", 1)
            .flag("--seq-len", 64);
        let program = program.flag("--offload", "activations");
        program.flag("--offload-dir", dir.display())
    };
    let activations = |said: &str, title: &str| {
        let line = said
            .lines()
            .find_map(|line| Some(line.split_once(title)?.1));
        let parts = line.expect("a line of each category").split(", ");
        let of_all: Vec<String> = parts.map(str::to_string).collect();
        assert!(
            !of_all.iter().any(|part| part.starts_with("disk ")),
            "{of_all:?}"
        );
        let of_activations = of_all
            .iter()
            .find_map(|part| part.strip_prefix("activations "));
        let kib = of_activations.and_then(|bytes| bytes.strip_suffix(" KiB"));
        kib.expect("KiB of activations").parse::<f64>().unwrap()
    };
    let dry = program().switch("--dry-run").succeeds().stdout;
    dry.assert_has(&[" of a rank's activations stay in memory: "]);
    // The machine of the test has room for all of these.
    let expected = activations(&dry, "memory of the largest rank, expected: ");
    let run = program().succeeds().stdout;
    let held = activations(&run, "memory of the largest rank: ");
    assert!((held / expected - 1.0).abs() < 0.01, "{held} {expected}");
}

#[test]
fn a_dry_run_tells_the_room_of_each_folder() {
    let workspace = Workspace::new();
    let folders = ["first", "second"].map(|name| workspace.path(name));
    let program = workspace.finetune().flag("--tp", 1).flag("--pp", 1);
    let program = program.flag("--dp", 2).flag("--offload", "optimizer");
    let program = folders.iter().fold(program, |program, folder| {
        fs::create_dir(folder).unwrap();
        program.argument("--offload-dir").argument(folder.display())
    });
    let said = program.switch("--dry-run").succeeds().stdout;
    for folder in &folders {
        let folder = folder.display().to_string();
        let line = said.lines().find(|line| line.contains(&folder));
        let line = line.unwrap_or_else(|| panic!("no line of {folder}: {said}"));
        assert!(line.starts_with("room for what is offloaded: "), "{line}");
        assert!(!line.contains(": 0 "), "{line}");
    }
}

#[test]
fn every_family_trains_to_the_same_bits_on_layouts_of_all_kinds() {
    // A family, a layout, and what leaves the device.
    for (family, flags, list) in [
        (
            "gqa",
            "--tp 2 --dp 2 --zero 2 --recompute full",
            "gradients",
        ),
        ("mistral", "--pp 2 --dp 2 --zero 1 --dtype bf16", "all"),
        ("qwen2", "--tp 2 --pp 2 --lora-rank 4", "params"),
        (
            "qwen3",
            "--dp 2 --zero 3 --zero-secondary 2",
            "params,gradients",
        ),
        (
            "gemma",
            "--pp 2 --schedule gpipe --dtype bf16 --recompute full",
            "all",
        ),
        (
            "f16_tied",
            "--dp 2 --zero 3 --lora-rank 4 --base-dtype q8_0",
            "all",
        ),
        ("tied_bias", "--pp 2 --dp 2 --zero 0 --no-overlap", "all"),
    ] {
        let workspace = Workspace::with_model(family);
        let dir = workspace.path("scratch");
        fs::create_dir(&dir).unwrap();
        let mut words = flags.split_whitespace().peekable();
        let program = workspace.finetune_by_default().flag("--steps", 2);
        let program = program.flag("--seq-len", 16).flag("--lr", 1e-3);
        let mut program = program.flag("--global-batch-size", 4);
        while let Some(flag) = words.next() {
            let value = words.next_if(|word| !word.starts_with("--"));
            program = match value {
                Some(value) => program.flag(flag, value),
                None => program.switch(flag),
            };
        }
        program.succeeds();
        let want = read_checkpoint(&workspace.output());
        let program = program.flag("--offload", list);
        program.flag("--offload-dir", dir.display()).succeeds();
        let got = read_checkpoint(&workspace.output());
        assert!(got == want, "{family} {flags} --offload {list}");
    }
}

#[test]
fn what_is_offloaded_must_be_said_and_fit() {
    let workspace = Workspace::new();
    let dir = workspace.path(".").display().to_string();
    let refuses = |flags: &[(&str, &str)], parts: &[&str]| {
        workspace.finetune().flags(flags).fails(parts);
    };
    refuses(
        &[("--offload-dir", &dir)],
        &["--offload-dir is given without --offload", "hint:"],
    );
    refuses(
        &[("--offload", "nvme:a"), ("--offload-dir", &dir)],
        &["two folders", "nvme:a", "hint:"],
    );
    // Weights stay.
    let tiles = [("--offload", "optimizer"), ("--offload-dir", &dir)];
    let tiles = [&tiles[..], &[("--tile-linears", "2")]].concat();
    refuses(&tiles, &["tile-linears(2)", "offloaded", "hint:"]);
}

#[test]
fn a_folder_that_cannot_hold_the_state_is_refused_before_the_first_step() {
    let workspace = Workspace::new();
    let program = |dir: &str| {
        let place = format!("nvme:{}", workspace.path(dir).display());
        workspace.finetune().flag("--offload", place)
    };
    let refuses = |program: &super::program::Program, why: &str| {
        let outcome = program.run();
        let parts = [
            "cannot keep",
            "bytes of the optimizer's state of this rank",
            why,
            "hint:",
        ];
        outcome.assert_error(&parts);
        assert!(!outcome.stderr.contains("loss"), "{}", outcome.stderr);
    };
    refuses(&program("missing"), "missing");
    refuses(&program("text.txt"), "text.txt");
    let small = program(".").flag("--tp", 1).flag("--dp", 1);
    refuses(&small.with_limited_files(), "File too large");
}
