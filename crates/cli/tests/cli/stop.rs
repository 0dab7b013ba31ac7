//! Runs that are asked to stop: by signals, by the time.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::folder::{names, read_checkpoint};
use super::program::{Outcome, Program};
use super::workspace::{Workspace, candle_train};

fn long(workspace: &Workspace) -> Program {
    workspace.finetune().flag("--steps", 100_000)
}

/// The step after which the run says that it was stopped, which must be the last one in the metrics.
#[track_caller]
fn stopped_after(workspace: &Workspace, outcome: &Outcome, why: &str) -> usize {
    let last = outcome.stdout.lines().last().unwrap_or_default();
    assert!(
        last.contains(&format!(" of 100000 by {why}; ")),
        "{}",
        outcome.stdout
    );
    let words = last.strip_prefix("stopped after step ").unwrap();
    let step: usize = words.split(' ').next().unwrap().parse().unwrap();
    let metrics = std::fs::read_to_string(workspace.path("metrics.jsonl")).unwrap();
    assert_eq!(metrics.lines().count(), step);
    outcome.prints(&["saved to"]);
    step
}

/// Runs the program and shows `watch` what it has said on stderr, again and again; a signal that it returns is sent to the program.
pub fn run_and_signal(program: &Program, mut watch: impl FnMut(&str) -> Option<Signal>) -> Outcome {
    program.run_and_pid(|stderr, pid| {
        if let Some(signal) = watch(stderr) {
            kill(Pid::from_raw(pid as i32), signal).unwrap();
        }
    })
}

/// Sends `signal` `delay` after the first step.
fn signalled(program: &Program, signal: Signal, delay: Duration) -> Outcome {
    signalled_at(program, "step 1/", signal, delay)
}

/// Sends `signal` `delay` after the program has said so.
fn signalled_at(program: &Program, said: &str, signal: Signal, delay: Duration) -> Outcome {
    let (mut begun, mut sent) = (None, false);
    run_and_signal(program, |stderr| {
        if begun.is_none() && stderr.contains(said) {
            begun = Some(Instant::now());
        }
        let is_due = !sent && begun.is_some_and(|begun| begun.elapsed() >= delay);
        sent |= is_due;
        is_due.then_some(signal)
    })
}

#[test]
fn a_signal_ends_the_run_after_a_step_with_its_model() {
    for (index, (signal, code)) in [
        (Signal::SIGTERM, 143),
        (Signal::SIGINT, 130),
        (Signal::SIGHUP, 129),
        (Signal::SIGUSR1, 138),
    ]
    .into_iter()
    .enumerate()
    {
        let workspace = Workspace::new();
        let path = workspace.path("metrics.jsonl");
        let program = long(&workspace).flag("--metrics", path.display());
        let program = program.flag("--prompt", "a").flag("--sample-tokens", 2);
        let delay = Duration::from_millis(37 * index as u64);
        let outcome = signalled(&program, signal, delay).exited(code);
        let step = stopped_after(&workspace, &outcome, signal.as_str());
        let said = format!("{}: step ", signal.as_str());
        let (_, said) = outcome.stderr.split_once(&said).unwrap();
        let (announced, rest) = said.split_once(' ').unwrap();
        // Ranks that are threads may hear of it one step apart.
        assert!(announced.parse::<usize>().unwrap().abs_diff(step) <= 1);
        assert!(rest.starts_with("is finished and saved first; again ends at once\n"));
        assert!(!outcome.stdout.contains("--- after"), "{}", outcome.stdout);
    }
}

#[test]
fn the_model_is_that_of_the_step() {
    let workspace = Workspace::new();
    let path = workspace.path("metrics.jsonl");
    // The learning rate does not depend on the number of steps.
    let program = long(&workspace)
        .flag("--metrics", path.display())
        .flag("--min-lr-ratio", 1)
        .flag("--warmup-steps", 0);
    let outcome = signalled(&program, Signal::SIGTERM, Duration::from_millis(100));
    let step = stopped_after(&workspace, &outcome, "SIGTERM");
    let stopped = read_checkpoint(&workspace.output());
    program.flag("--steps", step).succeeds();
    assert!(read_checkpoint(&workspace.output()) == stopped);
}

/// Whether a process finishes a step at the first signal, as from its first step on. Before, it hears signals too, but ends at once.
fn defers_signals(pid: u32) -> bool {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task"));
    let names = threads.into_iter().flatten().flatten();
    let mut names = names.map(|thread| std::fs::read_to_string(thread.path().join("comm")));
    names.any(|name| name.is_ok_and(|name| name.trim_end() == "stop-signals"))
}

