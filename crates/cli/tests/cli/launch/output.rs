//! How the output of ranks is shown.

use std::fs::File;

use super::launching::{Ended, run_script, start_in};
use tempfile::TempDir;

fn contains(text: &[u8], part: &[u8]) -> bool {
    text.windows(part.len()).any(|window| window == part)
}

#[test]
fn both_outputs_have_the_label_and_their_own_way() {
    let ended = run_script(2, &[], "echo to out; echo to err >&2");
    assert_eq!(ended.sorted_lines(), ["[rank 0] to out", "[rank 1] to out"]);
    let mut lines: Vec<&str> = ended.err.lines().collect();
    lines.sort();
    assert_eq!(lines, ["[rank 0] to err", "[rank 1] to err"]);
}

#[test]
fn parts_carriage_returns_and_other_bytes() {
    // A line written in two parts, a progress bar, the line ends of Windows, bytes that are no text, no end at the end.
    let script = r"printf 'one '; sleep 0.1; printf 'line\n'; printf '1%%\r2%%\r\n'; printf 'crlf\r\n'; printf '\377\376\000\n\n'; printf 'end'";
    let ended = run_script(1, &[], script);
    let expected = b"[rank 0] one line\n[rank 0] 1%\r[rank 0] 2%\r\n[rank 0] crlf\r\n[rank 0] \xff\xfe\0\n[rank 0] \n[rank 0] end\n";
    assert_eq!(
        ended.out.escape_ascii().to_string(),
        expected.escape_ascii().to_string()
    );
}

#[test]
fn log_files_have_the_bytes_and_are_continued() {
    let folder = TempDir::new().unwrap();
    std::fs::create_dir(folder.path().join("logs")).unwrap();
    std::fs::write(folder.path().join("logs/rank-1.out"), "earlier\n").unwrap();
    let args = [
        "--nproc-per-node",
        "2",
        "--log-dir",
        "logs",
        "sh",
        "-c",
        r"printf 'a\rb\377'; echo $RANK >&2",
    ];
    let ended = start_in(folder, &args, &|_| {}).wait();
    let log = |name: &str| std::fs::read(ended.path("logs").join(name)).unwrap();
    assert_eq!(log("rank-0.out"), b"a\rb\xff");
    assert_eq!(log("rank-1.out"), b"earlier\na\rb\xff");
    assert_eq!(log("rank-0.err"), b"0\n");
    assert_eq!(log("rank-1.err"), b"1\n");
    assert!(contains(&ended.out, b"[rank 1] b\xff\n"));
}

#[test]
fn much_output_arrives_whole() {
    // Far more than pipes hold, at once on both outputs of both ranks, partly without any line's end.
    let script = "yes 0123456789 | head -c 1100000 & yes e | head -c 400000 >&2 & head -c 3000000 /dev/zero; wait";
    let ended = run_script(2, &[], script).exited(0);
    let count = |text: &[u8], byte: u8| text.iter().filter(|other| **other == byte).count();
    assert_eq!(count(&ended.out, b'9'), 2 * 100_000);
    assert_eq!(count(&ended.out, 0), 2 * 3_000_000);
    assert_eq!(ended.err.matches("[rank 0] e\n").count(), 200_000);
}

/// Runs with stdout and stderr in one file, as on a terminal.
fn run_on_terminal(args: &[&str]) -> (Ended, String) {
    let ended = start_in(TempDir::new().unwrap(), args, &|command| {
        let folder = command.get_current_dir().unwrap();
        let file = File::options()
            .append(true)
            .create(true)
            .open(folder.join("both"))
            .unwrap();
        command.stdout(file.try_clone().unwrap()).stderr(file);
    });
    let ended = ended.wait();
    let both = std::fs::read(ended.path("both")).unwrap();
    (ended, String::from_utf8_lossy(&both).into_owned())
}

#[test]
fn the_failure_is_last_also_where_others_flood() {
    let script = "[ $RANK = 1 ] || exec yes flood; until [ -e go ]; do sleep 0.01; done; echo out; echo why >&2; exit 3";
    let (ended, both) = run_on_terminal(&[
        "--nproc-per-node",
        "3",
        "sh",
        "-c",
        &format!("touch go; {script}"),
    ]);
    assert_eq!(ended.code, Some(3));
    let tail = &both[both.rfind("candle-train: ").unwrap()..];
    assert!(tail.starts_with("candle-train: rank 1 (host "), "{tail}");
    assert!(
        tail.ends_with("failed first: exit code 3\nthe last lines it wrote to stderr:\n    why\n"),
        "{tail}"
    );
    assert!(both.contains("[rank 1] out\n"));
    assert!(both.contains("[rank 2] flood\n"));
}

#[test]
fn a_closed_stdout_does_not_end_the_run() {
    let args = [
        "--nproc-per-node",
        "1",
        "sh",
        "-c",
        "yes | head -c 1000000; touch through",
    ];
    let launching = start_in(TempDir::new().unwrap(), &args, &|command| {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        command.stdout(writer);
    });
    let ended = launching.exits(0);
    assert!(ended.path("through").exists());
}

#[test]
fn a_link_in_the_place_of_a_log_file_is_refused() {
    let folder = TempDir::new().unwrap();
    std::fs::create_dir(folder.path().join("logs")).unwrap();
    std::fs::write(folder.path().join("thesis"), "years of work").unwrap();
    std::os::unix::fs::symlink("../thesis", folder.path().join("logs/rank-0.err")).unwrap();
    let args = ["--nproc-per-node", "1", "--log-dir", "logs", "echo", "a"];
    let ended = start_in(folder, &args, &|_| {}).wait();
    let said = "cannot open log file logs/rank-0.err: logs/rank-0.err is a link to ../thesis";
    assert!(ended.err.contains(said), "{}", ended.err);
    assert_eq!(
        std::fs::read_to_string(ended.path("thesis")).unwrap(),
        "years of work"
    );
}
