//! Which failure is named, and what becomes of the other ranks.

use super::launching::{run_script, start_script};
use crate::cli::program::AssertText;
use candle_launch::PEER_FAILED_EXIT_CODE;

#[test]
fn exit_codes_and_signals_by_name() {
    // SIGTERM ends the other rank, long before the grace time.
    let options = ["--grace-secs", "1000"];
    for (end, code, named) in [
        ("exit 3", 3, "failed first: exit code 3\n"),
        ("kill -9 $$", 137, "failed first: killed by SIGKILL\n"),
        ("kill -SEGV $$", 139, "failed first: killed by SIGSEGV\n"),
    ] {
        let ended = run_script(
            2,
            &options,
            &format!("[ $RANK = 0 ] || {{ {end}; }}; exec sleep 1000"),
        )
        .exited(code);
        let sentence = ended.sentence();
        sentence.assert_begins("candle-train: rank 1 (host ");
        sentence.assert_has(&[", pid "]);
        sentence.assert_has(&[named]);
    }
}

#[test]
fn ranks_may_be_lost_but_not_too_many_and_not_the_first() {
    let script = "if [ $RANK = 2 ]; then kill -9 $$; fi; sleep 0.5; echo on; [ $RANK != $WORST ]";
    let run = |may_lose: &str, worst: &str| {
        let worst = format!("WORST={worst}");
        run_script(3, &["--may-lose", may_lose, "--env", &worst], script)
    };
    let ended = run("1", "9").exited(0);
    assert_eq!(
        String::from_utf8_lossy(&ended.out).matches("on\n").count(),
        2
    );
    ended.says(&["failed: killed by SIGKILL; the others go on, as --may-lose says\n"]);
    for (may_lose, worst) in [("0", "9"), ("1", "1"), ("1", "0"), ("2", "0")] {
        let ended = run(may_lose, worst);
        assert_eq!(ended.code, Some(137), "{may_lose} {worst}: {}", ended.err);
        let named = ended.sentence().starts_with("candle-train: rank 2 (host ");
        assert!(
            named
                && ended
                    .sentence()
                    .contains("failed first: killed by SIGKILL\n"),
            "{}",
            ended.err
        );
    }
    assert_eq!(run("2", "1").code, Some(0));
}

#[test]
fn the_last_lines_on_stderr_are_repeated() {
    let script = "i=0; while [ $i -lt 50 ]; do echo line $i >&2; i=$((i+1)); done; echo >&2; printf 'no end' >&2; exit 1";
    let ended = run_script(1, &[], script);
    let lines: Vec<&str> = ended.sentence().lines().skip(1).collect();
    assert_eq!(lines[0], "the last lines it wrote to stderr:");
    assert_eq!(lines[1], "    line 31");
    assert_eq!(lines[20], "    no end");
    assert_eq!(lines.len(), 21);
}

#[test]
fn a_rank_that_ends_because_of_a_peer_is_not_the_cause() {
    // Rank 0 notices the death of rank 1 and is faster than it.
    let script = format!(
        "if [ $RANK = 0 ]; then touch noticed; exit {PEER_FAILED_EXIT_CODE}; fi; until [ -e noticed ]; do sleep 0.01; done; sleep 0.1; exit 4"
    );
    let ended = run_script(2, &[], &script).exited(4);
    ended
        .sentence()
        .assert_begins("candle-train: rank 1 (host ");
}

#[test]
fn nobody_is_blamed_for_what_all_ranks_find() {
    let ended = run_script(
        3,
        &[],
        "echo $RANK >&2; echo error: no such file >&2; exit 2",
    )
    .exited(2);
    let sentence = ended.sentence();
    let first =
        "candle-train: all 3 ranks failed: exit code 2\nthe last lines they wrote to stderr:\n";
    assert!(sentence.starts_with(first), "{sentence}");
    assert!(
        sentence.ends_with("    error: no such file\n"),
        "{sentence}"
    );
    // Each for a reason of its own.
    let ended = run_script(3, &[], "echo error: no file $RANK >&2; exit 2");
    ended.sentence().assert_begins("candle-train: rank ");
}

