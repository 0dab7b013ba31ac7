//! Runs on several "hosts": agents started through a stand-in for ssh, or one launcher per host.

use std::io::Write;
use std::process::Command;

use super::launching::{Ended, Launching, MARK, spawn, start_in, write_script};
use crate::cli::program::AssertText;
use nix::sys::signal::Signal;
use tempfile::TempDir;

/// As ssh: a greeting, a home folder and an environment of its own, and a shell that reads the command's words.
fn fake_ssh() -> String {
    format!(
        "echo \"$@\" >> ssh.log; host=$1; shift; echo \"Welcome to $host\"\n\
         cd / && exec env -i PATH=\"$PATH\" {MARK}=\"${MARK}\" HOST=\"$host\" sh -c \"$*\""
    )
}

fn folder_with(hosts: &str, ssh: &str) -> TempDir {
    let folder = TempDir::new().unwrap();
    std::fs::write(folder.path().join("hosts"), hosts).unwrap();
    write_script(&folder.path().join("ssh"), ssh);
    folder
}

fn start_hosts(hosts: &str, ssh: &str, options: &[&str], script: &str) -> Launching {
    let first = ["--hostfile", "hosts", "--ssh", "./ssh"];
    let args = [&first, options, &["sh", "-c", script]].concat();
    start_in(folder_with(hosts, ssh), &args, &|command| {
        command.env("NCCL_DEBUG", "WARN").env("PRIVATE", "secret");
    })
}

fn run_hosts(hosts: &str, options: &[&str], script: &str) -> Ended {
    start_hosts(hosts, &fake_ssh(), options, script).wait()
}

#[test]
fn two_hosts_over_ssh() {
    let script = "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $GROUP_RANK/$GROUP_WORLD_SIZE $CANDLE_TRAIN_HOST=$HOST $MASTER_ADDR $NCCL_DEBUG $GIVEN $PRIVATE.; pwd > pwd$RANK";
    let ended = run_hosts(
        "# both\nbig slots=2\n\nsmall   slots=1 # slow\n",
        &["--env", "GIVEN=x"],
        script,
    )
    .exited(0);
    assert_eq!(
        ended.sorted_lines(),
        [
            "[rank 0] 0/3 0/2 0/2 big=big big WARN x .",
            "[rank 1] 1/3 1/2 0/2 big=big big WARN x .",
            "[rank 2] 2/3 0/1 1/2 small=small big WARN x .",
        ]
    );
    let mut notices: Vec<&str> = ended.err.lines().collect();
    notices.sort();
    assert_eq!(
        notices,
        ["[host big] Welcome to big", "[host small] Welcome to small"]
    );
    // The ranks work where the launcher was started, and nothing but the agent shows in its command.
    assert!(ended.path("pwd2").exists());
    let log = std::fs::read_to_string(ended.path("ssh.log")).unwrap();
    assert!(
        log.lines().all(|line| line.ends_with("candle-train agent")),
        "{log}"
    );
}

/// The agents that are there sooner hear meanwhile that the launcher lives.
#[test]
fn a_host_that_is_slow_to_answer() {
    let ssh = format!("[ $1 = b ] && sleep 2.5\n{}", fake_ssh());
    let ended = start_hosts("a slots=1\nb slots=1\n", &ssh, &[], "echo here").exits(0);
    let lines = ["[rank 0] here", "[rank 1] here"];
    assert_eq!(ended.sorted_lines(), lines, "{}", ended.err);
}

#[test]
fn a_failure_on_one_host_ends_the_other() {
    let ended = run_hosts(
        "a slots=1\nb slots=1\n",
        &[],
        "[ $RANK = 0 ] && exec sleep 1000; echo why >&2; exit 3",
    )
    .exited(3);
    let sentence = ended.sentence();
    sentence.assert_begins("candle-train: rank 1 (host b, pid ");
    assert!(
        sentence
            .ends_with("failed first: exit code 3\nthe last lines it wrote to stderr:\n    why\n"),
        "{sentence}"
    );
}

