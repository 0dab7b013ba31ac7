//! Training in 16 bits, and the types that weights are saved in.

use std::fs;

use safetensors::Dtype;
use serde_json::Value;

use super::folder::{read_checkpoint, read_json, read_tensors};
use super::training::metrics;
use super::workspace::Workspace;

#[test]
fn the_type_of_the_saved_weights_can_be_chosen_and_config_json_says_it() {
    let workspace = Workspace::new();
    for (flag, dtype, name) in [
        ("bf16", Dtype::BF16, "bfloat16"),
        ("f16", Dtype::F16, "float16"),
    ] {
        let assert_saved = || {
            let saved = read_tensors(&workspace.output().join("model.safetensors"));
            assert!(saved.values().all(|tensor| tensor.0 == dtype));
            let config = read_json(&workspace.output().join("config.json"));
            assert_eq!(config["dtype"], name);
        };
        let program = workspace.finetune().flag("--save-dtype", flag);
        program.succeeds();
        assert_saved();
        // What was saved can be trained on, and keeps its type when none is asked for.
        let model = workspace.path(flag);
        fs::rename(workspace.output(), &model).unwrap();
        let program = workspace.finetune().flag("--model", model.display());
        program.succeeds();
        assert_saved();
    }
}

#[test]
fn training_in_16_bits_follows_training_in_f32_and_keeps_the_type_of_the_weights() {
    let workspace = Workspace::new();
    let losses = |dtype: &str| -> Vec<f64> {
        let path = workspace.path(&format!("{dtype}.jsonl"));
        workspace
            .finetune()
            .flag("--steps", 30)
            .flag("--global-batch-size", 8)
            .flag("--dtype", dtype)
            .flag("--metrics", path.display())
            .succeeds();
        let saved = read_tensors(&workspace.output().join("model.safetensors"));
        assert!(saved.values().all(|tensor| tensor.0 == Dtype::F32));
        let metrics = metrics(&path);
        metrics
            .iter()
            .map(|step| step["loss"].as_f64().unwrap())
            .collect()
    };
    let wide = losses("f32");
    assert!(wide[29] < 0.95 * wide[0], "{wide:?}");
    for dtype in ["bf16", "f16"] {
        let narrow = losses(dtype);
        assert_ne!(wide, narrow);
        for (step, (a, b)) in wide.iter().zip(&narrow).enumerate() {
            assert!(
                (a - b).abs() < 0.01 * a,
                "{dtype}, step {step}: {b} instead of {a}"
            );
        }
        // The same seed and layout: the same bits.
        assert_eq!(losses(dtype), narrow);
    }
}

#[test]
fn the_loss_scale_of_f16_and_what_it_skipped_are_in_the_metrics_and_told() {
    let workspace = Workspace::new();
    let path = workspace.path("metrics.jsonl");
    let program = workspace
        .finetune()
        .flag("--metrics", path.display())
        .flag("--steps", 4);
    program.succeeds();
    for step in metrics(&path) {
        assert_eq!(step["loss_scale"], 1.0);
        assert_eq!(step["skipped_steps"], 0);
    }
    let f16 = program.flag("--dtype", "f16");
    f16.clone()
        .flag("--loss-scale-init", 64)
        .flag("--loss-scale-window", 2)
        .succeeds();
    let scales: Vec<Value> = metrics(&path)
        .iter()
        .map(|step| step["loss_scale"].clone())
        .collect();
    assert_eq!(scales, [64.0, 64.0, 128.0, 128.0]);
    // No backward pass in f16 survives it.
    let outcome = f16.flag("--loss-scale-init", 1u64 << 40).succeeds();
    let told = "4 skipped, loss scale 137438953472";
    assert!(outcome.stderr.contains(told), "{}", outcome.stderr);
    for (skipped, step) in (1..).zip(metrics(&path)) {
        assert_eq!(step["skipped_steps"], skipped);
        assert!(step["grad_norm"].is_null());
    }
}

#[test]
fn an_f32_file_after_training_in_bf16_has_values_that_bf16_has_not() {
    let workspace = Workspace::with_model("bf16_sharded");
    let program = workspace.finetune().flag("--dtype", "bf16");
    program.flag("--save-dtype", "f32").succeeds();
    for (name, (dtype, _, bytes)) in read_checkpoint(&workspace.output()) {
        assert_eq!(dtype, Dtype::F32, "{name}");
        // The lower half of an f32 that is a bf16 is 0.
        let is_narrow = |bytes: &[u8]| bytes[..2] == [0, 0];
        assert!(!bytes.chunks_exact(4).all(is_narrow), "{name}");
    }
}

#[test]
fn the_environment_chooses_how_a_cpu_multiplies() {
    let workspace = Workspace::new();
    let program = workspace.finetune();
    program
        .clone()
        .variable("CANDLE_TRAIN_PRODUCTS", 4)
        .fails(&["CANDLE_TRAIN_PRODUCTS: expected fma, dots, 2 or 3, got `4`"]);
    workspace.assert_output_is_untouched();
    let program = program.flag("--matmul-precision", "high");
    let outcome = program.variable("CANDLE_TRAIN_PRODUCTS", "fma").succeeds();
    let said = "--matmul-precision high changes nothing: CANDLE_TRAIN_PRODUCTS is fma";
    assert!(outcome.stderr.contains(said), "{}", outcome.stderr);
}