#[test]
fn a_second_signal_ends_the_run_at_once_and_saves_nothing() {
    let workspace = Workspace::new();
    // Steps of many seconds.
    let program = long(&workspace)
        .flag(
            "--data",
            format!("{}:200", workspace.path("text.txt").display()),
        )
        .flag("--global-batch-size", 20_000)
        .flag("--seq-len", 64);
    let before = names(&workspace.path(""));
    let (mut begun, mut first, mut sent) = (None, None, 0);
    let outcome = program.run_and_pid(|_, pid| {
        if begun.is_none() && defers_signals(pid) {
            begun = Some(Instant::now());
        }
        let [from_begin, from_first] =
            [begun, first].map(|at: Option<Instant>| at.map(|at| at.elapsed().as_millis()));
        let is_due = match (sent, from_first) {
            (0, _) => from_begin.is_some_and(|elapsed| elapsed > 1000),
            // Within a second it counts as the same one.
            (1, Some(elapsed)) => elapsed > 300,
            (2, Some(elapsed)) => elapsed > 1500,
            _ => false,
        };
        if is_due {
            first.get_or_insert_with(Instant::now);
            sent += 1;
            kill(Pid::from_raw(pid as i32), Signal::SIGTERM).unwrap();
        }
    });
    let took = first.unwrap().elapsed();
    assert_eq!((sent, outcome.code), (3, None), "{}", outcome.stderr);
    assert!(took < Duration::from_millis(2500), "{took:?}");
    let said = [
        "SIGTERM: step 1 is finished and saved first; again ends at once\n",
        "SIGTERM again: ended at once; no step was done\n",
    ];
    assert!(
        outcome.stderr.ends_with(&said.concat()),
        "{}",
        outcome.stderr
    );
    workspace.assert_output_is_untouched();
    // Nor its lock.
    assert_eq!(names(&workspace.path("")), before);
}

#[test]
fn before_the_first_step_a_signal_ends_the_run_at_once() {
    let workspace = Workspace::new();
    let mut sent = false;
    let program = candle_train("pretrain")
        .flag("--data", workspace.path("text.txt").display())
        .flag("--output", workspace.path("new").display());
    let outcome = run_and_signal(&program, |_| {
        (!std::mem::replace(&mut sent, true)).then_some(Signal::SIGTERM)
    });
    assert_eq!(outcome.code, None, "{}", outcome.stderr);
    assert!(!names(&workspace.path("")).contains(&"new".to_string()));
}

/// Whether a signal that comes while the run has its folders, and before its first step, leaves nothing of them.
#[test]
fn a_signal_before_the_first_step_leaves_no_lock_and_no_folder() {
    let workspace = Workspace::new();
    let before = names(&workspace.path(""));
    let saves = workspace.path("new/saves");
    // Many weights, so that there is time.
    let program = candle_train("pretrain")
        .flag("--data", workspace.path("text.txt").display())
        .flag("--output", workspace.path("made/for/model").display())
        .flag("--tokenizer", workspace.path("model").display())
        .flag("--save-dir", saves.display())
        .flag("--save-every", 1)
        .flag("--hidden-size", 1024)
        .flag("--intermediate-size", 4096)
        .flag("--layers", 4)
        .flag("--heads", 8);
    for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
        let mut sent = false;
        let outcome = run_and_signal(&program, |_| {
            let is_due = !sent && saves.join(".lock").exists();
            sent |= is_due;
            is_due.then_some(signal)
        });
        assert_eq!((sent, outcome.code), (true, None), "{}", outcome.stderr);
        assert_eq!(names(&workspace.path("")), before);
    }
}

#[test]
fn under_nohup_a_run_does_not_hear_of_the_end_of_its_terminal() {
    let workspace = Workspace::new();
    let program = workspace.finetune().flag("--steps", 60);
    let program = program.under(vec!["nohup".to_string()]);
    let outcome = signalled(&program, Signal::SIGHUP, Duration::ZERO).exited(0);
    assert!(!outcome.stderr.contains("SIGHUP"), "{}", outcome.stderr);
}

/// The disk is full when the run is asked to stop: the older checkpoints are what it can go on from.
#[test]
fn a_stopped_run_whose_checkpoint_cannot_be_saved_says_from_which_it_goes_on() {
    let workspace = Workspace::new();
    let saves = workspace.path("saves");
    let program = workspace.finetune().flag("--save-dir", saves.display());
    let program = program.flag("--save-every", 3).flag("--steps", 3);
    program.succeeds();
    let full = program
        .flag("--steps", 100_000)
        .flag("--save-every", 90_000);
    let full = full.flag("--resume", "latest");
    let full = full.switch("--resume-anyway").with_limited_files();
    let last_line = |outcome: &Outcome| {
        outcome
            .stderr
            .lines()
            .last()
            .unwrap_or_default()
            .to_string()
    };
    let stopped = signalled_at(&full, "step 4/", Signal::SIGTERM, Duration::ZERO);
    let timed = full.flag("--max-secs", 2).run();
    for (outcome, why) in [(stopped, "SIGTERM"), (timed, "--max-secs 2")] {
        assert_eq!(outcome.code, Some(88), "{}", outcome.stderr);
        let last = last_line(&outcome);
        let said = format!(
            " of 100000 by {why}; its checkpoint could not be saved: --resume latest goes on after step 3"
        );
        assert!(
            last.starts_with("error: stopped after step ") && last.ends_with(&said),
            "{}",
            outcome.stderr
        );
    }
    assert_eq!(names(&saves), ["step-000003"]);
}

