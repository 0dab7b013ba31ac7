//! Servers that hold the parameters, and workers that compute gradients: threads and processes.

use std::fs;
use std::path::{Path, PathBuf};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::folder::{names, read_checkpoint};
use super::program::{AssertText, Outcome, Program};
use super::training::{metrics, without_times};
use super::workspace::Workspace;

/// Some steps of data-parallel replicas, and their metrics.
fn replicas(workspace: &Workspace, dp: usize) -> (Program, PathBuf) {
    let path = workspace.path("metrics.jsonl");
    let program = workspace.finetune().without("--tp").without("--pp");
    let program = program.flag("--dp", dp).flag("--steps", 6);
    let program = program.flag("--global-batch-size", 6);
    (program.flag("--metrics", path.display()), path)
}

/// The same with servers besides.
fn with_servers(program: Program, num_servers: usize) -> Program {
    let program = program.flag("--strategy", "parameter-server");
    program.flag("--servers", num_servers)
}

/// As processes of this host.
fn as_processes(program: Program, num_ranks: usize) -> Program {
    let binary = env!("CARGO_BIN_EXE_candle-train");
    let words = [binary, "launch", "--nproc-per-node"];
    let words = words.map(str::to_string).into_iter();
    program.under(words.chain([num_ranks.to_string()]).collect())
}

/// What each step says of itself, of which the bits count, and its norm, whose sum has another order where others divide it.
fn numbers(path: &Path) -> (Vec<[String; 3]>, Vec<f64>) {
    let lines = metrics(path);
    let names = ["loss", "learning_rate", "num_tokens"];
    let numbers = lines
        .iter()
        .map(|line| names.map(|name| line[name].to_string()));
    let norms = lines.iter().map(|line| line["grad_norm"].as_f64().unwrap());
    (numbers.collect(), norms.collect())
}

fn losses(path: &Path) -> Vec<f64> {
    let lines = metrics(path);
    lines
        .iter()
        .map(|line| line["loss"].as_f64().unwrap())
        .collect()
}

fn weights(workspace: &Workspace) -> Vec<u8> {
    fs::read(workspace.output().join("model.safetensors")).unwrap()
}

#[test]
fn synchronous_servers_give_the_bits_of_data_parallelism() {
    for (dp, dtype) in [(2, "f32"), (3, "bf16"), (2, "f16")] {
        let reference = Workspace::new();
        let (program, path) = replicas(&reference, dp);
        program.flag("--zero", 0).flag("--dtype", dtype).succeeds();
        let expected = numbers(&path);
        for (num_servers, processes) in [(1, false), (2, false), (3, true)] {
            let workspace = Workspace::new();
            let (program, path) = replicas(&workspace, dp);
            let mut program = with_servers(program, num_servers).flag("--dtype", dtype);
            if processes {
                program = as_processes(program, dp + num_servers).without("--dp");
            }
            let outcome = program.succeeds();
            let what = format!("{dp} workers, {num_servers} servers, {dtype}");
            outcome.prints(&["synchronous"]);
            let (numbers, norms) = numbers(&path);
            assert_eq!(numbers, expected.0, "{what}");
            for (norm, expected) in norms.iter().zip(&expected.1) {
                assert!(
                    (norm - expected).abs() <= 1e-13 * expected,
                    "{what}: {norm} {expected}"
                );
            }
            assert!(weights(&workspace) == weights(&reference), "{what}");
        }
    }
}

#[test]
fn what_servers_and_workers_keep_in_files_changes_no_bit() {
    let reference = Workspace::new();
    let (program, path) = replicas(&reference, 2);
    with_servers(program, 2).flag("--dtype", "bf16").succeeds();
    let expected = numbers(&path);
    for offload in ["optimizer", "gradients", "params", "all"] {
        let workspace = Workspace::new();
        let (program, path) = replicas(&workspace, 2);
        let program = with_servers(program, 2).flag("--dtype", "bf16");
        let program = program.flag("--offload", offload);
        let folder = workspace.path("");
        program.flag("--offload-dir", folder.display()).succeeds();
        assert_eq!(numbers(&path), expected, "{offload}");
        assert!(weights(&workspace) == weights(&reference), "{offload}");
    }
}