#[test]
fn only_peers_of_a_failed_rank() {
    let script = format!(
        "[ $RANK = 1 ] || exec sleep 1000; echo rank 7 died >&2; exit {PEER_FAILED_EXIT_CODE}"
    );
    let ended = run_script(2, &[], &script).exited(PEER_FAILED_EXIT_CODE.into());
    let sentence = ended.sentence();
    sentence.assert_has(&[
        "ended because another rank failed (exit code 85), but none failed by itself",
        "    rank 7 died\nhint: exit code 85 says that another rank failed",
    ]);
}

/// The others fail in ways of their own, one of them at once, and one knows whose fault it is.
#[test]
fn the_rank_that_another_one_blames_is_named() {
    let script = format!(
        "case $RANK in
         0) sleep 0.2; echo 'rank 0 on host a stops: rank 2 is gone: its disk is full' >&2; exit {PEER_FAILED_EXIT_CODE} ;;
         1) sleep {{LATE}}; exit 6 ;;
         2) {{CULPRIT}} ;;
         esac"
    );
    let run = |late: &str, culprit: &str| {
        let script = script.replace("{LATE}", late).replace("{CULPRIT}", culprit);
        run_script(3, &["--grace-secs", "1"], &script)
    };
    let ended = run("0.1", "sleep 0.4; exit 5").exited(5);
    let sentence = ended.sentence();
    sentence.assert_begins("candle-train: rank 2 (host ");
    // One that does not end by itself.
    let ended = run("0.4", "exec sleep 1000").exited(PEER_FAILED_EXIT_CODE.into());
    let sentence = ended.sentence();
    let said = "candle-train: rank 2 is gone: its disk is full (says rank 0 (host ";
    assert!(sentence.starts_with(said), "{sentence}");
    assert!(!sentence.contains("other hosts"), "{sentence}");
}

#[test]
fn the_first_failure_is_named_though_its_output_stays_open() {
    // Rank 1 fails first, but what it leaves behind holds its output open; rank 0 fails because of it.
    let script = "if [ $RANK = 1 ]; then sleep 1000 & touch failed; exit 5; fi; until [ -e failed ]; do sleep 0.01; done; sleep 0.2; exit 6";
    let ended = run_script(2, &[], script).exited(5);
    ended
        .sentence()
        .assert_begins("candle-train: rank 1 (host ");
}

#[test]
fn ranks_have_a_second_before_they_are_stopped() {
    let script = "trap 'echo stopped; exit 0' TERM; touch up$RANK; [ $RANK = 1 ] || { until [ -e up1 ]; do sleep 0.01; done; exit 2; }; sleep 0.3; echo still here; sleep 1000 & wait";
    let ended = run_script(2, &[], script).exited(2);
    assert_eq!(
        ended.sorted_lines(),
        ["[rank 1] still here", "[rank 1] stopped"],
        "{}",
        ended.err
    );
}

#[test]
fn who_ignores_sigterm_is_killed_after_the_grace_time() {
    let script = "[ $RANK = 1 ] || { until [ -e deaf ]; do sleep 0.01; done; exit 2; }; trap '' TERM INT HUP; touch deaf; while :; do sleep 1000; done";
    let ended = run_script(2, &["--grace-secs", "0.2"], script).exited(2);
    ended
        .sentence()
        .assert_begins("candle-train: rank 0 (host ");
}

#[test]
fn a_suspended_rank_is_ended_too() {
    let script = "[ $RANK = 1 ] || { until [ -e up ]; do sleep 0.01; done; exit 2; }; touch up; kill -STOP $$; sleep 1000";
    run_script(2, &[], script).exited(2);
}

#[test]
fn success_of_all_says_nothing() {
    let ended = start_script(4, &["--grace-secs", "0"], "exit 0").wait();
    assert_eq!(
        (ended.code, ended.out.as_slice(), ended.err.as_str()),
        (Some(0), &b""[..], "")
    );
}
