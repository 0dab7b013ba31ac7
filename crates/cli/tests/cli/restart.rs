//! Training whose launcher starts it again: it goes on where it was.

use std::fs;
use std::path::{Path, PathBuf};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::folder::{Tensors, read_checkpoint};
use super::program::{Outcome, Program};
use super::training::{metrics, without_times};
use super::workspace::Workspace;

/// Many steps, and their metrics.
fn run(workspace: &Workspace) -> (Program, PathBuf) {
    let path = workspace.path("metrics.jsonl");
    let program = workspace.finetune().flag("--steps", 60);
    (program.flag("--metrics", path.display()), path)
}

fn saving(program: Program, dir: &Path) -> Program {
    let program = program.flag("--save-every", 1);
    program.flag("--save-dir", dir.display())
}

/// What an uninterrupted run ends with.
fn whole(program: &Program, path: &Path, workspace: &Workspace) -> (Tensors, String) {
    program.succeeds();
    let numbers = numbers(path);
    fs::remove_file(path).unwrap();
    (read_checkpoint(&workspace.output()), numbers)
}

fn numbers(path: &Path) -> String {
    format!("{:?}", without_times(metrics(path)))
}

/// The words of a launcher that starts one process `max_restarts` times again.
fn launcher(max_restarts: usize) -> Vec<String> {
    let binary = env!("CARGO_BIN_EXE_candle-train");
    let words = [binary, "launch", "--nproc-per-node", "1", "--max-restarts"];
    let words = words.map(str::to_string).into_iter();
    words.chain([max_restarts.to_string()]).collect()
}

/// Kills a process that `find` gives as soon as there are steps, each time that the ranks are started, `times` times.
#[track_caller]
pub fn killed(program: &Program, times: usize, find: impl Fn(usize) -> Option<Pid>) -> Outcome {
    let mut num_killed = 0;
    let outcome = program.run_and(|stderr| {
        let starts: Vec<&str> = stderr.split("; restart ").collect();
        let is_due = num_killed < times && starts.len() == num_killed + 1;
        if is_due
            && starts[num_killed].contains(" loss ")
            && let Some(pid) = find(num_killed)
        {
            kill(pid, Signal::SIGKILL).unwrap();
            num_killed += 1;
        }
    });
    assert_eq!(num_killed, times, "{}", outcome.stderr);
    outcome
}

#[test]
fn a_rank_killed_three_times_leaves_the_bits_of_a_run_that_was_not() {
    let workspace = Workspace::new();
    let (program, path) = run(&workspace);
    let (want, want_numbers) = whole(&program, &path, &workspace);
    let program = saving(program, &workspace.path("saves")).under(launcher(3));
    let outcome = killed(&program, 3, |_| workspace.process_of_rank(0)).exited(0);
    for number in 1..=3 {
        let said = format!("failed first: killed by SIGKILL; restart {number} of 3\n");
        outcome.says(&[&said]);
    }
    // A kill may come before the first checkpoint.
    let resumed = outcome.stdout.matches("resumed after step ").count();
    let begun = outcome.stdout.matches("no checkpoint in ").count();
    assert_eq!(resumed + begun, 3, "{}", outcome.stdout);
    assert!(read_checkpoint(&workspace.output()) == want);
    assert_eq!(numbers(&path), want_numbers);
}

#[test]
fn without_checkpoints_it_begins_again() {
    let workspace = Workspace::new();
    let (program, path) = run(&workspace);
    let (want, want_numbers) = whole(&program, &path, &workspace);
    let outcome = killed(&program.under(launcher(1)), 1, |_| {
        workspace.process_of_rank(0)
    })
    .exited(0);
    outcome.prints(&["no checkpoint as there is no --save-dir: the run begins\n"]);
    assert!(read_checkpoint(&workspace.output()) == want);
    assert_eq!(numbers(&path), want_numbers);
}

