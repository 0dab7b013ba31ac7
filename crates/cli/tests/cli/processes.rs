//! Ranks as processes: the bits of threads, and failures that name the rank. Without `mpirun` the tests say so and pass.

use std::fs;
use std::process::Command;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use super::program::{AssertText, Outcome, Program};
use super::workspace::{Workspace, candle_train};

/// What `mpirun --version` says, if there is one.
fn mpirun_version() -> Option<&'static str> {
    static VERSION: OnceLock<Option<String>> = OnceLock::new();
    let version = VERSION.get_or_init(|| {
        let output = Command::new("mpirun").arg("--version").output().ok()?;
        Some(String::from_utf8_lossy(&output.stdout).into_owned())
    });
    version.as_deref()
}

pub fn is_open_mpi() -> bool {
    let names = ["Open MPI", "OpenRTE"];
    mpirun_version().is_some_and(|version| names.iter().any(|name| version.contains(name)))
}

/// The words that start `num_ranks` processes on this host; `None` where there is no `mpirun`.
fn mpirun(num_ranks: usize) -> Option<Vec<String>> {
    if mpirun_version().is_none() {
        eprintln!("not tested: there is no mpirun");
        return None;
    }
    let mut words = vec!["mpirun".to_string(), "-n".into(), num_ranks.to_string()];
    if is_open_mpi() {
        let flags = "--allow-run-as-root --oversubscribe --bind-to none";
        words.extend(flags.split(' ').map(str::to_string));
    }
    Some(words)
}

/// `program` as these processes; `None` as above.
pub fn under_mpi(program: Program, (pp, dp, tp): (usize, usize, usize)) -> Option<Program> {
    let words = mpirun(pp * dp * tp)?;
    let program = layout(program, (pp, dp, tp));
    Some(program.under(words).flag("--backend", "mpi"))
}

pub fn layout(program: Program, (pp, dp, tp): (usize, usize, usize)) -> Program {
    let program = program.flag("--pp", pp).flag("--dp", dp);
    program.flag("--tp", tp)
}

#[test]
fn processes_under_mpi_give_the_bits_of_threads() {
    for (dtype, degrees) in [("f32", (2, 1, 2)), ("f32", (1, 3, 1)), ("bf16", (2, 2, 1))] {
        let (here, there) = (Workspace::new(), Workspace::new());
        let metrics = |workspace: &Workspace| workspace.path("metrics.jsonl");
        let program = |workspace: &Workspace| {
            let metrics = metrics(workspace);
            let program = workspace.finetune().flag("--dtype", dtype);
            let program = program.flag("--global-batch-size", 6);
            // Two stages a rank where there is a pipeline.
            let program = match degrees.0 {
                1 => program,
                _ => program.flag("--schedule", "zbv"),
            };
            program.flag("--metrics", metrics.display())
        };
        let Some(processes) = under_mpi(program(&there), degrees) else {
            return;
        };
        layout(program(&here), degrees).succeeds();
        let outcome = processes.succeeds();
        let what = format!("{dtype} {degrees:?}");
        assert!(outcome.stdout.contains("as processes over mpi"), "{what}");
        assert_eq!(outcome.stdout.matches("saved to").count(), 1, "{what}");
        let weights =
            |workspace: &Workspace| fs::read(workspace.output().join("model.safetensors")).unwrap();
        assert!(weights(&here) == weights(&there), "{what}");
        let losses = |workspace: &Workspace| -> Vec<String> {
            let lines = fs::read_to_string(metrics(workspace)).unwrap();
            let lines = lines
                .lines()
                .map(|line| line.split("\"learning_rate\"").next());
            lines.map(|line| line.unwrap().to_string()).collect()
        };
        assert_eq!(losses(&here), losses(&there), "{what}");
    }
}

