//! Numbers that are no longer numbers.

use std::fs;
use std::path::Path;

use super::workspace::{Workspace, candle_train, refuses_model};

const NAN: [u8; 4] = f32::NAN.to_le_bytes();

#[test]
fn weights_with_a_nan_are_found_by_name_when_they_are_loaded() {
    for name in [
        "model.layers.2.input_layernorm.weight",
        "model.layers.1.mlp.up_proj.weight",
        "model.norm.weight",
    ] {
        refuses_model(
            |workspace| {
                workspace.edit_weights(|tensors| {
                    tensors.get_mut(name).unwrap().2[..4].copy_from_slice(&NAN);
                });
            },
            &[name, "NaN or infinite", "hint:"],
        );
    }
}

#[test]
fn a_run_that_diverges_names_the_step_and_a_parameter() {
    let workspace = Workspace::new();
    let program = workspace.finetune().flag("--steps", 6).flag("--lr", 1e30);
    let parts = [
        "step 1 failed",
        "NaN or infinite gradient is model.",
        "hint: a lower learning rate",
    ];
    workspace.refuses(&program, &parts);
    // What there was before is saved, and named.
    for (every, zero) in [(1, 1), (100, 0), (100, 3)] {
        let saves = workspace.path(&format!("saves-{every}-{zero}"));
        let saving = program.clone().flag("--save-every", every);
        let saving = saving.flag("--zero", zero);
        let saving = saving
            .flag("--lr-schedule", "constant")
            .flag("--warmup-steps", 0);
        let saving = saving.flag("--save-dir", saves.display());
        let last = saves.join("step-000001");
        let named = format!("{} has the run as it was then", last.display());
        saving.run().assert_error(&[parts[0], parts[1], &named]);
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
    workspace.refuses(&program, &parts);
}

#[test]
fn weights_that_became_infinite_in_the_last_step_are_not_saved() {
    let workspace = Workspace::new();
    let program = workspace.finetune().flag("--steps", 1).flag("--lr", 1e300);
    workspace.refuses(
        &program,
        &[
            "lm_head.weight",
            "NaN or infinite in F32",
            "nothing was saved",
        ],
    );
}

#[test]
fn weights_that_do_not_fit_the_type_to_be_saved_are_not_saved() {
    let workspace = Workspace::new();
    workspace.edit_weights(|tensors| {
        let norm = tensors.get_mut("model.norm.weight").unwrap();
        norm.2[..4].copy_from_slice(&1e6f32.to_le_bytes());
    });
    let program = workspace
        .finetune()
        .flag("--steps", 0)
        .flag("--save-dtype", "f16");
    workspace.refuses(
        &program,
        &["model.norm.weight", "NaN or infinite in F16", "f32 or bf16"],
    );
    program.flag("--save-dtype", "bf16").succeeds();
}
