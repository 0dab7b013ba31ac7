//! Launchers and agents of other hosts that say nothing are named by who waits for them.

use std::process::Command;
use std::time::Instant;

use nix::sys::signal::{Signal, kill};
use tempfile::TempDir;

use super::launching::{Launching, spawn, wait_until};
use super::led::{Hosts, RANK};
use crate::cli::two_hosts::TwoHosts;

/// A launcher says this within 20 s from now.
#[track_caller]
fn says(launching: &Launching, words: &str) {
    let begin = Instant::now();
    let said = || std::fs::read_to_string(launching.path("stderr")).unwrap();
    wait_until(words, || said().contains(words));
    let secs = begin.elapsed().as_secs();
    assert!(secs < 20, "{secs} s: {}", said());
}

/// Whoever says nothing for 10 s, though the kernel of its host answers, is named, and long before it is given up.
#[test]
fn who_waits_for_a_stopped_launcher_or_agent_says_so() {
    let hosts = Hosts::new();
    let patient = ["--grace-secs", "1", "--silence-secs", "60"];
    let first = hosts.start("a", 1, "2", &patient, RANK);
    let second = hosts.start("b", 1, "2", &patient, RANK);
    wait_until("ranks on both", || {
        hosts.exists("up-0-0") && hosts.exists("up-0-1")
    });
    let is_agent = |(_, command): &&(_, String)| command.ends_with(" agent ");
    let processes = second.processes();
    let agents: Vec<_> = processes.iter().filter(is_agent).collect();
    agents
        .iter()
        .for_each(|(pid, _)| kill(*pid, Signal::SIGSTOP).unwrap());
    says(
        &first,
        "the launcher waits for word of the agents of hosts b, for ",
    );
    agents
        .iter()
        .for_each(|(pid, _)| kill(*pid, Signal::SIGCONT).unwrap());
    first.signal(Signal::SIGSTOP);
    let word = "this host waits for word of the launcher at ";
    says(&second, word);
    first.signal(Signal::SIGCONT);
    hosts.touch("end");
    first.exits(0);
    assert_eq!(second.wait().code, Some(0));
}

#[test]
fn a_host_whose_packets_are_dropped_says_for_whom_it_waits() {
    let Some(namespaces) = TwoHosts::new() else {
        return;
    };
    let hosts = Hosts::new();
    let start = |host| {
        let words = namespaces.enter(host);
        let rdzv = format!("{}:29513", namespaces.address('a'));
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]);
        command.args([
            env!("CARGO_BIN_EXE_candle-train"),
            "launch",
            "--nnodes",
            "2",
        ]);
        command.args([
            "--nproc-per-node",
            "1",
            "--silence-secs",
            "3",
            "--rdzv",
            &rdzv,
        ]);
        command.args(["sh", "-c", "touch up-$RANK; exec sleep 1000"]);
        command.env("CANDLE_TRAIN_RUN_TOKEN_FILE", hosts.secret.path());
        spawn(TempDir::new().unwrap(), command, &|command| {
            command.current_dir(hosts.folder.path());
        })
    };
    let [_first, second] = ['a', 'b'].map(start);
    wait_until("ranks on both", || {
        hosts.exists("up-0") && hosts.exists("up-1")
    });
    namespaces.drop_packets();
    // The connection ends after 3 s without a word, and no other one is ever answered.
    says(&second, "this host waits for word of the launcher at ");
}
