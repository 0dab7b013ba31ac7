//! Tests that end or spoil their process.

use std::process::{Command, Output};

/// Set in the process that a test starts.
const INNER: &str = "EMULATOR_TEST_INNER";

/// Whether this is such a process.
pub fn is_own_process() -> bool {
    std::env::var_os(INNER).is_some()
}

/// Calls `body` in a process of its own, with some environment variables; `test` is the calling test's name.
///
/// Returns how it ended and what it wrote; nothing in that process.
pub fn in_own_process(test: &str, environment: &[(&str, &str)], body: impl Fn()) -> Option<Output> {
    if is_own_process() {
        body();
        return None;
    }
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env(INNER, "1")
        .envs(environment.iter().copied())
        .output()
        .unwrap();
    Some(output)
}

/// The body must succeed, and the emulator must say all of `sentences` on the way.
pub fn says(test: &str, environment: &[(&str, &str)], sentences: &[&str], body: impl Fn()) {
    let Some(output) = in_own_process(test, environment, body) else {
        return;
    };
    let said = String::from_utf8_lossy(&output.stderr);
    let ran = String::from_utf8_lossy(&output.stdout).contains("1 passed");
    assert!(
        output.status.success() && ran,
        "{test} failed or is not there: {said}"
    );
    for sentence in sentences {
        assert!(said.contains(sentence), "{test}: no {sentence:?} in {said}");
    }
}
