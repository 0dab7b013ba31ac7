//! Numbers that are no longer numbers.

use std::fs;
use std::path::{Path, PathBuf};

use super::folder::{names, read_json, read_tensors};
use super::program::Program;
use super::workspace::{Workspace, candle_train};

const NAN: [u8; 4] = f32::NAN.to_le_bytes();

#[test]
fn weights_with_a_nan_are_found_by_name_when_they_are_loaded() {
    for name in [
        "model.layers.2.input_layernorm.weight",
        "model.layers.1.mlp.up_proj.weight",
        "model.norm.weight",
    ] {
        let workspace = Workspace::new();
        workspace.edit_weights(|tensors| {
            tensors.get_mut(name).unwrap().2[..4].copy_from_slice(&NAN);
        });
        let parts = [name, "NaN or infinite", "hint:"];
        workspace.fails(&workspace.finetune(), &parts);
    }
}

#[test]
fn a_run_that_diverges_names_the_step_and_a_parameter() {
    let workspace = Workspace::new();
    let program = workspace.finetune().flag("--steps", 6).flag("--lr", 1e30);
    let parts = [
        "step 2 failed",
        "NaN or infinite gradient is model.",
        "hint: a lower learning rate",
    ];
    workspace.fails(&program, &parts);
    // What there was before is saved, named, and set aside.
    for (every, zero) in [(1, 1), (6, 0), (6, 3)] {
        let saves = workspace.path(&format!("saves-{every}-{zero}"));
        let saving = program.clone().flag("--save-every", every);
        let saving = saving.flag("--zero", zero);
        let saving = saving
            .flag("--lr-schedule", "constant")
            .flag("--warmup-steps", 0);
        let saving = saving.flag("--save-dir", saves.display());
        let last = saves.join("step-000001.failed");
        let named = format!("{} has the run as it was then", last.display());
        let before = "there is no checkpoint from before";
        saving.fails(&[parts[0], parts[1], &named, before]);
        assert_eq!(names(&saves), ["step-000001.failed"]);
        // The weights after the first step, as a run has them that ends there.
        let (out, one) = (workspace.path("exported"), workspace.path("one"));
        let export = candle_train("export").argument(last.display());
        export
            .argument(out.display())
            .switch("--overwrite")
            .succeeds();
        let short = saving.without("--save-every").without("--save-dir");
        let short = short.flag("--steps", 1).flag("--output", one.display());
        short.switch("--overwrite").succeeds();
        let weights = |folder: &Path| fs::read(folder.join("model.safetensors")).unwrap();
        assert!(weights(&out) == weights(&one), "{every} {zero}");
    }
    // Whatever the layout.
    let program = program
        .flag("--zero", 0)
        .flag("--tp", 1)
        .flag("--pp", 1)
        .flag("--dp", 1);
    workspace.fails(&program, &parts);
}

/// A run of four good steps, each saved, of which one checkpoint is kept.
fn four_good_steps(workspace: &Workspace) -> (Program, PathBuf) {
    let saves = workspace.path("saves");
    let program = workspace.finetune().flag("--save-every", 1);
    let program = program.flag("--keep", 1);
    let program = program
        .flag("--lr-schedule", "constant")
        .flag("--warmup-steps", 0);
    let program = program.flag("--save-dir", saves.display());
    program.clone().flag("--steps", 4).succeeds();
    assert_eq!(names(&saves), ["step-000004"]);
    let program = program.flag("--steps", 8).flag("--resume", "latest");
    (program.switch("--resume-anyway"), saves)
}

#[test]
fn a_run_that_diverges_keeps_its_last_good_checkpoint_and_goes_on_from_it() {
    let workspace = Workspace::new();
    let (program, saves) = four_good_steps(&workspace);
    let outcome = program.clone().flag("--lr", 1e30).run().exited(2);
    let (failed, good) = (saves.join("step-000005.failed"), saves.join("step-000004"));
    outcome.says(&[
        "step 6 failed",
        &format!("{} has the run as it was then", failed.display()),
        &format!("the newest checkpoint from before is {}", good.display()),
    ]);
    assert_eq!(names(&saves), ["step-000004", "step-000005.failed"]);
    let list = candle_train("inspect").argument(saves.display()).succeeds();
    let failed = list.stdout.lines().find(|line| line.contains(".failed"));
    assert!(
        failed.unwrap().contains("set aside: after step 5"),
        "{}",
        list.stdout
    );
    let resumed = program.succeeds_with_warnings();
    resumed.prints(&[&format!("resumed after step 4 from {}", good.display())]);
    assert_eq!(names(&saves), ["step-000005.failed", "step-000008"]);
}