#[test]
fn signals_reach_all_hosts() {
    let script = "trap 'echo got; exit 1' TERM; touch up$RANK; sleep 1000 & wait";
    let launching = start_hosts("a slots=1\nb slots=1\n", &fake_ssh(), &[], script);
    launching.await_files(&["up0", "up1"]);
    launching.signal(Signal::SIGTERM);
    let ended = launching.wait();
    assert_eq!(ended.sorted_lines(), ["[rank 0] got", "[rank 1] got"]);
}

#[test]
fn after_sigkill_of_the_launcher_no_host_goes_on() {
    let script =
        "trap '' TERM HUP; setsid sleep 1000 & touch up$RANK; while :; do sleep 1000; done";
    let mut launching = start_hosts(
        "a slots=1\nb slots=1\n",
        &fake_ssh(),
        &["--grace-secs", "0.2"],
        script,
    );
    launching.await_files(&["up0", "up1"]);
    launching.signal(Signal::SIGKILL);
    launching.wait_until_nobody_left();
}

#[test]
fn a_host_that_cannot_be_reached() {
    let ssh = format!(
        "[ $1 = b ] && {{ echo ssh: no route to host b >&2; exit 255; }}\n{}",
        fake_ssh()
    );
    let ended = start_hosts("a slots=1\nb slots=2\n", &ssh, &[], "touch started").exits(2);
    let sentence = ended.sentence();
    sentence.assert_begins("candle-train: lost host b with ranks 1 to 2: the connection ended before the agent answered (exit status: 255)\n\
             the last lines it wrote to stderr:\n    ssh: no route to host b\nhint: ");
    assert!(!ended.path("started").exists());
}

#[test]
fn a_connection_that_is_lost_ends_the_other_host() {
    // Host b's connection, which is all in the group of ssh, ends as soon as its rank runs.
    let cut = "(until [ -e up1 ]; do sleep 0.01; done; kill -9 0) &";
    let ssh = format!(
        "[ $1 = b ] && {{ {cut} shift; cat | setsid sh -c \"$*\" | cat; }}\n{}",
        fake_ssh()
    );
    let ended = start_hosts(
        "a slots=1\nb slots=1\n",
        &ssh,
        &[],
        "touch up$RANK; exec sleep 1000",
    )
    .exits(1);
    ended
        .sentence()
        .assert_begins("candle-train: lost host b with rank 1: ");
}

#[test]
fn nothing_starts_where_one_host_cannot() {
    // On b the program's folder is missing.
    let ssh = format!(
        "[ $1 = b ] && PATH=/nowhere\n{}",
        fake_ssh()
            .replace("exec env", "exec /usr/bin/env")
            .replace(" sh -c", " /bin/sh -c")
    );
    let ended = start_hosts("a slots=1\nb slots=1\n", &ssh, &[], "touch started").exits(2);
    ended
        .sentence()
        .assert_begins("candle-train: host b: program \"sh\" is not in any folder of PATH\nhint: ");
    assert!(!ended.path("started").exists());
}

#[test]
fn an_agent_that_cannot_start_all_its_ranks() {
    // It has pipes for the first ones only.
    let ssh = format!("[ $1 = b ] && ulimit -n 24\n{}", fake_ssh());
    let ended = start_hosts("a slots=1\nb slots=20\n", &ssh, &[], "exec sleep 1000").exits(1);
    ended
        .sentence()
        .assert_begins("candle-train: host b: cannot start rank ");
}

#[test]
fn an_agent_that_is_told_to_end_before_the_start() {
    // While host b has not answered.
    let of_a = "shift; exec 3<&0; sh -c \"exec $*\" <&3 & sleep 1; kill $!; wait; exit";
    let ssh = format!("[ $1 = a ] && {{ {of_a}; }}\nsleep 3\n{}", fake_ssh());
    let ended = start_hosts("a slots=1\nb slots=1\n", &ssh, &[], "touch started").exits(2);
    let expected = "candle-train: lost host a with rank 0: the connection to its agent ended";
    ended.sentence().assert_begins(expected);
    assert!(!ended.path("started").exists());
}

