//! Leftovers of commands that are ended in the middle.

use std::fs::{self, File};

use nix::sys::signal::Signal;

use super::folder::names;
use super::large::{export, is_saving, large_model, merge};
use super::program::Program;
use super::stop::run_and_signal;
use super::workspace::Workspace;

/// Sends `signal` when something is there that is not whole, which it must end.
#[track_caller]
fn ended_while_saving(workspace: &Workspace, program: &Program, signal: Signal) {
    let mut sent = false;
    let outcome = run_and_signal(program, |_| {
        let is_due = !sent && is_saving(workspace);
        sent |= is_due;
        is_due.then_some(signal)
    });
    assert_eq!((sent, outcome.code), (true, None), "{}", outcome.stderr);
    assert_eq!(outcome.stderr, "");
}

#[test]
fn signals_leave_nothing_of_a_file_or_folder_that_is_not_whole() {
    let workspace = Workspace::new();
    large_model(&workspace);
    for program in [export(&workspace), merge(&workspace)] {
        let before = names(&workspace.path(""));
        for signal in [Signal::SIGTERM, Signal::SIGINT] {
            ended_while_saving(&workspace, &program, signal);
            assert_eq!(names(&workspace.path("")), before, "{signal}");
        }
    }
}

#[test]
fn what_a_killed_command_leaves_goes_with_the_next_one_to_the_same_output() {
    let workspace = Workspace::new();
    large_model(&workspace);
    for (program, output) in [
        (export(&workspace), "large.gguf"),
        (merge(&workspace), "merged"),
    ] {
        let mut want = names(&workspace.path(""));
        ended_while_saving(&workspace, &program, Signal::SIGKILL);
        assert!(is_saving(&workspace));
        program.succeeds();
        want.push(output.to_string());
        want.sort();
        assert_eq!(names(&workspace.path("")), want);
    }
}

/// A process that lives has locked what it writes.
#[test]
fn what_another_process_writes_and_what_has_another_name_stays() {
    let workspace = Workspace::new();
    large_model(&workspace);
    let others = [
        ".large.gguf.abc123.saving",
        ".large.abc123.saving",
        ".large.gguf.b.abc123.saving",
        ".large.gguf.abc1234.saving",
        ".large.gguf.saving",
    ];
    for name in others {
        fs::write(workspace.path(name), "half").unwrap();
    }
    let dead = workspace.path(".large.gguf.zzz999.saving");
    fs::write(&dead, "half").unwrap();
    let written = File::open(workspace.path(others[0])).unwrap();
    written.lock().unwrap();
    export(&workspace).succeeds();
    assert!(!dead.exists());
    for name in others {
        assert!(workspace.path(name).exists(), "{name}");
    }
    drop(written);
    export(&workspace).switch("--overwrite").succeeds();
    assert!(!workspace.path(others[0]).exists());
}