#[test]
fn the_checkpoint_that_was_named_counts_until_there_is_a_newer_one() {
    let workspace = Workspace::new();
    let (program, path) = run(&workspace);
    let saves = workspace.path("saves");
    let (want, want_numbers) = whole(&saving(program.clone(), &saves), &path, &workspace);
    let named = saves.join("step-000059");
    let program = program.flag("--resume", named.display());
    // What the launcher tells the ranks.
    let program = program.variable("CANDLE_TRAIN_RESTART_COUNT", 1);
    let said = |outcome: &Outcome, dir: &Path, step: usize| {
        let line = format!("resumed after step {step} from {}\n", dir.display());
        outcome.prints(&[&line]);
    };
    said(&program.succeeds(), &named, 59);
    let again = saving(program, &workspace.path("again"));
    said(&again.succeeds(), &named, 59);
    said(&again.succeeds(), &workspace.path("again/step-000060"), 60);
    assert!(read_checkpoint(&workspace.output()) == want);
    let last = want_numbers.rsplit_once("step\": ").map(|(_, last)| last);
    assert!(numbers(&path).ends_with(last.unwrap()));
}

#[test]
fn what_keeps_all_ranks_from_starting_is_said_by_the_first() {
    let workspace = Workspace::new();
    for (flag, value) in [("--data", "nowhere.txt"), ("--lr", "x")] {
        let program = workspace.finetune().without("--tp").without("--pp");
        // Without that each of mpirun's ranks warns of it.
        let program = program.variable("CANDLE_NUM_THREADS", 1);
        let program = program.flag("--dp", 3).flag(flag, value);
        let launcher = [env!("CARGO_BIN_EXE_candle-train"), "launch"];
        let words = launcher.iter().chain(&["--nproc-per-node", "3"]);
        let outcome = program
            .under(words.map(ToString::to_string).collect())
            .run()
            .exited(2);
        let said = |words| outcome.stderr.matches(words).count();
        assert_eq!(
            (said("[rank 0] error: "), said("[rank")),
            (1, said("[rank 0]")),
            "{}",
            outcome.stderr
        );
        assert_eq!(
            said("all 3 ranks failed: exit code 2\n"),
            1,
            "{}",
            outcome.stderr
        );
    }
}

#[test]
fn what_is_wrong_from_the_beginning_is_said_once_and_not_tried_again() {
    let workspace = Workspace::new();
    let (program, _) = run(&workspace);
    let saves = workspace.path("saves");
    let program = program.flag("--steps", 2);
    let fresh = program.clone();
    let program = saving(program, &saves);
    program.succeeds();
    let diverging = program.clone().without("--save-every");
    let diverging = diverging.without("--save-dir").flag("--lr", 1e30);
    let newer = saves.join("step-000003");
    let curves = workspace.path("text.txt/curves");
    for (program, error) in [
        (
            fresh.clone().flag("--data", "nowhere.txt"),
            "nowhere.txt".to_string(),
        ),
        (program.clone().flag("--lr", "x"), "--lr".to_string()),
        (
            fresh.clone().flag("--freeze", "nothing.has.this.name"),
            "nothing.has.this.name".to_string(),
        ),
        (program.clone(), "is a checkpoint already".to_string()),
        (
            fresh.clone().flag("--tensorboard", curves.display()),
            "cannot write TensorBoard's events".to_string(),
        ),
        (
            program.flag("--resume", newer.display()),
            newer.display().to_string(),
        ),
        (diverging.flag("--steps", 6), "step 2 failed".to_string()),
    ] {
        let alone = program.run().exited(2);
        // Nobody is blamed for what all ranks find.
        assert!(!alone.stderr.contains("rank 0 failed"), "{}", alone.stderr);
        let outcome = program.under(launcher(3)).run().exited(2);
        outcome.says(&[&error]);
        let said = "the ranks are not started again: exit code 2 means that it would fail again\n";
        outcome.says(&[said]);
    }
}
