//! What a dry run prints.

use super::launching::start_in;
use crate::cli::program::AssertText;
use tempfile::TempDir;

#[test]
fn a_dry_run_prints_what_would_run_where() {
    let folder = TempDir::new().unwrap();
    let hosts = folder.path().join("hosts");
    std::fs::write(&hosts, "localhost slots=2\n").unwrap();
    let args = [
        "--hostfile",
        "hosts",
        "--dry-run",
        "--env",
        "A=b",
        "--log-dir",
        "logs",
        "touch",
        "it's",
    ];
    let ended = start_in(folder, &args, &|_| {}).wait();
    let here = std::fs::canonicalize(ended.path("")).unwrap();
    let expected = format!(
        "a run of 2 ranks, meeting on 127.0.0.1\n\n\
         host localhost\n  started: directly\n  folder: {}\n  command: touch 'it'\\''s'\n  \
         environment of all its ranks:\n    A=b\n    WORLD_SIZE=2\n    LOCAL_WORLD_SIZE=2\n    \
         MASTER_ADDR=127.0.0.1\n    MASTER_PORT=(chosen at start)\n    GROUP_RANK=0\n    GROUP_WORLD_SIZE=1\n    \
         NODE_RANK=0\n    CANDLE_TRAIN_HOST=localhost\n    CANDLE_TRAIN_RESTART_COUNT=0\n    \
         CANDLE_TRAIN_RUN_TOKEN=(a secret)\n  \
         rank 0: RANK=0 LOCAL_RANK=0\n  rank 1: RANK=1 LOCAL_RANK=1\n",
        here.display()
    );
    assert_eq!(String::from_utf8_lossy(&ended.out), expected);
    assert_eq!(ended.code, Some(0));
    assert!(!ended.path("it's").exists() && !ended.path("logs").exists());
}

#[test]
fn a_dry_run_of_two_hosts() {
    let folder = TempDir::new().unwrap();
    std::fs::write(folder.path().join("hosts"), "a slots=1\nb slots=2\n").unwrap();
    let args = [
        "--hostfile",
        "hosts",
        "--dry-run",
        "--rdzv",
        "[::1]:29500",
        "true",
    ];
    let ended = start_in(folder, &args, &|_| {}).wait();
    let text = String::from_utf8_lossy(&ended.out);
    let program = env!("CARGO_BIN_EXE_candle-train");
    let started = |host: &str| {
        format!(
            "host {host}\n  started: ssh -o BatchMode=yes -o ConnectTimeout=10 -o ControlMaster=no -T {host} {program} agent\n"
        )
    };
    text.assert_begins("a run of 3 ranks, meeting at [::1]:29500\n");
    text.assert_has(&[
        &started("a"),
        &started("b"),
        "MASTER_ADDR=::1\n    MASTER_PORT=29500\n",
        "CANDLE_TRAIN_RUN_TOKEN=(a secret)\n",
    ]);
    assert!(
        text.ends_with("  rank 1: RANK=1 LOCAL_RANK=0\n  rank 2: RANK=2 LOCAL_RANK=1\n"),
        "{text}"
    );
}
