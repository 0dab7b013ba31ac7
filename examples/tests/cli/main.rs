//! The example programs run as a user runs them.

mod bench;
mod defaults;
#[cfg(feature = "cuda")]
mod gpu;
mod inference;
#[allow(dead_code, reason = "the tests of the command use all of it")]
#[path = "../../../crates/cli/tests/cli/program.rs"]
mod program;

use std::path::Path;

/// The example `name`, which `cargo test` builds before it runs the tests.
#[track_caller]
fn example(name: &str) -> program::Program {
    let test = std::env::current_exe().unwrap();
    let profile = test.parent().and_then(Path::parent).unwrap();
    let file = format!("{name}{}", std::env::consts::EXE_SUFFIX);
    let binary = profile.join("examples").join(file);
    assert!(
        binary.is_file(),
        "{} is missing: `cargo test -p candle-train-examples` builds it, `cargo test --test cli` alone does not",
        binary.display()
    );
    program::Program::new(binary, None)
}
