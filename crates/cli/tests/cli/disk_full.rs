//! A disk that has no room for the checkpoint or the metrics.

use std::fs;
use std::path::Path;

use super::folder::read_checkpoint;
use super::workspace::Workspace;

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
    workspace.refuses(&program, &parts);
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
    workspace.refuses(&program, &["cannot save to", "LICENSE.txt", TOO_LARGE]);
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
    let outcome = program.flag("--metrics", "/dev/full").run();
    assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
    let warning = "warning: no more metrics: cannot write step 0 to the metrics file \"/dev/full\": No space left";
    assert_eq!(outcome.stderr.matches("warning").count(), 1);
    assert!(outcome.stderr.contains(warning), "{}", outcome.stderr);
    assert!(read_checkpoint(&workspace.output()) == saved);
}
