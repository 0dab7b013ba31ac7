//! Signals to the launcher reach the ranks.

use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::Instant;

use super::launching::{spawn, start_in, start_script, wait_until, write_script};
use nix::sys::signal::{Signal, killpg};
use tempfile::TempDir;

#[test]
fn each_is_passed_on_and_named() {
    for (signal, trap, code) in [
        (Signal::SIGINT, "INT", 130),
        (Signal::SIGTERM, "TERM", 143),
        (Signal::SIGHUP, "HUP", 129),
        (Signal::SIGQUIT, "QUIT", 131),
    ] {
        let script =
            format!("trap 'echo got {trap}; exit 1' {trap}; touch up$RANK; sleep 1000 & wait");
        let launching = start_script(2, &[], &script);
        launching.await_files(&["up0", "up1"]);
        launching.signal(signal);
        let ended = launching.exits(code);
        // Shells may have words of their own about a child that the signal ended.
        let got = |rank| format!("[rank {rank}] got {trap}");
        assert_eq!(ended.sorted_lines(), [got(0), got(1)]);
        assert_eq!(
            ended.sentence(),
            format!("candle-train: stopped by {}\n", signal.as_str())
        );
    }
}

#[test]
fn ranks_that_end_well_after_a_signal_make_a_run_that_ends_well() {
    let launching = start_script(
        2,
        &[],
        "trap 'exit 0' TERM; touch up$RANK; sleep 1000 & wait",
    );
    launching.await_files(&["up0", "up1"]);
    launching.signal(Signal::SIGTERM);
    launching.exits(0);
}

#[test]
fn ranks_that_could_not_save_after_a_signal_are_quoted() {
    let script =
        "trap 'echo error: the disk is full >&2; exit 88' TERM; touch up; sleep 1000 & wait";
    let launching = start_script(1, &["--max-restarts", "2"], script);
    launching.await_files(&["up"]);
    launching.signal(Signal::SIGTERM);
    let ended = launching.exits(88);
    assert_eq!(
        ended.sentence(),
        "candle-train: stopped by SIGTERM; rank 0 says: error: the disk is full\n"
    );
    // Nor is a run started again that is over.
    let ended = super::launching::run_script(2, &["--max-restarts", "2"], "exit 88").exited(88);
    let why = "the ranks are not started again: exit code 88 means that the run is over";
    assert!(ended.err.contains(why), "{}", ended.err);
}

#[test]
fn after_the_grace_time_ranks_are_killed() {
    let script = "[ $RANK = 0 ] && trap '' TERM; touch up$RANK; while :; do sleep 1000; done";
    let launching = start_script(2, &["--grace-secs", "0.3"], script);
    launching.await_files(&["up0", "up1"]);
    launching.signal(Signal::SIGTERM);
    let ended = launching.exits(143);
    assert_eq!(
        ended.sentence(),
        "candle-train: stopped by SIGTERM; rank 0 did not end in time and was killed\n"
    );
}

#[test]
fn a_second_signal_does_not_wait_for_the_grace_time() {
    let script = "trap 'touch got' INT; touch up; while :; do sleep 0.05; done";
    let launching = start_script(1, &["--grace-secs", "1000"], script);
    launching.await_files(&["up"]);
    launching.signal(Signal::SIGINT);
    launching.await_files(&["got"]);
    let begin = Instant::now();
    // Within a second it counts as the same one.
    wait_until("the end", || {
        launching.signal(Signal::SIGINT);
        count_ranks(&launching) == 0
    });
    assert!(begin.elapsed().as_millis() > 500, "{:?}", begin.elapsed());
    let ended = launching.exits(130);
    let said = "candle-train: SIGINT: passed on to the ranks, which have 1000 s to end; again kills them at once\n";
    assert!(ended.err.contains(said), "{}", ended.err);
    assert_eq!(
        ended.sentence(),
        "candle-train: stopped by SIGINT, and by a second signal, at which the ranks were killed: what they had not saved by then is lost\n"
    );
}

fn count_ranks(launching: &super::launching::Launching) -> usize {
    let processes = launching.processes();
    processes
        .iter()
        .filter(|(_, command)| command.starts_with("sh "))
        .count()
}

#[test]
fn before_the_ranks_are_started() {
    let folder = TempDir::new().unwrap();
    std::fs::write(folder.path().join("hosts"), "a slots=1\n").unwrap();
    write_script(&folder.path().join("ssh"), "touch asked; exec cat");
    let args = ["--hostfile", "hosts", "--ssh", "./ssh", "touch", "started"];
    let launching = start_in(folder, &args, &|_| {});
    launching.await_files(&["asked"]);
    launching.signal(Signal::SIGINT);
    let ended = launching.exits(130);
    assert!(!ended.path("started").exists());
}

#[test]
fn a_signal_to_the_terminals_group_reaches_ranks_once() {
    let script = "n=0; trap 'n=$((n+1)); touch got' INT; touch up; while [ ! -e go ]; do sleep 0.01; done; echo $n";
    let args = ["--nproc-per-node", "1", "sh", "-c", script];
    let launching = start_in(TempDir::new().unwrap(), &args, &|command| {
        command.process_group(0);
    });
    launching.await_files(&["up"]);
    killpg(launching.pid(), Signal::SIGINT).unwrap();
    launching.await_files(&["got"]);
    std::fs::write(launching.path("go"), "").unwrap();
    assert_eq!(launching.wait().sorted_lines(), ["[rank 0] 1"]);
}

#[test]
fn under_nohup_the_end_of_the_terminal_is_ignored() {
    let folder = TempDir::new().unwrap();
    let script = "touch up; until [ -e go ]; do sleep 0.01; done; echo through";
    let mut command = Command::new("nohup");
    command.arg(env!("CARGO_BIN_EXE_candle-train"));
    command.args(["launch", "--nproc-per-node", "1", "sh", "-c", script]);
    let launching = spawn(folder, command, &|_| {});
    launching.await_files(&["up"]);
    launching.signal(Signal::SIGHUP);
    std::fs::write(launching.path("go"), "").unwrap();
    let ended = launching.wait();
    assert_eq!(
        (ended.code, ended.sorted_lines()),
        (Some(0), vec!["[rank 0] through".to_string()])
    );
}