#[test]
fn processes_that_share_sequences_give_the_bits_of_threads() {
    for flags in [
        &[("--cp", "2"), ("--cp-method", "ring"), ("--tp", "2")][..],
        &[("--cp", "4"), ("--ulysses", "2"), ("--tp", "1")],
        &[
            ("--cp", "2"),
            ("--cp-method", "all-gather"),
            ("--dp", "2"),
            ("--tp", "1"),
        ],
    ] {
        let program = |workspace: &Workspace| {
            let program = workspace.finetune().without("--tp").without("--dp");
            let program = program.without("--pp").flag("--seq-len", 37);
            program.flags(flags)
        };
        let (here, there) = (Workspace::new(), Workspace::new());
        let Some(words) = mpirun(4) else {
            return;
        };
        let program_there = program(&there).under(words).flag("--backend", "mpi");
        program_there.succeeds();
        program(&here).succeeds();
        let weights =
            |workspace: &Workspace| fs::read(workspace.output().join("model.safetensors")).unwrap();
        assert!(weights(&here) == weights(&there), "{flags:?}");
    }
}

/// What went wrong must be in the output, in a line of its own, and nothing saved.
#[track_caller]
pub fn assert_failed(outcome: &Outcome, parts: &[&str]) {
    assert_ne!(outcome.code, Some(0), "{}", outcome.stderr);
    outcome.says(parts);
}

#[test]
fn another_number_of_processes_than_ranks_is_refused() {
    let workspace = Workspace::new();
    let Some(words) = mpirun(2) else { return };
    let outcome = workspace.finetune().flag("--dp", 2).under(words).run();
    assert_failed(
        &outcome,
        &[
            "pp(2) * dp(2) * cp(1) * tp(2) = 8 ranks",
            "started 2 processes",
        ],
    );
    workspace.assert_output_is_untouched();
}

#[test]
fn processes_that_are_left_are_replicas() {
    let workspace = Workspace::new();
    let Some(words) = mpirun(4) else { return };
    let program = workspace.finetune().flag("--pp", 1).under(words);
    let outcome = program.succeeds();
    outcome.prints(&["pp 1 x dp 2 x tp 2"]);
}

#[test]
fn ranks_with_other_flags_or_other_data_are_refused_with_the_difference() {
    for (name, value, says) in [
        ("--lr", "0.5", "--lr is 0.5, expected 0.001 as on rank 0"),
        ("--data", "other.txt", "the tokens of --data is"),
        ("--model", "other", "config.json of --model is"),
    ] {
        let workspace = Workspace::new();
        let Some(mut words) = mpirun(1) else { return };
        let text = fs::read(workspace.path("text.txt")).unwrap();
        fs::write(workspace.path("other.txt"), &text[1..]).unwrap();
        super::folder::copy_folder(&workspace.path("model"), &workspace.path("other"));
        super::folder::edit_json(&workspace.path("other/config.json"), |config| {
            config["rms_norm_eps"] = 0.125.into();
        });
        let program = layout(workspace.finetune(), (1, 2, 1));
        words.extend(program.words());
        words.extend([":", "-n", "1"].map(str::to_string));
        let value = match name {
            "--lr" => value.to_string(),
            _ => workspace.path(value).display().to_string(),
        };
        let outcome = program.under(words).flag(name, value).run();
        assert_failed(&outcome, &["the run cannot start: rank 1", says]);
        workspace.assert_output_is_untouched();
    }
}

/// Kills rank 2 of 4 as soon as `is_time` says so of the run's stderr: within 10 s all others must have said which rank died
/// where, and ended.
#[track_caller]
fn assert_a_killed_rank_is_named(
    workspace: &Workspace,
    program: &Program,
    is_time: impl Fn(&str) -> bool,
) -> Outcome {
    let mut killed = None;
    let outcome = program.run_and(|stderr| {
        if killed.is_none() && is_time(stderr) {
            let rank = workspace.process_of_rank(2).expect("the rank's process");
            let status = Command::new("kill")
                .args(["-9", &rank.to_string()])
                .status();
            assert!(status.unwrap().success());
            killed = Some(Instant::now());
        }
    });
    let took = killed.expect("the time came").elapsed();
    assert!(took < Duration::from_secs(10), "{took:?}");
    let said = ["rank 2 on host", "died", "its last operation", "; step "];
    assert_failed(&outcome, &said);
    for other in [0, 1, 3] {
        let says = format!("rank {other} on host");
        assert!(
            outcome.stderr.contains(&says),
            "{says:?} is not in: {}",
            outcome.stderr
        );
    }
    outcome
}

