//! Threads that go on after another rank has failed: the failure is printed, and the process ends if they never do. Each case runs in a
//! process of its own, which is this program again.

use std::process::{Command, Output};
use std::time::{Duration, Instant};

use candle_comm::{LocalConfig, launch};
use candle_core::bail;

const ROLE: &str = "CANDLE_COMM_TEST_ENDS";

/// What the process of a case does: rank 1 fails, rank 2 waits for the others, and rank 0 computes for so many milliseconds; for none
/// it waits, too: if it ended first, that would be the failure.
#[test]
fn process_of_a_case() {
    let Ok(computes) = std::env::var(ROLE) else {
        return;
    };
    let computes = Duration::from_millis(computes.parse().unwrap());
    let config = LocalConfig {
        abort_after: Duration::from_secs(2),
        ..LocalConfig::new(3)
    };
    let ended = launch::threads_with(config, |world| {
        match world.rank() {
            0 if !computes.is_zero() => std::thread::sleep(computes),
            1 => bail!("out of luck\nhint: have more"),
            _ => world.barrier()?,
        }
        Ok(())
    });
    println!("returned: {}", ended.unwrap_err());
}

fn run(computes: Duration) -> (Output, Duration) {
    let begin = Instant::now();
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "ends::process_of_a_case", "--nocapture"])
        .env(ROLE, computes.as_millis().to_string())
        .env_remove("RUST_BACKTRACE")
        .output();
    (output.unwrap(), begin.elapsed())
}

fn text(bytes: &[u8]) -> &str {
    str::from_utf8(bytes).unwrap()
}

#[test]
fn a_rank_that_computes_for_ever_ends_with_the_process() {
    let (output, took) = run(Duration::from_secs(100_000));
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(took >= Duration::from_secs(2), "{took:?}");
    let first =
        "rank 1 failed: out of luck; rank 0 may take 1 s more to end, then the process ends\n";
    let last = "error: rank 0 did not end within 2 s after another rank had failed, so the process ends; \
        the last operation of each:\n  rank 0: has started no operation\n  rank 1: has started no operation\n  rank 2: ";
    assert!(said.starts_with(first), "{said}");
    assert!(said[first.len()..].starts_with(last), "{said}");
    assert!(
        said.ends_with("\nrank 1 failed: out of luck\nhint: have more\n"),
        "{said}"
    );
    assert!(!text(&output.stdout).contains("returned"), "{said}");
}

#[test]
fn who_ends_late_is_waited_for_and_who_ends_at_once_needs_no_word() {
    for (millis, is_printed) in [(1500, true), (0, false)] {
        let (output, _) = run(Duration::from_millis(millis));
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{said}");
        let returned = "returned: rank 1 failed: out of luck\nhint: have more\n";
        assert!(text(&output.stdout).contains(returned), "{said}");
        let printed = said.starts_with("rank 1 failed: out of luck; rank 0 may take 1 s more");
        assert_eq!(printed, is_printed, "{said}");
    }
}