#[test]
fn starts_that_all_end_by_sigterm_keep_as_many_checkpoints_as_they_are_told() {
    for keep in [1, 2] {
        let workspace = Workspace::new();
        let saves = workspace.path("saves");
        let program = long(&workspace).flag("--save-dir", saves.display());
        let program = program.flag("--keep", keep).flag("--resume", "latest");
        for start in 1..=6 {
            signalled_at(&program, "step ", Signal::SIGTERM, Duration::ZERO).exited(143);
            let there = names(&saves);
            assert_eq!(there.len(), (keep + 1).min(start), "{start}: {there:?}");
        }
    }
}

#[test]
fn the_time_ends_the_run_well() {
    let workspace = Workspace::new();
    let path = workspace.path("metrics.jsonl");
    let program = long(&workspace).flag("--metrics", path.display());
    let start = Instant::now();
    let outcome = program.flag("--max-secs", 2).succeeds();
    let secs = start.elapsed().as_secs_f64();
    assert!((2.0..10.0).contains(&secs), "{secs}");
    assert!(stopped_after(&workspace, &outcome, "--max-secs 2") > 1);
    // Enough time changes nothing.
    let program = workspace.finetune();
    program.succeeds();
    let whole = read_checkpoint(&workspace.output());
    let outcome = program.flag("--max-secs", 1000).succeeds();
    assert!(!outcome.stdout.contains("stopped"), "{}", outcome.stdout);
    assert!(read_checkpoint(&workspace.output()) == whole);
}

#[test]
fn the_command_that_a_stopped_run_prints_goes_on_to_the_same_weights() {
    let workspace = Workspace::new();
    let program = workspace
        .finetune()
        .flag("--steps", 150)
        .flag("--prompt", "it's \"here\"")
        .flag("--save-every", 1000);
    let saves = |name: &str| workspace.path(name).display().to_string();
    program
        .clone()
        .flag("--save-dir", saves("whole"))
        .succeeds();
    let whole = read_checkpoint(&workspace.output());
    std::fs::remove_dir_all(workspace.output()).unwrap();
    let program = program.flag("--save-dir", saves("saves"));
    let outcome = signalled(&program, Signal::SIGTERM, Duration::from_millis(60)).exited(143);
    assert!(!workspace.output().exists());
    let (_, command) = outcome.stdout.split_once("; to go on: ").unwrap();
    let status = Command::new("sh")
        .args(["-c", command.trim_end()])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    assert!(status.unwrap().success(), "{command}");
    assert!(read_checkpoint(&workspace.output()) == whole);
}

#[test]
fn the_launcher_passes_signals_on_and_waits_for_the_save() {
    let workspace = Workspace::new();
    let path = workspace.path("metrics.jsonl");
    let program = long(&workspace).flag("--metrics", path.display());
    let launcher = [
        env!("CARGO_BIN_EXE_candle-train"),
        "launch",
        "--nproc-per-node",
        "1",
    ];
    let program = program.under(launcher.map(str::to_string).to_vec());
    let outcome = signalled(&program, Signal::SIGTERM, Duration::from_millis(50)).exited(143);
    let said = outcome.stdout.replace("[rank 0] ", "");
    let outcome = Outcome {
        stdout: said,
        ..outcome
    };
    stopped_after(&workspace, &outcome, "SIGTERM");
    assert!(
        outcome
            .stderr
            .ends_with("candle-train: stopped by SIGTERM\n"),
        "{}",
        outcome.stderr
    );
}

#[test]
fn a_stopped_run_does_not_replace_the_model_of_a_whole_one() {
    let workspace = Workspace::new();
    let program = workspace
        .finetune()
        .flag("--steps", 200)
        .flag("--output", workspace.path("model-2").display());
    program.succeeds();
    let whole = read_checkpoint(&workspace.path("model-2"));
    let program = program.without("--overwrite");
    let outcome = signalled(&program, Signal::SIGTERM, Duration::from_millis(50)).exited(1);
    let rescued = workspace.path("model-2-rescued");
    outcome.says(&[&format!(
        "the model was saved to {} instead",
        rescued.display()
    )]);
    assert!(read_checkpoint(&rescued) != whole);
    assert!(read_checkpoint(&workspace.path("model-2")) == whole);
}

#[test]
fn a_run_that_resumes_the_latest_leaves_a_checkpoint_though_no_steps_between_them_are_given() {
    let workspace = Workspace::new();
    let saves = workspace.path("saves");
    let program = long(&workspace).flag("--save-dir", saves.display());
    let program = program.flag("--resume", "latest");
    let stopped = |outcome: &Outcome| {
        let (_, rest) = outcome.stdout.split_once("stopped after step ").unwrap();
        rest.split(' ').next().unwrap().parse::<usize>().unwrap()
    };
    let timed = program.clone().flag("--max-secs", 1).succeeds();
    let step = stopped(&timed);
    timed.prints(&["; to go on: "]);
    assert_eq!(names(&saves), [format!("step-{step:06}")]);
    let outcome = program.flag("--max-secs", 1).succeeds();
    outcome.prints(&[&format!("resumed after step {step} from ")]);
    assert!(stopped(&outcome) > step, "{}", outcome.stdout);
}