#[test]
fn a_rank_killed_in_training_is_named_with_its_last_operation_and_step() {
    let workspace = Workspace::new();
    let program = workspace.finetune().flag("--steps", 100_000);
    let Some(program) = under_mpi(program, (1, 2, 2)) else {
        return;
    };
    assert_a_killed_rank_is_named(&workspace, &program, |stderr| stderr.contains("step 1/"));
    workspace.assert_output_is_untouched();
}

/// The phases of a step beside its passes are short: it is killed in one of these sooner or later.
#[test]
fn a_rank_of_a_pipeline_is_named_with_the_pass_in_which_it_was_killed() {
    let mut said = Vec::new();
    for _ in 0..4 {
        let workspace = Workspace::new();
        let program = workspace.finetune().flag("--schedule", "zb-h1");
        let program = program
            .flag("--global-batch-size", 48)
            .flag("--seq-len", 64);
        let Some(program) = under_mpi(program.flag("--steps", 100_000), (4, 1, 1)) else {
            return;
        };
        let is_time = |stderr: &str| stderr.contains("step 1/");
        let stderr = assert_a_killed_rank_is_named(&workspace, &program, is_time).stderr;
        // Such as `; step 2, input gradient of micro-batch 7 in stage 2`.
        let is_of_pass =
            |line: &str| line.contains(" of micro-batch ") && line.contains(" in stage 2");
        if stderr
            .lines()
            .any(|line| line.contains("; step ") && is_of_pass(line))
        {
            return;
        }
        said.push(stderr);
    }
    panic!("no pass was named: {said:?}");
}

#[test]
fn a_rank_killed_in_a_save_is_named_and_the_earlier_checkpoint_stays() {
    let workspace = Workspace::new();
    // 60 million weights, so that there is time.
    let program = candle_train("pretrain")
        .flag("--data", workspace.path("text.txt").display())
        .flag("--output", workspace.output().display())
        .switch("--overwrite")
        .flag("--tokenizer", workspace.path("model").display())
        .flag("--steps", 0)
        .flag("--sample-tokens", 0)
        .flag("--hidden-size", 1024)
        .flag("--intermediate-size", 4096)
        .flag("--layers", 4)
        .flag("--heads", 8);
    let Some(program) = under_mpi(program, (2, 1, 2)) else {
        return;
    };
    let is_saving = |_: &str| {
        let files = fs::read_dir(workspace.path(".output.saving")).into_iter();
        let files = files.flatten().flatten();
        let lens = files.filter_map(|file| Some(file.metadata().ok()?.len()));
        lens.max().is_some_and(|len| len > 8 << 20)
    };
    let outcome = assert_a_killed_rank_is_named(&workspace, &program, is_saving);
    outcome.says(&["after training"]);
    workspace.assert_output_is_untouched();
    // The next run removes what this one has left.
    workspace.finetune().succeeds();
    let left = super::folder::names(&workspace.path(""));
    assert_eq!(left, ["model", "output", "text.txt"]);
}

#[test]
fn what_keeps_all_processes_from_starting_is_said_once() {
    let workspace = Workspace::new();
    for (program, error) in [
        (
            workspace
                .finetune()
                .flag("--data", "nowhere.txt")
                .flag("--global-batch-size", 6),
            "nowhere.txt",
        ),
        (workspace.finetune().flag("--lr", "x"), "--lr"),
        (
            workspace.finetune().flag("--global-batch-size", 7),
            "global_batch_size(7)",
        ),
    ] {
        let Some(program) = under_mpi(program, (1, 3, 1)) else {
            return;
        };
        let stderr = program.run().stderr;
        stderr.assert_has(&[error]);
        assert_eq!(stderr.matches("error: ").count(), 1, "{stderr}");
        for words in ["failed", "ranks 0", "stops: "] {
            assert!(!stderr.contains(words), "{stderr}");
        }
    }
}

