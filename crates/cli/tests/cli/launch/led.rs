//! One launcher leads those of other hosts, which come and go.

use std::process::Command;

use super::launching::{Ended, Launching, spawn, start_in, wait_until};
use crate::cli::program::AssertText;
use nix::sys::signal::{Signal, kill};
use tempfile::{NamedTempFile, TempDir};

/// Where launchers meet, the secret that they share, and the folder in which all of them work.
pub(super) struct Hosts {
    pub(super) rdzv: String,
    pub(super) secret: NamedTempFile,
    pub(super) folder: TempDir,
}

impl Hosts {
    pub(super) fn new() -> Self {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let secret = NamedTempFile::new().unwrap();
        std::fs::write(secret.path(), "hush, hush, hush\n").unwrap();
        Self {
            rdzv: listener.local_addr().unwrap().to_string(),
            secret,
            folder: TempDir::new().unwrap(),
        }
    }

    /// A launcher on the host of this name, with as many ranks.
    pub(super) fn start(
        &self,
        name: &str,
        num_ranks: usize,
        nnodes: &str,
        options: &[&str],
        script: &str,
    ) -> Launching {
        let num_ranks = num_ranks.to_string();
        let first = [
            "--nproc-per-node",
            &num_ranks,
            "--nnodes",
            nnodes,
            "--rdzv",
            &self.rdzv,
        ];
        let quick: &[&str] = match options.contains(&"--grace-secs") {
            true if options.contains(&"--silence-secs") => &[],
            true => &["--silence-secs", "3"],
            false => &["--grace-secs", "1", "--silence-secs", "3"],
        };
        let mut command = Command::new(env!("CARGO_BIN_EXE_candle-train"));
        command.arg("launch").args(first).args(quick).args(options);
        command.args(["sh", "-c", script]);
        let launching = spawn(TempDir::new().unwrap(), command, &|command| {
            command.env("CANDLE_TRAIN_RUN_TOKEN_FILE", self.secret.path());
            command
                .env("CANDLE_TRAIN_HOST", name)
                .current_dir(self.folder.path());
        });
        // All of them are on this host, so the first one that listens leads.
        let leads = || std::net::TcpStream::connect(&self.rdzv).is_ok();
        wait_until("a launcher that leads", leads);
        launching
    }

    pub(super) fn exists(&self, name: &str) -> bool {
        self.folder.path().join(name).exists()
    }

    pub(super) fn touch(&self, name: &str) {
        std::fs::write(self.folder.path().join(name), "").unwrap();
    }
}

/// Says which rank it is, and where, and ends when there is a file `end`; asked to stop, it says that it saves.
pub(super) const RANK: &str = "echo $CANDLE_TRAIN_RESTART_COUNT $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE on $CANDLE_TRAIN_HOST $CANDLE_TRAIN_RUN_TOKEN_FILE.\n\
    trap 'echo saves; exit 143' TERM; touch up-$CANDLE_TRAIN_RESTART_COUNT-$RANK\n\
    until [ -e end ]; do sleep 0.02; done";

/// The ranks that started after so many earlier starts, without the name of the file with the secret.
fn started(ended: &Ended, count: usize) -> Vec<String> {
    let beginning = format!("] {count} ");
    let lines = ended.sorted_lines().into_iter();
    let lines = lines.filter(|line| line.contains(&beginning));
    lines
        .map(|line| line.rsplit_once(' ').unwrap().0.to_string())
        .collect()
}

#[test]
fn a_host_that_comes_later_takes_part() {
    let hosts = Hosts::new();
    let first = hosts.start("a", 1, "1:2", &[], RANK);
    wait_until("a rank on the first host", || hosts.exists("up-0-0"));
    let second = hosts.start("b", 2, "1:2", &[], RANK);
    wait_until("ranks on both", || hosts.exists("up-1-2"));
    // There is no place for a third one, which waits.
    let third = hosts.start("c", 1, "1:2", &[], RANK);
    hosts.touch("end");
    let ended = first.exits(0);
    assert_eq!(started(&ended, 0), ["[rank 0] 0 0/1 0/1 on a"]);
    assert!(ended.sorted_lines().contains(&"[rank 0] saves".to_string()));
    let lines = [
        "[rank 0] 1 0/3 0/1 on a",
        "[rank 1] 1 1/3 0/2 on b",
        "[rank 2] 1 2/3 1/2 on b",
    ];
    assert_eq!(started(&ended, 1), lines);
    assert!(
        ended
            .err
            .contains("host b is there: the ranks stop, and are started again\n")
    );
    assert_eq!(second.wait().code, Some(0));
    drop(third);
}

