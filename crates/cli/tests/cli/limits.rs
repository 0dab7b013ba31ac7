//! Limits that a system sets a process: each is a sentence that says what to raise, and never a panic or a wait.

use std::os::unix::fs::PermissionsExt;
use std::process::Command;
use std::time::{Duration, Instant};

use super::program::Program;
use super::workspace::{Workspace, candle_train};

/// Under a limit of the shell, as a user sets it.
fn limited(program: Program, limit: &str) -> Program {
    let words = ["sh", "-c", &format!("{limit}; exec \"$@\""), "sh"];
    program.under(words.map(str::to_string).to_vec())
}

const NO_THREADS: &str =
    "(os error 11)\nhint: raise the limit on processes and threads (`ulimit -u`";

#[test]
fn without_memory_for_threads_each_command_says_what_to_raise() {
    let workspace = Workspace::new();
    let text = workspace.path("text.txt");
    std::fs::write(&text, "No more threads.").unwrap();
    // Of addresses: two MiB for each thread outside of ranks, 64 MiB for each of a rank.
    let many = |program: Program| {
        let program = program.variable("RAYON_NUM_THREADS", 2000);
        limited(program, "ulimit -v 1500000")
    };
    let preview = candle_train("preview").flag("--model", workspace.model("").display());
    let preview = preview.flag("--data", text.display());
    let export = candle_train("export").argument(workspace.model("").display());
    let export = export.argument(workspace.path("model.gguf").display());
    let few = limited(workspace.finetune(), "ulimit -v 300000");
    for (program, code) in [
        (many(preview), 1),
        (many(export), 1),
        (many(workspace.finetune()), 2),
        (few, 2),
    ] {
        let outcome = program.run().exited(code);
        outcome.says(&[NO_THREADS]);
        assert!(!outcome.stderr.contains("panicked"), "{}", outcome.stderr);
    }
    assert!(!workspace.path("model.gguf").exists());
}

/// A limit on processes does not hold for root, so what the test runs is somebody else's.
#[test]
fn a_launcher_without_threads_ends_with_a_sentence() {
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("candle-train");
    std::fs::copy(env!("CARGO_BIN_EXE_candle-train"), &program).unwrap();
    let everyone = std::fs::Permissions::from_mode(0o755);
    for path in [dir.path(), &program] {
        std::fs::set_permissions(path, everyone.clone()).unwrap();
    }
    for limit in [1, 3, 6, 10] {
        let command = format!("ulimit -u {limit}; exec \"$0\" launch --nproc-per-node 2 true");
        let words = ["--reuid", "65534", "--regid", "65534", "--clear-groups"];
        let output = Command::new("setpriv")
            .args(words)
            .args(["bash", "-c", &command])
            .arg(&program)
            .output();
        let Ok(output) = output else {
            println!("skipped: there is no setpriv");
            return;
        };
        let said = String::from_utf8_lossy(&output.stderr);
        if said.contains("setpriv:") {
            println!("skipped: {said}");
            return;
        }
        assert!(
            !output.status.success() && !said.contains("panicked"),
            "{limit}: {said}"
        );
        for words in ["(os error 11)\n", "hint: raise the limit on processes"] {
            assert!(said.contains(words), "{limit}: {said}");
        }
    }
}

#[test]
fn rank_0_that_may_not_open_enough_files_ends_the_run_at_once() {
    let workspace = Workspace::new();
    let program = workspace.finetune().without("--tp").without("--pp");
    let program = program.flag("--strategy", "parameter-server");
    let binary = env!("CARGO_BIN_EXE_candle-train");
    let limit = "ulimit -n 16; exec \"$0\" launch --nproc-per-node 3 \"$@\"";
    let words = ["sh", "-c", limit, binary].map(str::to_string);
    let begin = Instant::now();
    let outcome = program.under(words.to_vec()).run().exited(2);
    outcome.says(&[
        "it may have 16 files open, expected at least ",
        "hint: raise the limit on open files (`ulimit -n`)",
    ]);
    assert!(begin.elapsed() < Duration::from_secs(20));
}