#[test]
fn asynchronous_workers_are_as_far_ahead_as_they_may() {
    let workspace = Workspace::new();
    let (program, path) = replicas(&workspace, 2);
    with_servers(program, 2).flag("--steps", 12).succeeds();
    let synchronous = losses(&path);
    assert!(synchronous[11] < 0.96 * synchronous[0], "{synchronous:?}");
    for (max_staleness, processes) in [(0, false), (2, false), (1, true)] {
        let workspace = Workspace::new();
        let (program, path) = replicas(&workspace, 2);
        let mut program = with_servers(program, 2)
            .switch("--async")
            .flag("--steps", 12);
        program = program.flag("--max-staleness", max_staleness);
        if processes {
            program = as_processes(program, 4);
        }
        program.succeeds();
        let lines = metrics(&path);
        assert_eq!(lines.len(), 12);
        for line in &lines {
            let staleness = &line["staleness"];
            let (mean, max) = (
                staleness["mean"].as_f64().unwrap(),
                staleness["max"].as_u64(),
            );
            let max = max.unwrap();
            assert!(max <= max_staleness && mean <= max as f64, "{line:?}");
        }
        // As far as the synchronous run is, over the last steps.
        let of_last = |losses: Vec<f64>| losses[8..].iter().sum::<f64>() / 4.0;
        let (last, expected) = (of_last(losses(&path)), of_last(synchronous.clone()));
        assert!(
            (last - expected).abs() < 0.05 * expected,
            "{last}, expected {expected}"
        );
    }
}

#[test]
fn a_run_with_servers_resumes_with_and_without_them() {
    let workspace = Workspace::new();
    let (program, path) = replicas(&workspace, 2);
    program.flag("--zero", 0).succeeds();
    let (expected, whole) = (
        without_times(metrics(&path)),
        read_checkpoint(&workspace.output()),
    );
    let evaluated = |program: Program| {
        let program = program.flag("--eval-data", workspace.short_text().display());
        program.flag("--eval-every", 3)
    };
    let saving = |program: Program| {
        let dir = workspace.path("checkpoints");
        let program = program.flag("--save-dir", dir.display());
        program.flag("--save-every", 3).flag("--keep", 5)
    };
    let outcome = evaluated(saving(with_servers(replicas(&workspace, 2).0, 2))).succeeds();
    outcome.says(&["eval"]);
    assert!(read_checkpoint(&workspace.output()) == whole);
    fs::remove_dir_all(workspace.path("checkpoints/step-000006")).unwrap();
    for num_servers in [1, 0, 2] {
        let (program, path) = replicas(&workspace, 2);
        let program = match num_servers {
            0 => program.flag("--zero", 0),
            _ => with_servers(program, num_servers),
        };
        let dir = workspace.path("checkpoints/step-000003");
        program.flag("--resume", dir.display()).succeeds();
        assert!(
            read_checkpoint(&workspace.output()) == whole,
            "{num_servers}"
        );
        let resumed = without_times(metrics(&path));
        let resumed = &resumed[resumed.len() - 3..];
        for (line, expected) in resumed.iter().zip(&expected[3..]) {
            assert_eq!(
                (&line["step"], &line["loss"]),
                (&expected["step"], &expected["loss"])
            );
        }
    }
}

#[test]
fn adapters_are_trained_by_servers() {
    let lora = |program: Program| program.flag("--lora-rank", 2).flag("--lora-dropout", 0.1);
    let (reference, workspace) = (Workspace::new(), Workspace::new());
    lora(replicas(&reference, 2).0.flag("--zero", 0)).succeeds();
    lora(with_servers(replicas(&workspace, 2).0, 2)).succeeds();
    let adapters = |workspace: &Workspace| {
        fs::read(workspace.output().join("adapter_model.safetensors")).unwrap()
    };
    assert!(adapters(&reference) == adapters(&workspace));
}

/// Runs 1 server and 3 workers as processes, kills a rank when there are steps, and returns how that ended.
fn with_a_death(
    workspace: &Workspace,
    rank: usize,
    change: impl Fn(Program) -> Program,
) -> Outcome {
    let (program, _) = replicas(workspace, 3);
    let program = change(with_servers(program, 1).flag("--steps", 400));
    let options = "--nproc-per-node 4 --may-lose 1";
    signalled(workspace, &program, options, (rank, Signal::SIGKILL))
}

/// Runs it with these options of the launcher, and sends a rank a signal when there are steps.
fn signalled(
    workspace: &Workspace,
    program: &Program,
    options: &str,
    (rank, signal): (usize, Signal),
) -> Outcome {
    let words = [env!("CARGO_BIN_EXE_candle-train"), "launch"].into_iter();
    let words = words.chain(options.split(' ')).map(str::to_string);
    let program = program.clone().under(words.collect());
    let mut is_sent = false;
    let outcome = program.run_and(|stderr| {
        if !is_sent
            && stderr.contains(" loss ")
            && let Some(pid) = workspace.process_of_rank(rank)
        {
            kill(pid, signal).unwrap();
            is_sent = true;
        }
    });
    assert!(is_sent);
    outcome
}

