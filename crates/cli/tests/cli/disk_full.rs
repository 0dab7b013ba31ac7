//! A disk that has no room for the checkpoint or the metrics.

use std::fs;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::thread::sleep;
use std::time::Duration;

use nix::pty::openpty;

use super::folder::{names, read_checkpoint};
use super::program::Program;
use super::workspace::{Workspace, candle_train};

/// What the system says to a write beyond the limit of [`Program::with_limited_files`](super::program::Program).
const TOO_LARGE: &str = "File too large";

#[test]
#[cfg(unix)]
fn weights_that_do_not_fit_leave_the_old_checkpoint_and_no_temporary_file() {
    let workspace = Workspace::new();
    let program = workspace.finetune().with_limited_files();
    let parts = [
        "cannot save to",
        "model.safetensors",
        TOO_LARGE,
        "nothing that was there before",
    ];
    workspace.fails(&program, &parts);
}

#[test]
#[cfg(unix)]
fn a_small_file_that_does_not_fit_leaves_the_old_checkpoint_too() {
    // The first layer alone, in f16, is below the limit; the file beside it is above.
    let workspace = Workspace::new();
    workspace.edit_config(|config| config["num_hidden_layers"] = 1.into());
    workspace.edit_weights(|tensors| {
        tensors.retain(|name, _| {
            !name.starts_with("model.layers.") || name.starts_with("model.layers.0.")
        });
    });
    fs::write(workspace.model("LICENSE.txt"), "x".repeat(200_000)).unwrap();
    let program = workspace
        .finetune()
        .flag("--pp", 1)
        .flag("--save-dtype", "f16");
    let program = program.with_limited_files();
    workspace.fails(&program, &["cannot save to", "LICENSE.txt", TOO_LARGE]);
}

/// Whoever tidies up the folder takes the checkpoints that are there, not those that come.
#[test]
fn a_folder_of_checkpoints_that_is_removed_is_made_again_with_its_lock() {
    let workspace = Workspace::new();
    let saves = workspace.path("saves");
    let program = workspace.finetune().flag("--steps", 40);
    let program = program.flag("--save-every", 1);
    let program = program.flag("--save-dir", saves.display());
    let (mut is_removed, mut is_locked) = (false, false);
    let outcome = program.run_and(|_| {
        if !is_removed && saves.join("step-000002").exists() {
            // At once, with the lock.
            fs::rename(&saves, workspace.path("elsewhere")).unwrap();
            is_removed = true;
        }
        is_locked |= is_removed && saves.join(".lock").exists();
    });
    assert!(is_removed && is_locked, "{}", outcome.stderr);
    assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
    assert_eq!(names(&saves), ["step-000039", "step-000040"]);
}

/// The words before a program that mount a small file system at a folder; `None` where this user may not.
fn with_small_disk(folder: &Path, launcher: &[&str]) -> Option<Vec<String>> {
    fs::create_dir_all(folder).unwrap();
    let mount = "mount -t tmpfs -o size=64k none \"$0\" && exec \"$@\"";
    let words = ["unshare", "--mount", "sh", "-c", mount, folder.to_str()?];
    let may = Command::new(words[0])
        .args(&words[1..])
        .arg("true")
        .output();
    if !may.is_ok_and(|output| output.status.success()) {
        println!("skipped: nothing can be mounted here");
        return None;
    }
    let words = words.iter().chain(launcher);
    Some(words.map(ToString::to_string).collect())
}

#[test]
fn a_disk_that_is_too_small_is_found_before_the_first_step_and_not_tried_again() {
    let workspace = Workspace::new();
    let small = workspace.path("small");
    let program = workspace.finetune().flag("--save-every", 1);
    let program = program.flag("--save-dir", small.join("saves").display());
    let launcher = [env!("CARGO_BIN_EXE_candle-train"), "launch"];
    let launcher = [
        &launcher[..],
        &["--nproc-per-node", "1", "--max-restarts", "3"],
    ]
    .concat();
    for launcher in [&[][..], &launcher[..]] {
        let Some(words) = with_small_disk(&small, launcher) else {
            return;
        };
        let outcome = program.clone().under(words).run().exited(2);
        outcome.says(&["there is not enough space for "]);
        assert!(!outcome.stderr.contains("; restart "), "{}", outcome.stderr);
    }
    workspace.assert_output_is_untouched();
}

/// The program with stdout on a full disk; `None` where the system has none.
fn with_full_stdout(program: &Program) -> Option<Program> {
    if !Path::new("/dev/full").exists() {
        println!("skipped: this system has no /dev/full");
        return None;
    }
    let words = ["sh", "-c", "exec \"$@\" >/dev/full", "sh"];
    Some(program.clone().under(words.map(String::from).to_vec()))
}

