//! `--max-restarts`: which failures are started again, where, and what the ranks are told.

use std::path::Path;
use std::time::{Duration, Instant};

use super::launching::{
    Ended, Launching, run_script, start, start_in, start_script, wait_until, write_script,
};
use crate::cli::program::AssertText;
use nix::sys::signal::Signal;
use tempfile::TempDir;

/// The launcher's own lines.
fn said(ended: &Ended) -> Vec<&str> {
    let lines = ended.err.lines();
    lines
        .filter_map(|line| line.strip_prefix("candle-train: "))
        .collect()
}

/// A shell's word for how often the ranks were started before.
const COUNT: &str = "$CANDLE_TRAIN_RESTART_COUNT";

#[test]
fn all_ranks_are_started_again_until_they_succeed() {
    let script = format!(
        "echo {COUNT} $CANDLE_TRAIN_RUN_TOKEN $MASTER_PORT > seen-{COUNT}-$RANK\n\
         [ $RANK = 1 ] || exec sleep $((1000 * (2 - {COUNT})))\n\
         case {COUNT} in 0) kill -9 $$ ;; 1) exit 3 ;; esac"
    );
    let ended = run_script(2, &["--max-restarts", "5"], &script).exited(0);
    let said = said(&ended);
    assert!(said[0].starts_with("rank 1 (host "), "{}", ended.err);
    assert!(said[0].ends_with("failed first: killed by SIGKILL; restart 1 of 5"));
    assert!(
        said[1].ends_with("failed first: exit code 3; restart 2 of 5"),
        "{}",
        ended.err
    );
    assert_eq!(said[2..], ["the run is complete, after 2 restarts"]);
    let seen = |count: usize, rank: usize| {
        let name = format!("seen-{count}-{rank}");
        std::fs::read_to_string(ended.path(&name)).unwrap()
    };
    for count in 0..3 {
        assert!(seen(count, 0).starts_with(&format!("{count} ")));
        assert_eq!(seen(count, 0), seen(count, 1));
    }
    // Nobody of an earlier start gets in: the token is another one.
    let token = |count| seen(count, 0).split(' ').nth(1).map(String::from);
    assert_ne!(token(0), token(1));
}

#[test]
fn the_last_failure_counts_when_no_restart_is_left() {
    let script = format!("echo why >&2; exit $((5 + {COUNT}))");
    let ended = run_script(1, &["--max-restarts", "2"], &script).exited(7);
    let sentence = ended.sentence();
    assert!(
        sentence.ends_with(
            "failed first: exit code 7\n--max-restarts 2 are used up\nthe last lines it wrote to stderr:\n    why\n"
        ),
        "{sentence}"
    );
    assert_eq!(said(&ended).len(), 3, "{}", ended.err);
}

#[test]
fn what_would_fail_again_and_what_was_asked_to_stop_is_not_started_again() {
    for (end, code, reason) in [
        ("exit 2", 2, "exit code 2 means that it would fail again"),
        (
            "exit 127",
            127,
            "exit code 127 means that it would fail again",
        ),
        ("kill -TERM $$", 143, "it was asked to stop, by SIGTERM"),
        ("exit 130", 130, "it was asked to stop, by SIGINT"),
        ("exit 138", 138, "it was asked to stop, by SIGUSR1"),
    ] {
        let script = format!("touch started-{COUNT}; {end}");
        let ended = run_script(1, &["--max-restarts", "3"], &script).exited(code);
        ended
            .sentence()
            .assert_has(&[&format!("\nthe ranks are not started again: {reason}\n")]);
        assert!(!ended.path("started-1").exists());
    }
}