#[test]
fn an_agent_that_does_not_understand_the_launcher() {
    // A message that it does not know, `{}`, comes first.
    let first = r"printf '\2\0\0\0\0\0\0\0{}'";
    let ssh = format!("shift; {{ {first}; cat; }} | sh -c \"$*\"");
    let ended = start_hosts("a slots=1\n", &ssh, &[], "true").exits(2);
    let expected = "candle-train: host a: its agent does not understand the launcher: ";
    ended.sentence().assert_begins(expected);
}

#[test]
fn an_agent_that_understands_the_launcher_no_more() {
    let unknown = r"printf '\2\0\0\0\0\0\0\0{}'";
    let ssh = format!(
        "shift; exec 3<&0; {{ cat <&3 & until [ -e up ]; do sleep 0.01; done; {unknown}; wait; }} | sh -c \"$*\""
    );
    let script = "touch up; exec sleep 1000";
    let ended = start_hosts("a slots=1\n", &ssh, &[], script).exits(1);
    let expected = "candle-train: host a: its agent does not understand the launcher: ";
    ended.sentence().assert_begins(expected);
}

#[test]
fn another_version_on_a_host() {
    let ended = start_hosts(
        "a slots=1\n",
        "echo candle-train agent 0.0.0; cat > /dev/null",
        &[],
        "true",
    )
    .exits(2);
    ended
        .sentence()
        .assert_has(&["it runs \"candle-train agent 0.0.0\", this is \"candle-train agent "]);
}

#[test]
fn an_agent_that_announces_too_much() {
    let greeting = concat!("candle-train agent ", env!("CARGO_PKG_VERSION"));
    // The lengths of a message and of the bytes that belong to it.
    let ssh = format!("echo '{greeting}'; printf '\\377%.0s' 1 2 3 4 5 6 7 8; cat > /dev/null");
    let ended = start_hosts("a slots=1\n", &ssh, &[], "true").exits(2);
    let says = "the agent's answer is not understood: a frame of 4294967295 and 4294967295 bytes, at most ";
    ended.sentence().assert_has(&[says]);
}

#[test]
fn a_host_that_falls_silent() {
    // All that connects host b stands still as soon as its rank runs, but stays open.
    let stop = "(until [ -e up1 ]; do sleep 0.01; done; kill -STOP 0) &";
    let ssh = format!(
        "[ $1 = b ] && {{ {stop} shift; cat | setsid sh -c \"$*\" | cat; }}\n{}",
        fake_ssh()
    );
    let options = ["--silence-secs", "3"];
    let script = "touch up$RANK; exec sleep 1000";
    let ended = start_hosts("a slots=1\nb slots=1\n", &ssh, &options, script).exits(1);
    let expected =
        "candle-train: lost host b with rank 1: nothing was heard from it for --silence-secs";
    ended.sentence().assert_begins(expected);
}

#[test]
fn an_agent_that_hears_nothing_ends_its_ranks() {
    let folder = TempDir::new().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_candle-train"));
    command.arg("agent");
    let mut agent = spawn(folder, command, &|_| {});
    let plan = format!(
        r#"{{"Plan":{{"program":"sh","args":["-c","setsid sleep 1000 & touch up; exec sleep 1000"],"folder":"{}","env":[],"first_rank":0,"num_ranks":1,"grace_ms":0,"silence_ms":1000}}}}"#,
        agent.path("").display()
    );
    // The pipe stays open.
    let mut stdin = agent.take_stdin();
    for message in [plan.as_str(), "\"Start\""] {
        let len = u32::try_from(message.len()).unwrap().to_le_bytes();
        let frame = [&len[..], &[0; 4], message.as_bytes()].concat();
        stdin.write_all(&frame).unwrap();
    }
    stdin.flush().unwrap();
    agent.await_files(&["up"]);
    agent.wait();
}