#[test]
fn a_run_whose_checkpoints_are_all_set_aside_does_not_begin_anew() {
    let workspace = Workspace::new();
    let text = fs::read(workspace.path("text.txt")).unwrap();
    fs::write(workspace.path("text.txt"), "a".repeat(2000)).unwrap();
    let (program, saves) = four_good_steps(&workspace);
    // With other data the first loss is out of the range: that says nothing of the checkpoint.
    fs::write(workspace.path("text.txt"), text).unwrap();
    let ends = program.clone().switch("--stop-on-divergence");
    let ends = ends.flag("--max-loss-ratio", 1.01).run().exited(2);
    ends.says(&["the loss of step 5 is "]);
    assert_eq!(names(&saves), ["step-000004", "step-000005.failed"]);
    fs::remove_dir_all(saves.join("step-000004")).unwrap();
    let outcome = program.run().exited(2);
    let aside = saves.join("step-000005.failed").display().to_string();
    let parts = ["there is no checkpoint in", &aside, "hint: --resume"];
    outcome.says(&parts);
    let named = program.flag("--resume", aside).succeeds_with_warnings();
    named.prints(&["resumed after step 5"]);
}

#[test]
fn a_loss_out_of_its_range_is_a_warning_keeps_what_there_was_or_ends_the_run() {
    let workspace = Workspace::new();
    let (program, saves) = four_good_steps(&workspace);
    let program = program.flag("--lr", 1).flag("--max-grad-norm", 0);
    let program = program.flag("--max-loss-ratio", 1.5);
    let ends = program
        .clone()
        .switch("--stop-on-divergence")
        .run()
        .exited(2);
    let good = saves.join("step-000005");
    let named = format!("the newest checkpoint from before is {}", good.display());
    let parts = [
        "the loss of step 7 is ",
        "more than 1.5 times the median",
        named.as_str(),
    ];
    ends.says(&parts);
    assert_eq!(
        names(&saves),
        ["step-000005", "step-000006.failed", "step-000007.failed"]
    );
    let goes_on = program.clone().succeeds_with_warnings();
    let said = "the loss of step 7 is ";
    assert_eq!(
        goes_on.stderr.matches(said).count(),
        1,
        "{}",
        goes_on.stderr
    );
    goes_on.says(&["the newest checkpoint from before that step is kept"]);
    let aside = ["step-000006.failed", "step-000007.failed"];
    assert_eq!(
        names(&saves),
        ["step-000005", aside[0], aside[1], "step-000008"]
    );
    // Nor does a later start remove it, as long as the loss does not come back: it hardly changes at this rate.
    let later = program.flag("--steps", 10).flag("--lr", 1e-9);
    later.succeeds_with_warnings();
    assert_eq!(
        names(&saves),
        ["step-000005", aside[0], aside[1], "step-000010"]
    );
}

#[test]
fn weights_that_became_infinite_in_the_last_step_are_not_saved() {
    let workspace = Workspace::new();
    let program = workspace.finetune().flag("--steps", 1).flag("--lr", 1e300);
    workspace.fails(
        &program,
        &[
            "lm_head.weight",
            "NaN or infinite in F32",
            "nothing was saved",
        ],
    );
}

#[test]
fn weights_that_do_not_fit_the_type_to_be_saved_are_rescued_in_f32() {
    let workspace = Workspace::new();
    workspace.edit_weights(|tensors| {
        let norm = tensors.get_mut("model.norm.weight").unwrap();
        norm.2[..4].copy_from_slice(&1e6f32.to_le_bytes());
    });
    let program = workspace
        .finetune()
        .flag("--steps", 0)
        .flag("--save-dtype", "f16");
    let rescued = workspace.path("output-rescued");
    let said = format!(
        "the model was saved in f32, which holds them, to {} instead",
        rescued.display()
    );
    let parts = [
        "model.norm.weight",
        "NaN or infinite in F16",
        "f32 or bf16",
        &said,
    ];
    program.fails(&parts);
    workspace.assert_output_is_untouched();
    let config = read_json(&rescued.join("config.json"));
    assert_eq!(config["dtype"], "float32");
    let weights = read_tensors(&rescued.join("model.safetensors"));
    let (before, after) = (
        read_tensors(&workspace.model("model.safetensors")),
        &weights["model.norm.weight"],
    );
    assert!(before["model.norm.weight"] == *after);
    program.flag("--save-dtype", "bf16").succeeds();
}