/// The ranks have no time to say that they cannot run with the second host, as the third one comes.
#[test]
fn a_host_that_does_not_fit_is_found_when_it_is_no_longer_new() {
    let hosts = Hosts::new();
    let odd = "[ $CANDLE_TRAIN_RESTART_COUNT = 1 ] && touch odd && sleep 60\nexit 87";
    let script = format!("if [ $((WORLD_SIZE % 2)) = 1 ]; then\n{odd}\nfi\n{RANK}");
    let first = hosts.start("a", 2, "1:3", &[], &script);
    wait_until("ranks on the first host", || hosts.exists("up-0-1"));
    let second = hosts.start("b", 1, "1:3", &[], &script);
    wait_until("ranks on two hosts", || hosts.exists("odd"));
    let third = hosts.start("c", 2, "1:3", &[], &script);
    wait_until("the first host alone again", || hosts.exists("up-4-1"));
    hosts.touch("end");
    let ended = first.exits(0);
    for host in ["b", "c"] {
        let said = format!("; the ranks go on without what came last: host {host}\n");
        assert_eq!(ended.err.matches(&said).count(), 1, "{}", ended.err);
    }
    assert_eq!(started(&ended, 4).len(), 2, "{}", ended.err);
    assert_eq!((second.wait().code, third.wait().code), (Some(0), Some(0)));
}

/// Ranks that are no pairs say that they cannot go on.
#[test]
fn a_host_that_does_not_fit_waits_for_another_one() {
    let hosts = Hosts::new();
    let script = format!("[ $((WORLD_SIZE % 2)) = 0 ] || exit 87\n{RANK}");
    let first = hosts.start("a", 2, "1:3", &[], &script);
    wait_until("ranks on the first host", || hosts.exists("up-0-1"));
    let second = hosts.start("b", 1, "1:3", &[], &script);
    wait_until("the first host alone again", || hosts.exists("up-2-1"));
    let third = hosts.start("c", 1, "1:3", &[], &script);
    wait_until("ranks on all", || hosts.exists("up-3-3"));
    hosts.touch("end");
    let ended = first.exits(0);
    let said = "; the ranks go on without what came last: host b\n";
    assert_eq!(ended.err.matches(said).count(), 1, "{}", ended.err);
    assert_eq!(started(&ended, 3).len(), 4, "{}", ended.err);
    assert_eq!((second.wait().code, third.wait().code), (Some(0), Some(0)));
}

/// Its agent has pipes for the first ones only.
#[test]
fn a_host_that_cannot_start_all_its_ranks_is_done_without() {
    let hosts = Hosts::new();
    let script = RANK.replace("echo saves", "until [ -e limited ]; do sleep 0.02; done");
    let first = hosts.start("a", 1, "1:2", &["--grace-secs", "60"], &script);
    wait_until("a rank on the first host", || hosts.exists("up-0-0"));
    let second = hosts.start("b", 20, "1:2", &[], &script);
    let mut prlimit = Command::new("prlimit");
    prlimit.args(["--nofile=24", "--pid", &second.pid().to_string()]);
    assert!(prlimit.status().unwrap().success());
    hosts.touch("limited");
    wait_until("the first host alone again", || hosts.exists("up-2-0"));
    hosts.touch("end");
    let ended = first.exits(0);
    let (refused, said) = (
        "host b: cannot start rank ",
        "; the ranks go on without what came last: host b\n",
    );
    let is_said = |line: &str| line.contains(refused) && line.ends_with(said);
    assert!(
        ended.err.split_inclusive('\n').any(is_said),
        "{}",
        ended.err
    );
    assert_eq!(second.wait().code, Some(0));
}