/// Workers are not connected with each other, so all but the servers have heard of it by these only.
#[test]
fn a_rank_that_is_stopped_is_named_last_whoever_ends_first() {
    for (rank, num_servers, is_async) in [(1, 1, false), (2, 2, false), (1, 2, true)] {
        let workspace = Workspace::new();
        let (program, _) = replicas(&workspace, 2);
        let program = with_servers(program, num_servers).flag("--steps", 100_000);
        let program = program.flag("--rank-timeout", 2);
        let program = if is_async {
            program.switch("--async")
        } else {
            program
        };
        let options = format!("--nproc-per-node {} --grace-secs 1", 2 + num_servers);
        let outcome = signalled(&workspace, &program, &options, (rank, Signal::SIGSTOP)).exited(85);
        let last = outcome.stderr.lines().last().unwrap_or_default();
        let said = format!(
            "candle-train: rank {rank} is gone: nothing was heard of it for 2 s (says rank "
        );
        assert!(last.starts_with(&said), "{}", outcome.stderr);
    }
}

#[test]
fn an_asynchronous_run_goes_on_without_a_worker_that_is_killed() {
    let workspace = Workspace::new();
    let outcome = with_a_death(&workspace, 2, |program| program.switch("--async")).exited(0);
    outcome.says(&[
        "rank 2 (host ",
        "failed: killed by SIGKILL; the others go on, as --may-lose says",
        "rank 2 is gone: it died: its connection closed without a farewell; the run goes on without it and its samples, with 2 of 3 workers",
    ]);
    outcome.prints(&["saved to"]);
    let lines = metrics(&workspace.path("metrics.jsonl"));
    assert_eq!(lines.len(), 400);
    // Of three workers two are left at the end.
    let num_tokens =
        |line: &serde_json::Map<String, serde_json::Value>| line["num_tokens"].as_u64().unwrap();
    assert!(lines.iter().rev().take(50).map(num_tokens).sum::<u64>() < 50 * 96);
}

#[test]
fn without_a_server_or_without_async_a_death_ends_the_run_and_is_named() {
    for (rank, is_async) in [(2, false), (0, true)] {
        let workspace = Workspace::new();
        let outcome = with_a_death(&workspace, rank, |program| match is_async {
            true => program.switch("--async"),
            false => program,
        })
        .exited(137);
        let cause = format!("candle-train: rank {rank} (host ");
        let last = outcome.stderr.rfind(&cause).map(|at| &outcome.stderr[at..]);
        assert!(
            last.is_some_and(|last| last.contains("failed first: killed by SIGKILL")),
            "{}",
            outcome.stderr
        );
        workspace.assert_output_is_untouched();
    }
}

#[test]
fn a_signal_stops_all_ranks_and_leaves_a_checkpoint_to_go_on_from() {
    for (is_async, processes) in [(false, false), (true, false), (false, true), (true, true)] {
        let workspace = Workspace::new();
        let dir = workspace.path("saves");
        let (program, _) = replicas(&workspace, 2);
        let mut program = with_servers(program, 2).flag("--save-dir", dir.display());
        program = program.flag("--save-every", 100_000);
        if is_async {
            program = program.switch("--async");
        }
        let run = match processes {
            false => program.clone(),
            true => as_processes(program.clone(), 4),
        };
        let mut is_told = false;
        let outcome = run.flag("--steps", 100_000).run_and_pid(|stderr, pid| {
            if !is_told && stderr.contains(" loss ") {
                kill(Pid::from_raw(pid as i32), Signal::SIGINT).unwrap();
                is_told = true;
            }
        });
        let what = format!("async {is_async}, processes {processes}");
        assert_eq!(outcome.code, Some(130), "{what}: {}", outcome.stderr);
        let saved = names(&dir)
            .into_iter()
            .find(|name| name.starts_with("step-"));
        let step: usize = saved.unwrap()["step-".len()..].parse().unwrap();
        let program = program.flag("--steps", step + 3).switch("--resume-anyway");
        let said = format!("resumed after step {step} from ");
        let resumed = program.flag("--resume", "latest").succeeds_with_warnings();
        assert!(resumed.stdout.contains(&said), "{what}: {}", resumed.stdout);
    }
}