#[test]
fn what_one_process_finds_before_they_meet_is_said_with_its_rank() {
    let workspace = Workspace::new();
    let layout_of = |program| layout(program, (1, 3, 1)).flag("--backend", "mpi");
    let program = workspace.finetune().flag("--global-batch-size", 6);
    let (right, wrong) = (program.clone(), program);
    let wrong = layout_of(wrong.flag("--data", "nowhere.txt"));
    let Some(mut words) = mpirun(1) else { return };
    words.extend(layout_of(right).words());
    words.extend([":", "-n", "2"].map(str::to_string));
    let stderr = wrong.under(words).run().stderr;
    // By rank 0, and by these, which may be on other hosts.
    let said = "error: the run cannot start: ranks 1, 2: cannot open data";
    assert_eq!(stderr.matches(said).count(), 3, "{stderr}");
    assert_eq!(stderr.matches("error: ").count(), 3, "{stderr}");
}

/// The words of a launcher that starts ranks through mpirun.
fn launch(options: &str) -> Vec<String> {
    let words = [env!("CARGO_BIN_EXE_candle-train"), "launch"].into_iter();
    let words = words.chain(options.split(' '));
    words.map(str::to_string).collect()
}

#[test]
fn the_last_line_of_a_launcher_names_the_rank_that_was_silent() {
    if mpirun_version().is_none() {
        return eprintln!("not tested: there is no mpirun");
    }
    let workspace = Workspace::new();
    let program = workspace.finetune().flag("--steps", 100_000);
    let program = layout(program, (1, 2, 1)).flag("--rank-timeout", 2);
    let program = program.under(launch("--nproc-per-node 2 --grace-secs 1"));
    let mut stopped = None;
    let outcome = program.run_and(|stderr| {
        if stopped.is_none() && stderr.contains("step 1/") {
            let rank = workspace.process_of_rank(1).expect("the rank's process");
            nix::sys::signal::kill(rank, nix::sys::signal::Signal::SIGSTOP).unwrap();
            stopped = Some(rank);
        }
    });
    let last = outcome.stderr.lines().last().unwrap_or_default();
    assert!(
        last.starts_with("candle-train: rank 1 on host ") && last.contains("has not been heard of"),
        "{}",
        outcome.stderr
    );
    assert_eq!(outcome.code, Some(85), "{}", outcome.stderr);
}

#[test]
fn what_processes_find_before_the_first_step_is_not_tried_again() {
    if mpirun_version().is_none() {
        return eprintln!("not tested: there is no mpirun");
    }
    let workspace = Workspace::new();
    let program = layout(workspace.finetune(), (1, 2, 1));
    let program = program.under(launch("--nproc-per-node 2 --max-restarts 2"));
    let curves = workspace.path("text.txt/curves");
    for (program, error) in [
        (
            program.clone().flag("--tensorboard", curves.display()),
            "cannot write TensorBoard's events",
        ),
        (
            program.flag("--freeze", "nothing.has.this.name"),
            "nothing.has.this.name",
        ),
    ] {
        let outcome = program.run().exited(2);
        outcome.says(&[error]);
        assert!(!outcome.stderr.contains("; restart "), "{}", outcome.stderr);
    }
    workspace.assert_output_is_untouched();
}

#[test]
fn ranks_killed_under_a_launcher_that_restarts_leave_the_bits_of_threads() {
    let (here, there) = (Workspace::new(), Workspace::new());
    let path = there.path("metrics.jsonl");
    let program = there.finetune().flag("--steps", 60);
    let program = program.flag("--metrics", path.display());
    let program = program.flag("--save-every", 1);
    let program = program.flag("--save-dir", there.path("saves").display());
    let Some(mpirun) = mpirun(4) else { return };
    let launcher = [env!("CARGO_BIN_EXE_candle-train"), "launch"];
    let options = ["--nproc-per-node", "1", "--max-restarts", "3"];
    let words = launcher.iter().chain(&options).map(|word| word.to_string());
    let program = layout(program, (1, 2, 2)).flag("--backend", "mpi");
    let program = program.under(words.chain(mpirun).collect());
    let rank = |number: usize| there.process_of_rank([0, 2, 3][number]);
    super::restart::killed(&program, 3, rank).exited(0);
    layout(here.finetune(), (1, 2, 2))
        .flag("--steps", 60)
        .succeeds();
    let weights =
        |workspace: &Workspace| fs::read(workspace.output().join("model.safetensors")).unwrap();
    assert!(weights(&here) == weights(&there));
    let steps = super::training::metrics(&path).into_iter();
    let steps: Vec<u64> = steps.map(|step| step["step"].as_u64().unwrap()).collect();
    assert!(steps.iter().copied().eq(0..60), "{steps:?}");
}

