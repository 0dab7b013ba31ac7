//! No process of a run outlives it. Each end of a run checks that; these runs try to break it.

use super::launching::{Launching, run_script, start_script, wait_until};
use crate::cli::program::AssertText;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// A child in the rank's group, one in a session of its own that lost its parent, and one below that.
const FAMILY: &str =
    "sleep 1000 & setsid sh -c 'setsid sleep 1001 & sleep 1002' > /dev/null 2>&1 & ";

#[test]
fn after_success() {
    let ended = run_script(2, &[], &format!("{FAMILY} exit 0"));
    assert_eq!((ended.code, ended.err.as_str()), (Some(0), ""));
}

#[test]
fn after_a_failure() {
    let script = format!("{FAMILY} [ $RANK = 0 ] && exit 9; sleep 1003");
    assert_eq!(
        run_script(2, &["--grace-secs", "0.2"], &script).code,
        Some(9)
    );
}

#[test]
fn what_ignores_sigterm_in_its_own_session() {
    let script = "setsid sh -c \"trap '' TERM; touch deaf$RANK; while :; do sleep 1000; done\" & until [ -e deaf$RANK ]; do sleep 0.01; done; exit 0";
    assert_eq!(run_script(2, &[], script).code, Some(0));
}

/// Two ranks with their families, all of them running.
fn start_families() -> Launching {
    let script = format!("trap '' TERM HUP; {FAMILY} sleep 1003 & touch up$RANK; wait; sleep 1004");
    let launching = start_script(2, &["--grace-secs", "0.2"], &script);
    launching.await_files(&["up0", "up1"]);
    wait_until("the families", || {
        count(&launching, "sleep 1001") == 2 && count(&launching, "sleep 1002") == 2
    });
    launching
}

fn count(launching: &Launching, command: &str) -> usize {
    launching
        .processes()
        .iter()
        .filter(|(_, other)| other.starts_with(command))
        .count()
}

fn agent(launching: &Launching) -> Pid {
    let processes = launching.processes();
    let found = processes
        .iter()
        .find(|(_, command)| command.ends_with("candle-train agent "));
    found
        .unwrap_or_else(|| panic!("no agent in {processes:?}"))
        .0
}

#[test]
fn after_sigkill_of_the_launcher() {
    let mut launching = start_families();
    launching.signal(Signal::SIGKILL);
    launching.wait_until_nobody_left();
}

#[test]
fn after_sigkill_of_the_agent() {
    let launching = start_families();
    kill(agent(&launching), Signal::SIGKILL).unwrap();
    let ended = launching.exits(1);
    let sentence = ended.sentence();
    sentence.assert_begins("candle-train: lost host ");
    sentence.assert_has(&["with ranks 0 to 1: "]);
    assert!(sentence.contains("signal: 9 (SIGKILL)"), "{sentence}");
}

#[test]
fn after_sigterm_of_the_agent() {
    let launching = start_families();
    kill(agent(&launching), Signal::SIGTERM).unwrap();
    // The agent ends its ranks in order, so they are what failed.
    let ended = launching.wait();
    assert!(ended.sentence().contains("killed by SIG"), "{}", ended.err);
}