#[test]
fn a_signal_to_the_launcher_ends_it_all() {
    let script = "trap 'exit 1' TERM; touch up; sleep 1000 & wait";
    let launching = start_script(1, &["--max-restarts", "3"], script);
    launching.await_files(&["up"]);
    launching.signal(Signal::SIGTERM);
    let ended = launching.wait();
    let passed_on =
        "SIGTERM: passed on to the ranks, which have 300 s to end; again kills them at once";
    assert_eq!(said(&ended), [passed_on, "stopped by SIGTERM"]);
}

#[test]
fn nothing_of_the_earlier_start_is_left() {
    // Deaf processes, one in a session of its own; the next start looks for them.
    let script = format!(
        "if [ {COUNT} = 1 ]; then for pid in $(cat pids); do kill -0 $pid 2> /dev/null && echo $pid is alive; done; exit 0; fi\n\
         trap '' TERM; setsid sleep 1000 & echo $! $$ >> pids; touch up$RANK\n\
         [ $RANK = 1 ] && until [ -e up0 ]; do sleep 0.01; done && exit 1\n\
         while :; do sleep 1000; done"
    );
    let options = ["--max-restarts", "1", "--grace-secs", "0.2"];
    let ended = run_script(2, &options, &script).exited(0);
    assert_eq!(ended.sorted_lines(), [""; 0]);
    let pids = std::fs::read_to_string(ended.path("pids")).unwrap();
    assert_eq!(pids.split_whitespace().count(), 4);
}

/// Two hosts, of which b is cut off as soon as its rank of the first start is up; the others find it as `then` says.
fn start_with_a_lost_host(then: &str, options: &[&str], script: &str) -> Launching {
    let folder = TempDir::new().unwrap();
    std::fs::write(folder.path().join("hosts"), "a slots=1\nb slots=2\n").unwrap();
    // The agent is not in the group of ssh.
    let ssh = format!(
        "host=$1; shift\n\
         if [ $host = b ] && [ -e cut ]; then {then}; elif [ $host = b ]; then\n\
         (until [ -e up1 ]; do sleep 0.01; done; touch cut; kill -9 0) & cat | setsid sh -c \"$*\" | cat; fi\n\
         exec sh -c \"$*\""
    );
    write_script(&folder.path().join("ssh"), &ssh);
    let first = [
        "--hostfile",
        "hosts",
        "--ssh",
        "./ssh",
        "--max-restarts",
        "1",
    ];
    let quick = ["--grace-secs", "0.1"];
    let args = [&first[..], &quick, options, &["sh", "-c", script]].concat();
    start_in(folder, &args, &|_| {})
}

const SOON: [&str; 2] = ["--silence-secs", "3"];
const TOUCH_AND_WAIT: &str = "echo $CANDLE_TRAIN_RESTART_COUNT $RANK/$WORLD_SIZE on $CANDLE_TRAIN_HOST, $GROUP_RANK/$GROUP_WORLD_SIZE; \
     touch up$RANK; [ $CANDLE_TRAIN_RESTART_COUNT = 1 ] || exec sleep 1000";

/// The lines of the second start.
fn second_start(ended: &Ended) -> Vec<String> {
    let lines = ended.sorted_lines().into_iter();
    lines.filter(|line| line.contains("] 1 ")).collect()
}

#[test]
fn the_run_goes_on_without_a_host_that_is_lost() {
    let begin = Instant::now();
    let gone = "echo no route >&2; exit 255";
    let options = ["--nnodes", "1:2", "--silence-secs", "3"];
    let ended = start_with_a_lost_host(gone, &options, TOUCH_AND_WAIT).exits(0);
    assert_eq!(second_start(&ended), ["[rank 0] 1 0/1 on a, 0/1"]);
    // In which an agent that hears nothing has ended its ranks.
    assert!(begin.elapsed() > Duration::from_secs(3));
    let said = said(&ended);
    assert!(
        said[0].starts_with("lost host b with ranks 1 to 2: "),
        "{}",
        ended.err
    );
    assert!(said[0].contains("; restart 1 of 1, in "), "{}", ended.err);
    assert!(
        said[1].ends_with("; 1 of 2 hosts are left"),
        "{}",
        ended.err
    );
    assert_eq!(said[2..], ["the run is complete, after 1 restarts"]);
}