/// Three do not fit, any two do.
#[test]
fn a_host_that_does_not_fit_takes_the_place_of_one_that_is_lost() {
    let hosts = Hosts::new();
    let script = format!("[ $WORLD_SIZE = 2 ] || exit 87\n{RANK}");
    let first = hosts.start("a", 1, "2:3", &["--max-restarts", "1"], &script);
    let second = hosts.start("b", 1, "2:3", &[], &script);
    wait_until("ranks on two hosts", || hosts.exists("up-0-1"));
    let third = hosts.start("c", 1, "2:3", &[], &script);
    wait_until("the two alone again", || hosts.exists("up-2-1"));
    for (pid, _) in second.processes() {
        // It may be gone with the one before.
        let _ = kill(pid, Signal::SIGKILL);
    }
    wait_until("ranks on the first and the third", || {
        hosts.exists("up-3-1")
    });
    hosts.touch("end");
    let ended = first.exits(0);
    let lines = ["[rank 0] 3 0/2 0/1 on a", "[rank 1] 3 1/2 0/1 on c"];
    assert_eq!(started(&ended, 3), lines, "{}", ended.err);
    assert_eq!(third.wait().code, Some(0));
}

#[test]
fn a_host_that_is_lost_and_comes_back() {
    let hosts = Hosts::new();
    let first = hosts.start("a", 1, "1:2", &["--max-restarts", "1"], RANK);
    let second = hosts.start("b", 1, "1:2", &[], RANK);
    wait_until("ranks on both", || {
        hosts.exists("up-0-0") && hosts.exists("up-0-1")
    });
    for (pid, _) in second.processes() {
        // It may be gone with the one before.
        let _ = kill(pid, Signal::SIGKILL);
    }
    wait_until("a rank on the first host", || hosts.exists("up-1-0"));
    assert!(!hosts.exists("up-1-1"));
    let second = hosts.start("b", 1, "1:2", &[], RANK);
    wait_until("ranks on both again", || hosts.exists("up-2-1"));
    hosts.touch("end");
    let ended = first.exits(0);
    ended.says(&["lost host b with rank 1: "]);
    assert_eq!(started(&ended, 1), ["[rank 0] 1 0/1 0/1 on a"]);
    assert_eq!(
        started(&ended, 2),
        ["[rank 0] 2 0/2 0/1 on a", "[rank 1] 2 1/2 0/1 on b"]
    );
    assert_eq!(second.wait().code, Some(0));
}

/// Its launcher lives, and calls again.
#[test]
fn a_host_whose_agent_is_lost_takes_part_again() {
    let hosts = Hosts::new();
    let script = format!("setsid sleep 1000 &\n{RANK}");
    let first = hosts.start("a", 1, "2", &["--max-restarts", "1"], &script);
    let second = hosts.start("b", 1, "2", &[], &script);
    wait_until("ranks on both", || {
        hosts.exists("up-0-0") && hosts.exists("up-0-1")
    });
    let started_first = second.processes();
    let agents = started_first
        .iter()
        .filter(|(_, command)| command.ends_with(" agent "));
    // One may be gone with the shell that started it.
    for (pid, _) in agents {
        let _ = kill(*pid, Signal::SIGKILL);
    }
    wait_until("ranks on both again", || hosts.exists("up-1-1"));
    // Nothing is left of the first start.
    let is_old = |(pid, command): &(_, String)| {
        command.starts_with("sleep 1000") && started_first.iter().any(|(old, _)| old == pid)
    };
    assert!(!second.processes().iter().any(is_old));
    hosts.touch("end");
    let ended = first.exits(0);
    ended.says(&["lost host b with rank 1: "]);
    assert_eq!(
        started(&ended, 1),
        ["[rank 0] 1 0/2 0/1 on a", "[rank 1] 1 1/2 0/1 on b"]
    );
    assert_eq!(second.wait().code, Some(0));
}

