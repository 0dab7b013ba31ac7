//! Runs that succeed: what they print and what they write.

use std::fs;
use std::path::Path;

use serde_json::{Map, Value};

use super::folder::{fixture, read_checkpoint, read_json, read_tensors};
use super::program::{AssertText, Program};
use super::workspace::{Workspace, candle_train};

pub fn metrics(path: &Path) -> Vec<Map<String, Value>> {
    let text = fs::read_to_string(path).unwrap();
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

/// Without what the clock says, and memory, whose activations depend on which rank allocates what they share.
pub fn without_times(mut metrics: Vec<Map<String, Value>>) -> Vec<Map<String, Value>> {
    for step in &mut metrics {
        step.retain(|field, _| {
            !matches!(
                field.as_str(),
                "tokens_per_sec"
                    | "positions_per_sec"
                    | "step_secs"
                    | "eval_secs"
                    | "gflops_per_sec"
                    | "memory"
                    | "pipeline"
                    // The same run again is another one.
                    | "run"
            )
        });
    }
    metrics
}

#[test]
fn default_flags_fit_the_model_and_the_machine() {
    let workspace = Workspace::new();
    let outcome = workspace
        .finetune_by_default()
        .flag("--epochs", 1)
        .succeeds();
    let out = &outcome.stdout;
    // On a machine with GPUs, and a program for them, other ranks and another type are right.
    if cfg!(not(feature = "cuda")) {
        out.assert_has(&[
            "sequences of 2048 tokens; 1 rank as a thread: pp 1 x dp 1 x tp 1\n",
            "chosen for you: --dp 1 --seq-len 2048 --global-batch-size 16 --lr 2e-5",
        ]);
    }
    out.assert_has(&["memory of the largest rank, expected: weights "]);
    assert!(!out.contains("--- before"), "{out}");
}

#[test]
fn names_of_other_programs_flags_are_known() {
    let workspace = Workspace::new();
    let program = candle_train("finetune")
        .flag("--model", workspace.path("model").display())
        .flag("--data", workspace.path("text.txt").display())
        .flag("--output-dir", workspace.path("new").display())
        .flag("--learning-rate", 1e-3)
        .flag("--max-steps", 2)
        .flag("--per-device-train-batch-size", 2)
        .flag("--gradient-accumulation-steps", 3)
        .flag("--lr-scheduler-type", "constant_with_warmup")
        .flag("--seq-len", 16)
        .switch("--bf16");
    let outcome = program.succeeds();
    let out = &outcome.stdout;
    out.assert_has(&[
        "2 steps of 6 sequences of 16 tokens",
        "a step: micro-batch 2 x dp 1 x accumulation 3 = 6 sequences\n",
    ]);
    assert!(workspace.path("new").join("model.safetensors").is_file());
    program.clone().flag("--num-train-epochs", 1).fails(&[
        "--steps",
        "cannot be used with",
        "--epochs",
    ]);
    program.clone().flag("--micro-batch-size", 1).fails(&[
        "--micro-batch-size",
        "cannot be used with",
        "--per-device-train-batch-size",
    ]);
    program
        .flag("--dtype", "f32")
        .fails(&["--bf16", "cannot be used with", "--dtype"]);
}

#[test]
fn samples_and_progress_are_shown_and_a_checkpoint_is_saved() {
    let workspace = Workspace::new();
    let degrees = ["--tp", "--pp", "--dp"].map(|flag| (flag, 2));
    let program = workspace.finetune_by_default().flag("--epochs", 1);
    let program = program
        .flags(&degrees)
        .flag("--seq-len", 128)
        .flag("--lr", 1e-3);
    let outcome = program.flag("--prompt", "The Queen").succeeds();
    let out = &outcome.stdout;
    out.assert_has(&[
        "pp 2 x dp 2 x tp 2, ZeRO-1",
        "--- before\nThe Queen",
        "\nmemory of the largest rank: weights ",
        "--- after\nThe Queen",
    ]);
    let last = format!("saved to {}", workspace.output().display());
    assert_eq!(out.lines().last(), Some(last.as_str()));
    // 7274 tokens make 57 sequences of 128, 3.6 batches of 16.
    let (warnings, steps): (Vec<&str>, Vec<&str>) = outcome
        .stderr
        .lines()
        .partition(|line| !line.starts_with("step "));
    assert_eq!(
        warnings[0],
        "warning: that is 4 updates of the weights only"
    );
    assert_eq!(steps.len(), 4, "{steps:?}");
    for (index, line) in steps.iter().enumerate() {
        line.assert_begins(&format!("step {}/4 loss ", index + 1));
        line.assert_has(&["tokens/s"]);
    }
    let saved = read_tensors(&workspace.output().join("model.safetensors"));
    let model = read_tensors(&workspace.model("model.safetensors"));
    assert!(saved.keys().eq(model.keys()));
    for (name, tensor) in &model {
        assert_eq!(
            (saved[name].0, &saved[name].1),
            (tensor.0, &tensor.1),
            "{name}"
        );
        assert!(saved[name].2 != tensor.2, "{name} was not trained");
    }
}

#[test]
fn metrics_are_one_object_a_step() {
    let workspace = Workspace::new();
    let path = workspace.path("metrics.jsonl");
    let earlier = "{\"step\":0,\"loss\":1.5,\"learning_rate\":0.1}\n";
    fs::write(&path, earlier.repeat(100)).unwrap();
    workspace
        .finetune()
        .flag("--steps", 3)
        .flag("--metrics", path.display())
        .succeeds();
    let metrics = metrics(&path);
    assert_eq!(metrics.len(), 3);
    for (index, step) in metrics.iter().enumerate() {
        let mut fields: Vec<&str> = step.keys().map(String::as_str).collect();
        fields.sort_unstable();
        let expected = [
            "epoch",
            "gflops_per_sec",
            "global_step",
            "grad_norm",
            "learning_rate",
            "loss",
            "loss_scale",
            "memory",
            "num_positions",
            "num_tokens",
            "padding",
            "pipeline",
            "positions_per_sec",
            "run",
            "skipped_steps",
            "step",
            "step_secs",
            "tokens_per_sec",
        ];
        assert_eq!(fields, expected);
        assert_eq!(step["step"], index);
        assert_eq!(step["num_tokens"], 64);
        assert_eq!(step["num_positions"], 64);
        // For each weight of a product 6 (in a layer q, k, v, o and the MLP's three, and the head), for attention 6 for each of its
        // 4 heads' 8 dims and each of 16 tokens.
        let layer = 32 * (32 + 16 + 16 + 32) + 3 * 32 * 56;
        let per_token = 6 * (4 * layer + 307 * 32) + 4 * 6 * (4 * 8) * 16;
        let [gflops, tokens] = ["gflops_per_sec", "tokens_per_sec"].map(|name| step[name].as_f64());
        let ratio = 1e9 * gflops.unwrap() / tokens.unwrap() / f64::from(per_token);
        assert!((ratio - 1.0).abs() < 1e-9, "{ratio}");
        for category in ["weights", "gradients", "optimizer"] {
            let peak = &step["memory"][format!("{category}_peak_bytes")];
            assert!(peak.as_u64().unwrap() > 0, "{category}: {peak}");
        }
        for field in [
            "loss",
            "grad_norm",
            "learning_rate",
            "tokens_per_sec",
            "step_secs",
        ] {
            assert!(
                step[field].as_f64().unwrap() > 0.0,
                "{field}: {}",
                step[field]
            );
        }
    }
}

#[test]
fn what_replicas_divide_and_send_changes_what_a_rank_holds_and_hardly_the_loss() {
    let workspace = Workspace::new();
    let path = workspace.path("metrics.jsonl");
    let last = |flags: &[(&str, &str)]| {
        let program = workspace.finetune().flag("--dp", 2).flag("--pp", 1);
        let program = program.flag("--tp", 1).flag("--steps", 3);
        let program = program.flags(flags);
        program.flag("--metrics", path.display()).succeeds();
        let last = metrics(&path).pop().unwrap();
        let bytes = |field: &str| last["memory"][field].as_u64().unwrap();
        let held = ["weights_bytes", "gradients_bytes", "gathered_peak_bytes"].map(bytes);
        (last["loss"].as_f64().unwrap(), held)
    };
    let (want, [weights, gradients, gathered]) = last(&[("--zero", "1")]);
    assert_eq!(gathered, 0);
    let close = |loss: f64, tolerance: f64| (loss - want).abs() <= tolerance * want;
    let (loss, held) = last(&[("--zero", "2")]);
    assert!(close(loss, 1e-5), "{loss} {want}");
    assert_eq!(held, [weights, gradients / 2, 0]);
    let (loss, held) = last(&[("--zero", "3")]);
    assert!(close(loss, 1e-5), "{loss} {want}");
    assert_eq!(held[..2], [gradients / 2, gradients / 2]);
    assert!(held[2] > 0 && held[2] < gradients);
    let (tiled_loss, tiled) = last(&[("--zero", "3"), ("--tile-linears", "4")]);
    assert!(close(tiled_loss, 1e-5), "{tiled_loss} {want}");
    assert!(tiled[2] > 0 && tiled[2] < held[2] / 2, "{tiled:?} {held:?}");
    for flags in [
        [("--zero", "3"), ("--quantize-weights", "int8")],
        [("--zero", "2"), ("--quantize-gradients", "int8")],
        [("--zero", "0"), ("--grad-reduce-dtype", "bf16")],
    ] {
        let (loss, _) = last(&flags);
        assert!(loss != want && close(loss, 0.02), "{flags:?} {loss} {want}");
    }
}

#[test]
fn recomputation_keeps_less_between_passes_and_changes_no_number() {
    let workspace = Workspace::new();
    let path = workspace.path("metrics.jsonl");
    // Of one rank, which counts all that the process allocates.
    let program = workspace.finetune().flag("--tp", 1).flag("--pp", 1);
    let program = program.flag("--dp", 1).flag("--seq-len", 128);
    let program = program.flag("--metrics", path.display());
    let run = |mode: &str| {
        program.clone().flag("--recompute", mode).succeeds();
        let metrics = metrics(&path);
        let peak = &metrics[1]["memory"]["activations_peak_bytes"];
        (peak.as_u64().unwrap(), without_times(metrics))
    };
    let (kept, want) = run("none");
    let (less, got) = run("full");
    assert!(less > 0 && 2 * less < kept, "{less} {kept}");
    assert!(got == want);
}

#[test]
fn epochs_count_passes_over_the_data() {
    let workspace = Workspace::new();
    // The folder that they are in is made by the run itself.
    let output = workspace.path("new/output");
    let path = workspace.path("new/metrics.jsonl");
    let outcome = workspace
        .finetune()
        .without("--steps")
        .flag("--epochs", 2)
        .flag("--seq-len", 1000)
        .flag("--output", output.display())
        .flag("--metrics", path.display())
        .succeeds();
    // 8 sequences of 1000 tokens in batches of 4: 2 steps a pass.
    outcome.prints(&["7274 tokens in 8 sequences, 4 steps of 4 sequences of 1000"]);
    assert_eq!(metrics(&path).len(), 4);
}

#[test]
fn the_reference_run_of_pytorch_is_reproduced() {
    let workspace = Workspace::new();
    let path = workspace.path("metrics.jsonl");
    let mut program = workspace
        .finetune_by_default()
        .switch("--no-shuffle")
        .flag("--sample-tokens", 0)
        .flag("--metrics", path.display());
    for (name, value) in read_json(&fixture("gqa/run.json")).as_object().unwrap() {
        program = program.flag(&format!("--{}", name.replace('_', "-")), value);
    }
    program.succeeds();
    let reference = metrics(&fixture("gqa/reference/metrics.jsonl"));
    let ours = metrics(&path);
    assert_eq!(ours.len(), reference.len());
    for (ours, reference) in ours.iter().zip(&reference) {
        assert_eq!(ours["step"], reference["step"]);
        assert_eq!(ours["num_tokens"], reference["num_tokens"]);
        for (field, tolerance) in [("loss", 1e-5), ("grad_norm", 1e-4), ("learning_rate", 1e-9)] {
            let (a, b) = (
                ours[field].as_f64().unwrap(),
                reference[field].as_f64().unwrap(),
            );
            assert!(
                (a - b).abs() <= tolerance * b,
                "step {}, {field}: {a}, PyTorch {b}",
                ours["step"]
            );
        }
    }
}

#[test]
fn a_seed_decides_every_number() {
    let run = |seed: u64| {
        let workspace = Workspace::new();
        let path = workspace.path("metrics.jsonl");
        let program = workspace
            .finetune()
            .flag("--metrics", path.display())
            .flag("--prompt", "The Queen")
            .flag("--seed", seed);
        let stdout = program.flag("--sample-tokens", 8).succeeds().stdout;
        let samples = stdout.split_once("--- before").unwrap().1.to_string();
        let samples = samples.split_once("saved to").unwrap().0.to_string();
        let weights = fs::read(workspace.output().join("model.safetensors")).unwrap();
        (without_times(metrics(&path)), samples, weights)
    };
    let first = run(7);
    assert!(first == run(7));
    let other = run(8);
    assert!(first.0 != other.0 && first.1 != other.1 && first.2 != other.2);
}

#[test]
fn frozen_parameters_are_saved_as_they_were() {
    for (model, dtype) in [
        ("bf16_sharded", "f32"),
        ("bf16_sharded", "bf16"),
        ("gqa", "bf16"),
    ] {
        let workspace = Workspace::with_model(model);
        workspace
            .finetune()
            .flag("--freeze", r"embed_tokens|layers\.[0-1]\.mlp")
            .flag("--dtype", dtype)
            .flag("--lr", 0.1)
            .succeeds();
        let saved = read_checkpoint(&workspace.output());
        let model = read_checkpoint(&workspace.path("model"));
        assert!(saved.keys().eq(model.keys()));
        for (name, tensor) in &model {
            let is_frozen = name.contains("embed_tokens")
                || name.contains("layers.0.mlp")
                || name.contains("layers.1.mlp");
            assert_eq!(saved[name] == *tensor, is_frozen, "{name}");
        }
    }
}

#[test]
fn after_no_step_the_weights_are_what_they_were() {
    for (model, flag) in [("gqa", "bf16"), ("bf16_sharded", "bf16"), ("wide", "f32")] {
        let workspace = Workspace::with_model(model);
        workspace
            .finetune()
            .flag("--steps", 0)
            .flag("--dtype", flag)
            .succeeds();
        let saved = read_checkpoint(&workspace.output());
        assert!(
            saved == read_checkpoint(&workspace.path("model")),
            "{model}"
        );
    }
}

#[test]
fn a_pretrained_model_can_be_fine_tuned() {
    let workspace = Workspace::new();
    let model = workspace.path("pretrained");
    let small = |program: Program| {
        program
            .flag("--data", workspace.path("text.txt").display())
            .flag("--steps", 2)
            .flag("--seq-len", 16)
            .flag("--prompt", "The")
            .flag("--sample-tokens", 4)
    };
    let outcome = small(candle_train("pretrain"))
        .flag("--output", model.display())
        .flag("--vocab-size", 300)
        .flag("--hidden-size", 24)
        .flag("--intermediate-size", 40)
        .succeeds();
    outcome.prints(&["parameters", "--- sample\nThe", "saved to"]);
    let config = read_json(&model.join("config.json"));
    assert_eq!(config["vocab_size"], 300);
    assert_eq!(config["dtype"], "float32");
    small(workspace.finetune())
        .flag("--model", model.display())
        .succeeds();
    let saved = read_tensors(&workspace.output().join("model.safetensors"));
    assert!(
        saved
            .keys()
            .eq(read_tensors(&model.join("model.safetensors")).keys())
    );
}

/// `finetune_llama | head -1` must not cost a finished training.
#[test]
#[cfg(unix)]
fn a_reader_that_goes_away_does_not_end_the_run() {
    let workspace = Workspace::new();
    workspace
        .finetune()
        .flag("--sample-tokens", 2)
        .flag("--prompt", "The Queen")
        .without_reader()
        .succeeds_with_warnings();
    assert!(workspace.output().join("model.safetensors").is_file());
}

#[test]
fn every_family_is_fine_tuned_by_the_same_command() {
    for name in ["mistral", "mistral_dynamic", "qwen2", "qwen3", "gemma"] {
        let workspace = Workspace::with_model(name);
        let program = workspace.finetune().flag("--sample-tokens", 4);
        let outcome = program.flag("--prompt", "The Queen").succeeds();
        assert!(outcome.stdout.contains("--- after\nThe"), "{name}");
        let [input, output] = [workspace.path("model"), workspace.output()];
        let config = |dir: &Path| read_json(&dir.join("config.json"));
        assert_eq!(config(&output), config(&input), "{name}");
        let (before, after) = (read_checkpoint(&input), read_checkpoint(&output));
        assert!(before.keys().eq(after.keys()), "{name}");
        assert!(before != after, "{name}: nothing was trained");
    }
}

#[test]
fn a_batch_ramp_is_exact_on_other_layouts_and_when_it_is_resumed() {
    let workspace = Workspace::new();
    let saves = workspace.path("saves");
    let run = |flags: &[(&str, &str)]| {
        let program = workspace
            .finetune()
            .flag("--global-batch-size", 8)
            .flag("--batch-ramp", "2,2,18")
            .flag("--steps", 9)
            .flag("--save-dir", saves.display())
            .flag("--save-every", 5)
            .flag("--metrics", workspace.path("metrics.jsonl").display());
        let program = program.flags(flags);
        let out = program.succeeds_with_warnings();
        let lines = metrics(&workspace.path("metrics.jsonl"));
        let of = |name: &str| -> Vec<f64> {
            lines
                .iter()
                .map(|line| line[name].as_f64().unwrap())
                .collect()
        };
        (
            out.stdout,
            [of("num_positions"), of("learning_rate"), of("loss")],
        )
    };
    let (out, [positions, rates, losses]) = run(&[]);
    out.assert_has(&["9 steps of 2 to 8 sequences (after the first 18)"]);
    let sizes = [2, 2, 2, 4, 4, 6, 8, 8, 8].map(|size| f64::from(16 * size));
    assert_eq!(positions, sizes);
    // 44 sequences are 5.5 steps of 8; the warm-up of 3% is a step of 8.
    assert_eq!(rates[..3], [2.5e-4, 5e-4, 7.5e-4]);
    assert_eq!(rates[3], 1e-3);
    assert!(rates[4] < 1e-3 && rates.windows(2).skip(4).all(|pair| pair[1] < pair[0]));
    let latest = [("--resume", "latest"), ("--steps", "9")];
    let (_, [_, again_rates, again]) = run(&latest);
    assert_eq!((&again_rates[..], &again[..]), (&rates[..], &losses[..]));
    std::fs::remove_dir_all(&saves).unwrap();
    let (_, [_, other_rates, other]) = run(&[("--dp", "1"), ("--tp", "1")]);
    assert_eq!(other_rates, rates);
    for (got, want) in other.iter().zip(&losses) {
        assert!((got - want).abs() <= 1e-5 * want, "{other:?} {losses:?}");
    }
    let refused = workspace.finetune().flag("--batch-ramp", "3,1,18");
    refused.fails(&["start(3)", "multiples of 2"]);
    let refused = workspace.finetune().flag("--batch-ramp", "3;1");
    refused.fails(&["--batch-ramp", "16,8,10000"]);
}