#[test]
fn a_host_that_is_back_takes_part_again() {
    let ended = start_with_a_lost_host("exec sh -c \"$*\"", &SOON, TOUCH_AND_WAIT).exits(0);
    let lines = [
        "[rank 0] 1 0/3 on a, 0/2",
        "[rank 1] 1 1/3 on b, 1/2",
        "[rank 2] 1 2/3 on b, 1/2",
    ];
    assert_eq!(second_start(&ended), lines);
}

#[test]
fn too_few_hosts_end_the_run() {
    let ended = start_with_a_lost_host("exit 255", &SOON, TOUCH_AND_WAIT).exits(1);
    ended
        .sentence()
        .assert_has(&["\n1 of 2 hosts are left, and --nnodes asks for 2\n"]);
    assert!(second_start(&ended).is_empty());
}

/// Host a is lost, b fails alone, and a alone, which is new to those that ran last, cannot go on.
#[test]
fn the_only_host_that_is_left_of_a_file_is_never_done_without() {
    let folder = TempDir::new().unwrap();
    std::fs::write(folder.path().join("hosts"), "a slots=1\nb slots=1\n").unwrap();
    let ssh = "case $1 in a) [ -e up-0 ] && [ ! -e up-1 ] ;; b) [ -e up-1 ] ;; esac && exit 255\n\
        shift; exec sh -c \"$*\"";
    write_script(&folder.path().join("ssh"), ssh);
    let script = format!(
        "touch up-{COUNT}\n\
         case {COUNT}-$CANDLE_TRAIN_HOST in 0-a) kill -9 $PPID ;; 1-b) exit 3 ;; 2-a) exit 87 ;; esac\n\
         exec sleep 1000"
    );
    let hosts = ["--hostfile", "hosts", "--ssh", "./ssh", "--nnodes", "1:2"];
    let quick = ["--max-restarts", "2", "--grace-secs", "0.1"];
    let args = [&hosts[..], &quick, &SOON, &["sh", "-c", &script]].concat();
    let ended = start_in(folder, &args, &|_| {}).exits(87);
    let sentence = ended.sentence();
    sentence.assert_has(&["rank 0 (host a, pid "]);
    let note = "failed first: exit code 87\n--max-restarts 2 are used up\n";
    assert!(sentence.ends_with(note), "{sentence}");
}

#[test]
fn a_signal_while_a_host_is_waited_for() {
    let launching = start_with_a_lost_host("exit 255", &["--silence-secs", "500"], TOUCH_AND_WAIT);
    let is_waiting = || {
        let said = std::fs::read_to_string(launching.path("stderr")).unwrap();
        said.contains("; restart 1 of 1, in 50")
    };
    wait_until("the end of the ranks", is_waiting);
    launching.signal(Signal::SIGINT);
    let ended = launching.exits(130);
    assert_eq!(ended.sentence(), "candle-train: stopped by SIGINT\n");
}

#[test]
fn options_that_contradict_each_other() {
    let folder = TempDir::new().unwrap();
    let hosts = folder.path().join("hosts").display().to_string();
    std::fs::write(Path::new(&hosts), "a slots=1\nb slots=1\n").unwrap();
    let of_hosts = ["--hostfile", hosts.as_str()];
    for (options, part) in [
        (
            [&of_hosts[..], &["--nnodes", "1:3"]].concat(),
            "expected at most the 2 hosts of the host file, got 3",
        ),
        (
            [&of_hosts[..], &["--nnodes", "1:2", "--rdzv", "a:29511"]].concat(),
            "--nnodes and --rdzv",
        ),
    ] {
        let ended = start(&[&options[..], &["true"]].concat()).exits(2);
        ended.sentence().assert_has(&[part]);
    }
}