#[test]
fn a_run_that_diverges_saves_what_there_was_whether_workers_wait_or_not() {
    for (is_async, processes) in [(false, false), (true, false), (true, true)] {
        let workspace = Workspace::new();
        let saves = workspace.path("saves");
        let program = with_servers(replicas(&workspace, 2).0, 2).flag("--lr", 1e18);
        let program = program
            .flag("--warmup-steps", 0)
            .flag("--lr-schedule", "constant");
        let mut program = program
            .flag("--save-dir", saves.display())
            .flag("--save-every", 1);
        if is_async {
            program = program.switch("--async").flag("--max-staleness", 0);
        }
        if processes {
            program = as_processes(program, 4);
        }
        let outcome = program.run();
        let what = format!(
            "async {is_async}, processes {processes}: {}",
            outcome.stderr
        );
        assert_eq!(outcome.code, Some(2), "{what}");
        let last = saves.join("step-000001.failed");
        let named = format!("{} has the run as it was then", last.display());
        // The launcher repeats the last lines of a rank, if the first one that ended has written any.
        let by_ranks = outcome.stderr.split("candle-train: ").next().unwrap();
        for said in ["step 2 failed", "hint: a lower learning rate", &named] {
            assert_eq!(by_ranks.matches(said).count(), 1, "{said}: {what}");
        }
        assert!(!names(&last).is_empty(), "{what}");
        workspace.assert_output_is_untouched();
    }
}

/// What is saved where training diverges has gradients of the step that failed.
#[test]
fn a_checkpoint_with_gradients_that_come_again_says_so() {
    let workspace = Workspace::new();
    let saves = workspace.path("saves");
    let program = with_servers(replicas(&workspace, 2).0, 2).switch("--async");
    // No worker is in the step that fails before the first one is over.
    let program = program
        .flag("--max-staleness", 0)
        .flag("--save-dir", saves.display())
        .flag("--save-every", 100);
    let diverging = program
        .clone()
        .flag("--lr", 1e18)
        .flag("--warmup-steps", 0)
        .flag("--lr-schedule", "constant");
    let outcome = diverging.run().exited(2);
    let said = "the checkpoint after step 1 has gradients of later steps, which come again: it cannot be resumed exactly";
    assert_eq!(
        outcome.stderr.matches(said).count(),
        1,
        "{}",
        outcome.stderr
    );
    let manifest = fs::read_to_string(saves.join("step-000001.failed/manifest.json")).unwrap();
    manifest.assert_has(&[r#""repeats_gradients": true"#]);
    let failed = saves.join("step-000001.failed");
    let again = program.flag("--resume", failed.display());
    let again = again.switch("--resume-anyway");
    let outcome = again.run();
    let said = "has gradients of asynchronous workers of steps after 1, which come again";
    assert_eq!(
        outcome.stderr.matches(said).count(),
        1,
        "{}",
        outcome.stderr
    );
}

#[test]
fn servers_write_samples_and_give_the_best_weights() {
    let workspace = Workspace::new();
    let program = with_servers(replicas(&workspace, 2).0, 2);
    let program = program.flag("--sample-tokens", 4).flag("--prompt", "The");
    let program = program.flag("--eval-data", workspace.short_text().display());
    let program = program
        .flag("--eval-every", 1)
        .flag("--patience", 2)
        .flag("--lr", 10);
    let outcome = program.succeeds();
    outcome.prints(&["--- before", "--- after", "saved to"]);
}

#[test]
fn what_does_not_fit_is_refused() {
    let workspace = Workspace::new();
    let program = || with_servers(replicas(&workspace, 2).0, 1);
    for (program, parts) in [
        (
            program().flag("--tp", 2),
            ["--tp 2", "divide the parameters themselves"],
        ),
        (
            program().flag("--pp", 2),
            ["--pp 2", "divide the parameters themselves"],
        ),
        (
            program().flag("--zero", 3),
            ["--zero", "divide the parameters themselves"],
        ),
        (
            program().flag("--backend", "local"),
            ["--backend local", "leave it out"],
        ),
        (
            program().switch("--check-collectives"),
            ["--check-collectives or --half-sums is", "leave it out"],
        ),
        (
            program().flag("--servers", 5000),
            ["--servers 5000 and 2 workers", "more than the 1024 ranks"],
        ),
        (
            program().flag("--max-staleness", 2),
            ["--max-staleness", "without --async"],
        ),
        (
            program().switch("--async").flag("--dtype", "f16"),
            ["f16 needs a loss scale", "bf16 or f32"],
        ),
        (
            replicas(&workspace, 2).0.flag("--servers", 1),
            ["--servers", "without --strategy parameter-server"],
        ),
        (
            replicas(&workspace, 2).0.switch("--async"),
            ["--async", "without --strategy parameter-server"],
        ),
        (
            as_processes(program(), 4),
            [
                "--servers 1 and 2 workers are 3 ranks",
                "started 4 processes",
            ],
        ),
    ] {
        let outcome = program.run();
        assert_ne!(outcome.code, Some(0), "{}", outcome.stdout);
        outcome.says(&parts);
        workspace.assert_output_is_untouched();
    }
}
