//! What is found before anything starts.

use super::launching::{Ended, start, start_in, write_script};
use crate::cli::program::AssertText;
use tempfile::TempDir;

/// The launcher's words where it starts nothing.
fn refused(args: &[&str]) -> String {
    let ended = start(args).wait();
    check_refused(&ended, args)
}

fn check_refused(ended: &Ended, args: &[&str]) -> String {
    assert_eq!(ended.code, Some(2), "{args:?}: {}", ended.err);
    assert!(!ended.path("started").exists(), "{args:?}");
    ended.err.clone()
}

const TOUCH: [&str; 2] = ["touch", "started"];

#[test]
fn options_that_make_no_sense() {
    for (options, expected) in [
        (
            &["--nproc-per-node", "1", "--nnodes", "2", "--rdzv", "a:1"][..],
            "--nnodes: the launchers need a secret",
        ),
        (
            &["--nproc-per-node", "1", "--nnodes", "2"],
            "--nnodes needs --rdzv HOST:PORT, the same on all hosts",
        ),
        (
            &["--nproc-per-node", "1", "--rdzv", "no.such.host.invalid:1"],
            "--rdzv: the host name \"no.such.host.invalid\" is not known here",
        ),
        (
            &["--nproc-per-node", "1", "--grace-secs", "-1"],
            "--grace-secs: expected a time from 0",
        ),
        (
            &["--nproc-per-node", "1", "--silence-secs", "9"],
            "--silence-secs is for the hosts of a --hostfile",
        ),
        (
            &["--nproc-per-node", "1", "--env", "NO_SUCH_VARIABLE"],
            "--env NO_SUCH_VARIABLE: environment variable not found",
        ),
        (
            &["--nproc-per-node", "1", "--ssh", "rsh"],
            "--ssh is for the hosts of a --hostfile, which is not given",
        ),
        (
            &["--nproc-per-node", "1", "--env", "=x"],
            "--env: expected NAME or NAME=VALUE, got \"=x\"",
        ),
        (
            &["--nproc-per-node", "1", "--env", "RANK=3"],
            "--env RANK: the launcher sets this variable itself",
        ),
        (
            &["--nproc-per-node", "1", "--log-dir", "/dev/null/x"],
            "cannot create log folder /dev/null/x: ",
        ),
    ] {
        let text = refused(&[options, &TOUCH].concat());
        text.assert_begins(&format!("candle-train: {expected}"));
    }
    for (options, expected) in [
        (&[][..], "--nproc-per-node <N>"),
        (&["--nproc-per-node", "x"], "invalid value 'x'"),
        (
            &["--nproc-per-node", "0"],
            "invalid value '0' for '--nproc-per-node <N>': expected a whole number >= 1",
        ),
        (
            &["--nproc-per-node", "1", "--nnodes", "-1"],
            "invalid value '-1' for '--nnodes <HOSTS|MIN:MAX>': expected a number of hosts, or MIN:MAX",
        ),
        (
            &["--nproc-per-node", "1", "--hostfile", "hosts"],
            "cannot be used with",
        ),
        (
            &["--nproc-per-node", "1", "--rdzv", "host"],
            "expected HOST:PORT with a port from 1 to 65535, got \"host\"",
        ),
        (
            &["--nproc-per-node", "1", "--rdzv", "::1:99999"],
            "expected HOST:PORT",
        ),
        (
            &["--nproc-per-node", "1", "--rdzv", "fe80::1:22"],
            "expected HOST:PORT",
        ),
    ] {
        let text = refused(&[options, &TOUCH].concat());
        text.assert_has(&[expected]);
    }
    assert!(refused(&["--nproc-per-node", "1"]).contains("<PROGRAM>"));
}