#[test]
fn what_stdout_has_no_room_for_is_an_error_and_a_reader_that_has_gone_is_none() {
    let workspace = Workspace::new();
    let told = workspace.finetune().switch("--dry-run").switch("--json");
    for program in [
        candle_train("inspect").argument(workspace.path("model").display()),
        candle_train("schedule").switch("--csv"),
        candle_train("env"),
        candle_train("plot").switch("--help"),
        candle_train("generate")
            .flag("--model", workspace.path("model").display())
            .flag("--prompt", "The"),
        candle_train("launch")
            .argument("--dry-run")
            .argument("--nproc-per-node=1")
            .argument("true"),
        told,
    ] {
        let Some(full) = with_full_stdout(&program) else {
            return;
        };
        let outcome = full.run();
        assert!(
            matches!(outcome.code, Some(1 | 2)),
            "{:?}: {}",
            outcome.code,
            outcome.stderr
        );
        outcome.says(&["cannot write to stdout: No space left"]);
        let outcome = program.without_reader().succeeds_with_warnings();
        assert!(!outcome.stderr.contains("error"), "{}", outcome.stderr);
    }
    // What was trained is there all the same.
    if let Some(full) = with_full_stdout(&workspace.finetune()) {
        let outcome = full.run().exited(1);
        outcome.says(&["error: cannot write to stdout: No space left"]);
        assert!(workspace.output().join("candle_train.toml").exists());
    }
}

#[test]
fn a_launcher_tells_that_lines_of_its_ranks_were_lost() {
    let program = candle_train("launch").argument("--nproc-per-node=1");
    let program = program.argument("echo").argument("hello");
    let Some(full) = with_full_stdout(&program) else {
        return;
    };
    let outcome = full.run().exited(1);
    outcome.says(&["cannot write to stdout: No space left"]);
    assert_eq!(program.without_reader().run().code, Some(0));
}

/// The program with this stdout.
fn printing_to(stdout: impl Into<OwnedFd>, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_candle-train"));
    let command = command
        .args(args)
        .stdin(Stdio::null())
        .stdout(stdout.into());
    command.output().unwrap()
}

#[test]
fn a_terminal_that_is_gone_is_no_error() {
    let workspace = Workspace::new();
    let model = workspace.path("model").display().to_string();
    for args in [
        &["schedule"][..],
        &["generate", "--model", &model, "--prompt", "The"],
        &["launch", "--nproc-per-node=1", "echo", "hello"],
        &["launch", "--nproc-per-node=1", "--dry-run", "echo"],
    ] {
        let pty = openpty(None, None).unwrap();
        drop(pty.master);
        let ended = printing_to(pty.slave, args);
        let said = String::from_utf8_lossy(&ended.stderr);
        assert!(ended.status.success(), "{args:?}: {said}");
        assert!(!said.contains("cannot write"), "{args:?}: {said}");
    }
}

#[test]
fn a_full_pipe_that_does_not_wait_by_itself_is_waited_for() {
    let schedule = ["schedule", "--csv", "--micro-batches", "30000"];
    let text = Command::new(env!("CARGO_BIN_EXE_candle-train"))
        .args(schedule)
        .output()
        .unwrap();
    for args in [
        &schedule[..],
        &[
            &[
                "launch",
                "--nproc-per-node=1",
                env!("CARGO_BIN_EXE_candle-train"),
            ],
            &schedule[..],
        ]
        .concat(),
    ] {
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        theirs.set_nonblocking(true).unwrap();
        let reader = std::thread::spawn(move || {
            let mut all = Vec::new();
            sleep(Duration::from_millis(300));
            ours.read_to_end(&mut all).unwrap();
            all
        });
        let ended = printing_to(theirs, args);
        let said = String::from_utf8_lossy(&ended.stderr);
        assert!(ended.status.success(), "{said}");
        let got = String::from_utf8(reader.join().unwrap()).unwrap();
        // A launcher shows long lines in parts.
        let got: String = got.split("\n[rank 0] ").collect();
        let got = got.trim_start_matches("[rank 0] ").replace('\n', "");
        assert!(text.stdout.len() > 1_000_000, "{}", text.stdout.len());
        assert!(got == String::from_utf8_lossy(&text.stdout).replace('\n', ""));
    }
}

#[test]
fn a_full_stderr_ends_nothing() {
    if !Path::new("/dev/full").exists() {
        println!("skipped: this system has no /dev/full");
        return;
    }
    let workspace = Workspace::new();
    let generate = candle_train("generate").flag("--model", workspace.path("model").display());
    let picture = workspace.path("a.svg");
    for (program, code) in [
        (candle_train("schedule").flag("-o", picture.display()), 0),
        (
            generate.flag("--prompt", "The").flag("--base-dtype", "q4k"),
            0,
        ),
        (candle_train("env").variable("WORLD_SIZE", "none"), 2),
    ] {
        let words = ["sh", "-c", "exec \"$@\" 2>/dev/full", "sh"];
        let outcome = program.under(words.map(String::from).to_vec()).run();
        assert_eq!(outcome.code, Some(code), "{}", outcome.stdout);
    }
}

#[test]
fn metrics_that_do_not_fit_are_a_warning() {
    if !Path::new("/dev/full").exists() {
        println!("skipped: this system has no /dev/full");
        return;
    }
    let workspace = Workspace::new();
    let program = workspace.finetune();
    program.succeeds();
    let saved = read_checkpoint(&workspace.output());
    let outcome = program
        .flag("--metrics", "/dev/full")
        .succeeds_with_warnings();
    let warning = "warning: no more metrics: cannot write step 1 to the metrics file \"/dev/full\": No space left";
    assert_eq!(outcome.stderr.matches("warning").count(), 1);
    outcome.says(&[warning]);
    assert!(read_checkpoint(&workspace.output()) == saved);
}
