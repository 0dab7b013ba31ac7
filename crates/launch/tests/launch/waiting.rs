//! Launchers that wait for each other and say so: this test program again, as a launcher.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::Duration;

use candle_launch::WaitNotices;
use candle_launch::launcher::{LaunchConfig, launch};

/// What a process of these tests does, if it is one.
#[test]
fn launcher_process() {
    let Ok(rdzv) = std::env::var("WAITING_TEST") else {
        return;
    };
    let notice = Duration::from_millis(100);
    launch(&LaunchConfig {
        nproc_per_node: Some(1),
        nnodes: Some("2".parse().unwrap()),
        rdzv: Some(rdzv.parse().unwrap()),
        hostfile: None,
        ssh: None,
        mpirun: None,
        env: Vec::new(),
        log_dir: None,
        may_lose: 0,
        max_restarts: 0,
        grace_secs: None,
        silence_secs: None,
        wait_notices: WaitNotices {
            first: notice,
            interval: notice,
        },
        short_secret: false,
        dry_run: false,
        program: vec!["true".into()],
    });
}

/// What a launcher says that is told to meet the others there, until a line has these words.
#[track_caller]
fn says(rdzv: &str, words: &str) {
    let mut launcher = Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "launch::waiting::launcher_process",
            "--nocapture",
        ])
        .env("WAITING_TEST", rdzv)
        .env("CANDLE_TRAIN_RUN_TOKEN", "a secret of some length")
        .env("CANDLE_TRAIN_HOST", "a")
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(launcher.stderr.take().unwrap()).lines();
    let mut said = lines.map_while(Result::ok);
    let found = said.by_ref().take(10).find(|line| line.contains(words));
    launcher.kill().unwrap();
    launcher.wait().unwrap();
    assert!(found.is_some(), "{words}");
}

#[test]
fn a_launcher_that_leads_says_how_many_hosts_are_missing_and_where_it_waits() {
    let port = std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    let rdzv = format!("127.0.0.1:{port}");
    says(
        &rdzv,
        &format!(
            "candle-train: the launcher that leads waits at {rdzv} for 1 more of at least 2 hosts; there: a, for "
        ),
    );
}

#[test]
fn a_launcher_that_finds_nobody_who_leads_says_where_it_looks() {
    // An address of nobody, RFC 5737.
    let rdzv = "192.0.2.1:29500";
    says(
        rdzv,
        &format!("candle-train: this host waits for the launcher that leads this run at {rdzv}"),
    );
}