#[test]
fn a_failure_ends_all_launchers_with_its_code() {
    let hosts = Hosts::new();
    let script = "[ $RANK = 1 ] || exec sleep 1000; echo why >&2; exit 3";
    let first = hosts.start("a", 1, "2", &[], script);
    let second = hosts.start("b", 1, "2", &[], script);
    let (first, second) = (first.wait(), second.wait());
    assert_eq!((first.code, second.code), (Some(3), Some(3)));
    first.sentence().assert_has(&["rank 1 (host b, pid "]);
    second.sentence().assert_has(&["rank 1 (host b, pid "]);
}

#[test]
fn without_the_launcher_that_leads_nothing_goes_on() {
    let hosts = Hosts::new();
    let mut first = hosts.start("a", 1, "2", &[], RANK);
    let second = hosts.start("b", 1, "2", &[], RANK);
    wait_until("ranks on both", || {
        hosts.exists("up-0-0") && hosts.exists("up-0-1")
    });
    first.signal(Signal::SIGKILL);
    first.wait_until_nobody_left();
    let ended = second.exits(1);
    let sentence = format!(
        "candle-train: the launcher at {}, which leads this run, is not there",
        hosts.rdzv
    );
    ended.sentence().assert_begins(&sentence);
}

#[test]
fn signals_end_a_led_run() {
    let hosts = Hosts::new();
    let first = hosts.start("a", 1, "1:2", &["--max-restarts", "1"], RANK);
    let second = hosts.start("b", 1, "1:2", &[], RANK);
    wait_until("ranks on both", || {
        hosts.exists("up-0-0") && hosts.exists("up-0-1")
    });
    // To the one that leads: all save.
    first.signal(Signal::SIGTERM);
    let ended = first.exits(143);
    let saves = |rank: usize| format!("[rank {rank}] saves");
    assert!(
        (0..2).all(|rank| ended.sorted_lines().contains(&saves(rank))),
        "{}",
        ended.err
    );
    assert_eq!(second.wait().code, Some(143));
    // To another one: all save, and go on without it.
    let hosts = Hosts::new();
    let first = hosts.start("a", 1, "1:2", &[], RANK);
    let second = hosts.start("b", 1, "1:2", &[], RANK);
    wait_until("ranks on both", || {
        hosts.exists("up-0-0") && hosts.exists("up-0-1")
    });
    second.signal(Signal::SIGTERM);
    assert_eq!(second.wait().code, Some(143));
    wait_until("a rank on the first host", || hosts.exists("up-1-0"));
    hosts.touch("end");
    let ended = first.exits(0);
    ended.says(&["host b leaves: the ranks stop, and are started again\n"]);
    assert!(ended.sorted_lines().contains(&saves(1)));
}

/// The ranks have been asked to stop already, and a second signal would end them at once.
#[test]
fn a_signal_while_hosts_change_lets_ranks_save() {
    let hosts = Hosts::new();
    let script = "trap 'trap \"exit 9\" TERM; touch stopping; until [ -e saved ]; do sleep 0.02; done; echo saves; exit 143' TERM\n\
        touch up; while :; do sleep 0.02; done";
    let first = hosts.start("a", 1, "1:2", &["--grace-secs", "60"], script);
    wait_until("a rank on the first host", || hosts.exists("up"));
    let second = hosts.start("b", 1, "1:2", &[], script);
    wait_until("a rank that stops", || hosts.exists("stopping"));
    first.signal(Signal::SIGTERM);
    // Time for a signal to reach the rank.
    std::thread::sleep(std::time::Duration::from_millis(500));
    hosts.touch("saved");
    let ended = first.wait();
    assert_eq!(ended.sorted_lines(), ["[rank 0] saves"], "{}", ended.err);
    assert_eq!(ended.code, Some(143), "{}", ended.err);
    assert_eq!(second.wait().code, Some(143));
}