/// The launcher finds out by itself that the ranks speak MPI.
#[test]
fn the_launcher_starts_ranks_through_mpirun_by_itself() {
    if mpirun_version().is_none() {
        return eprintln!("not tested: there is no mpirun");
    }
    let launcher = |options: &str| {
        let words = [env!("CARGO_BIN_EXE_candle-train"), "launch"].into_iter();
        let words = words.chain(options.split(' '));
        words.map(str::to_string).collect::<Vec<_>>()
    };
    let (here, there) = (Workspace::new(), Workspace::new());
    let degrees = (1, 2, 2);
    layout(here.finetune(), degrees).succeeds();
    let program = layout(there.finetune(), degrees).under(launcher("--nproc-per-node 4"));
    let outcome = program.succeeds();
    outcome.prints(&["[rank 0] ", "over mpi"]);
    let weights =
        |workspace: &Workspace| fs::read(workspace.output().join("model.safetensors")).unwrap();
    assert!(weights(&here) == weights(&there));

    let wrong = layout(there.finetune(), (1, 3, 2)).under(launcher("--nproc-per-node 4"));
    let stderr = wrong.run().stderr;
    stderr.assert_has(&["started 4 processes"]);

    let path = there.path("metrics.jsonl");
    let program = program.flag("--steps", 60).flag("--save-every", 1);
    let program = program.flag("--save-dir", there.path("saves").display());
    let program = program.flag("--metrics", path.display());
    let program = program.under(launcher("--nproc-per-node 4 --max-restarts 2"));
    let rank = |number: usize| there.process_of_rank([0, 3][number]);
    let outcome = super::restart::killed(&program, 2, rank).exited(0);
    outcome.says(&["rank 0 (host ", "rank 3 (host "]);
    layout(here.finetune(), degrees)
        .flag("--steps", 60)
        .succeeds();
    assert!(weights(&here) == weights(&there));
    let steps = super::training::metrics(&path).into_iter();
    let steps: Vec<u64> = steps.map(|step| step["step"].as_u64().unwrap()).collect();
    assert!(steps.iter().copied().eq(0..60), "{steps:?}");
}

#[test]
fn a_signal_to_one_rank_stops_all_after_the_same_step() {
    let signals = [("TERM", 2), ("INT", 0), ("USR1", 3)];
    for (signal, rank) in signals {
        let workspace = Workspace::new();
        let path = workspace.path("metrics.jsonl");
        // The learning rate does not depend on the number of steps.
        let program = workspace
            .finetune()
            .flag("--metrics", path.display())
            .flag("--min-lr-ratio", 1)
            .flag("--warmup-steps", 0);
        let long = program.clone().flag("--steps", 100_000);
        let Some(long) = under_mpi(long, (1, 2, 2)) else {
            return;
        };
        let mut sent = false;
        let outcome = long.run_and(|stderr| {
            if !sent && stderr.contains("step 1/") {
                let rank = workspace.process_of_rank(rank).expect("the rank's process");
                let pid = rank.to_string();
                let status = Command::new("kill").args(["-s", signal, &pid]).status();
                sent = status.unwrap().success();
            }
        });
        // That of the rank which was told.
        assert!(
            outcome.code > Some(128),
            "{:?} {}",
            outcome.code,
            outcome.stderr
        );
        let lines = fs::read_to_string(path).unwrap();
        let step = lines.lines().count();
        let why = match rank {
            0 => "SIGINT",
            _ => "a signal to another rank",
        };
        let said = format!("stopped after step {step} of 100000 by {why}; ");
        assert!(
            outcome.stdout.contains(&said),
            "{said:?}: {}",
            outcome.stdout
        );
        let weights = || fs::read(workspace.output().join("model.safetensors")).unwrap();
        let stopped = weights();
        layout(program, (1, 2, 2)).flag("--steps", step).succeeds();
        assert!(weights() == stopped);
    }
}