#[test]
fn programs_that_cannot_run() {
    let folder = TempDir::new().unwrap();
    write_script(&folder.path().join("train"), "touch started");
    let ended = start_in(folder, &["--nproc-per-node", "2", "train"], &|_| {}).wait();
    let text = check_refused(&ended, &[]);
    text.assert_begins(
        "candle-train: program \"train\" is not in any folder of PATH\nhint: it is in /",
    );
    assert!(text.ends_with(": write ./train\n"), "{text}");
    for (program, expected) in [
        (
            "no-such-program",
            "program \"no-such-program\" is not in any folder of PATH\nhint: give its path\n",
        ),
        ("./nothing", "/./nothing: No such file or directory"),
        ("/", "cannot run program /: it is a folder"),
        (
            "/etc/passwd",
            "cannot run program /etc/passwd: it is not executable",
        ),
    ] {
        let text = refused(&["--nproc-per-node", "1", program]);
        text.assert_begins("candle-train: ");
        text.assert_has(&[expected]);
    }
}

#[test]
fn a_file_that_the_system_cannot_run() {
    let folder = TempDir::new().unwrap();
    write_script(&folder.path().join("train"), "");
    std::fs::write(folder.path().join("train"), "#!/no/such/interpreter\n").unwrap();
    let ended = start_in(folder, &["--nproc-per-node", "1", "./train"], &|_| {}).exits(127);
    ended
        .sentence()
        .assert_has(&["failed first: exit code 127"]);
    ended.says(&["    candle-train: cannot run ./train: No such file"]);
}

#[test]
fn a_port_that_is_taken() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let rdzv = format!("127.0.0.1:{port}");
    let text = refused(&[&["--nproc-per-node", "1", "--rdzv", &rdzv][..], &TOUCH].concat());
    text.assert_begins(&format!(
        "candle-train: --rdzv: port {port} of 127.0.0.1 is taken\nhint: "
    ));
}

#[test]
fn host_files() {
    for (text, expected) in [
        ("", "host file hosts names no host\nhint: "),
        ("# nothing\n\n", "host file hosts names no host\nhint: "),
        (
            "a slots=1\nb\n",
            "host file hosts, line 2: expected `host slots=4`, got \"b\"",
        ),
        (
            "a slots=1 b",
            "host file hosts, line 1: expected `host slots=4`, got \"a slots=1 b\"",
        ),
        (
            "a slot=1",
            "host file hosts, line 1: expected `host slots=4`, got \"a slot=1\"",
        ),
        (
            "a slots=0",
            "host file hosts, line 1: expected slots=NUMBER, at least 1, got slots=0",
        ),
        (
            "a slots=-1",
            "host file hosts, line 1: expected slots=NUMBER, at least 1, got slots=-1",
        ),
        (
            "-oProxyCommand=x slots=1",
            "host file hosts, line 1: expected a host name, got \"-oProxyCommand=x\"",
        ),
        (
            "#\na slots=1\nb slots=1\na slots=2 # again",
            "host file hosts, line 4: host \"a\" stands in line 2 already",
        ),
        (
            "localhost slots=1\nb slots=1",
            "the ranks would meet on the first host, but its name \"localhost\" means another",
        ),
    ] {
        let folder = TempDir::new().unwrap();
        std::fs::write(folder.path().join("hosts"), text).unwrap();
        let args = [&["--hostfile", "hosts", "--ssh", "false"][..], &TOUCH].concat();
        let words = check_refused(&start_in(folder, &args, &|_| {}).wait(), &[text]);
        assert!(
            words.starts_with(&format!("candle-train: {expected}")),
            "{text:?}: {words}"
        );
    }
    let folder = TempDir::new().unwrap();
    std::fs::write(folder.path().join("hosts"), "a slots=1").unwrap();
    let args = ["--hostfile", "hosts", "--silence-secs", "1", "true"];
    let words = check_refused(&start_in(folder, &args, &|_| {}).wait(), &args);
    let expected =
        "candle-train: --silence-secs: expected a time from 3 to 1000000 seconds, got 1\n";
    assert_eq!(words, expected);
    let missing = refused(&[&["--hostfile", "missing"][..], &TOUCH].concat());
    missing.assert_begins("candle-train: cannot read host file missing: No such file");
}