#[test]
fn a_short_secret_is_refused_unless_all_launchers_are_told_that_it_is_meant() {
    let hosts = Hosts::new();
    std::fs::write(hosts.secret.path(), "hush").unwrap();
    let token = |command: &mut Command| {
        command.env("CANDLE_TRAIN_RUN_TOKEN_FILE", hosts.secret.path());
    };
    let options = [
        "--nproc-per-node",
        "1",
        "--nnodes",
        "2",
        "--rdzv",
        &hosts.rdzv,
    ];
    let args = [&options[..], &["true"]].concat();
    let refused = start_in(TempDir::new().unwrap(), &args, &token).exits(2);
    let said = ": expected a secret of at least 16 bytes, got 4, which others may guess";
    refused.says(&[said, "--short-secret"]);
    // Launchers, what reaches the other host, and ranks.
    let program = concat!(env!("CARGO_BIN_EXE_candle-train"), " env");
    let first = hosts.start("a", 1, "2", &["--short-secret"], program);
    let second = hosts.start("b", 1, "2", &["--short-secret"], program);
    let ended = first.exits(0);
    let lines = ended.sorted_lines();
    for (rank, host) in ["a", "b"].iter().enumerate() {
        let said = format!("[rank {rank}] rank {rank} of 2 on {host} ");
        assert!(lines[rank].starts_with(&said), "{lines:?}");
    }
    assert_eq!(second.wait().code, Some(0));
    // A rank that something else starts.
    let rank = |meant: Option<&str>| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_candle-train"));
        token(&mut command);
        command.arg("env");
        for (name, value) in [
            ("RANK", "1"),
            ("WORLD_SIZE", "2"),
            ("LOCAL_RANK", "0"),
            ("LOCAL_WORLD_SIZE", "1"),
            ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", "29500"),
        ] {
            command.env(name, value);
        }
        command.envs(meant.map(|meant| ("CANDLE_TRAIN_SHORT_SECRET", meant)));
        let ended = command.output().unwrap();
        let said = String::from_utf8_lossy(&ended.stderr).into_owned();
        let code = if meant.is_some() { 0 } else { 2 };
        assert_eq!(ended.status.code(), Some(code), "{said}");
        said
    };
    assert!(rank(None).contains(said), "{}", rank(None));
    assert!(!rank(Some("1")).contains(said), "{}", rank(Some("1")));
}

#[test]
fn what_launchers_are_refused_for() {
    let hosts = Hosts::new();
    let refused = |options: &[&str], expected: &str| {
        let args = [options, &["touch", "started"]].concat();
        let ended = start_in(TempDir::new().unwrap(), &args, &|_| {}).exits(2);
        ended.says(&[expected]);
        assert!(!ended.path("started").exists());
    };
    let base = ["--nproc-per-node", "1", "--nnodes", "1:2"];
    refused(&base, "--nnodes needs --rdzv HOST:PORT");
    let with_rdzv = [&base[..], &["--rdzv", &hosts.rdzv]].concat();
    refused(&with_rdzv, "the launchers need a secret");
    for wrong in ["0", "2:1", "1:", "x", "0:2"] {
        refused(
            &["--nproc-per-node", "1", "--nnodes", wrong],
            "expected a number of hosts, or MIN:MAX",
        );
    }
    // Somebody else listens there, and hangs up.
    let busy = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let at = busy.local_addr().unwrap().to_string();
    std::thread::spawn(move || busy.incoming().for_each(drop));
    let stranger = Hosts {
        rdzv: at,
        ..Hosts::new()
    };
    let ended = stranger.start("a", 1, "2", &[], "true").exits(2);
    ended
        .sentence()
        .assert_has(&["is taken, and not by a launcher of this run: "]);
    // Another program, or another secret.
    let first = hosts.start("a", 1, "2", &[], "true");
    let other = hosts.start("b", 1, "2", &[], "false").exits(2);
    other
        .sentence()
        .assert_has(&["this host was told to run \"sh -c false\""]);
    let stranger = Hosts {
        rdzv: hosts.rdzv.clone(),
        ..Hosts::new()
    };
    std::fs::write(stranger.secret.path(), "another long one").unwrap();
    let ended = stranger.start("b", 1, "2", &[], "true").exits(2);
    ended
        .sentence()
        .assert_has(&["does not know this run's secret"]);
    assert!(
        first
            .processes()
            .iter()
            .all(|(_, command)| !command.contains(" agent"))
    );
}
