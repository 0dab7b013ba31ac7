//! `--lora-rank` and `--adapter`: what is trained, what is saved, and going on; `merge`.

use std::fs;
use std::path::Path;

use safetensors::Dtype;
use serde_json::json;

use super::folder::{
    copy_folder, edit_json, edit_tensors, fixture, names, read_checkpoint, read_json, read_tensors,
};
use super::program::{AssertText, Program};
use super::training::metrics;
use super::workspace::{Workspace, candle_train};

const FILES: [&str; 5] = [
    ".candle_train.json",
    "adapter_config.json",
    "adapter_model.safetensors",
    "chat_template.jinja",
    "tokenizer.json",
];

pub fn lora(workspace: &Workspace) -> Program {
    workspace.finetune().flag("--lora-rank", 2)
}

pub fn merge(workspace: &Workspace, adapter: &str) -> Program {
    candle_train("merge")
        .flag("--model", workspace.path("model").display())
        .flag("--adapter", workspace.path(adapter).display())
        .flag("--output", workspace.path("merged").display())
}

/// Copies an adapter, as one of a model that is called as that of a workspace.
fn copy_fixture(name: &str, to: &Path) {
    copy_folder(&fixture(name), to);
    edit_json(&to.join("adapter_config.json"), |config| {
        config["base_model_name_or_path"] = json!("org/model")
    });
}

#[test]
fn the_output_is_an_adapter_which_training_goes_on_with() {
    let workspace = Workspace::new();
    let program = lora(&workspace).without("--lr");
    let outcome = program.switch("--rslora").succeeds();
    let said = "3904 of 57632 parameters are trained (6.77%), adapters of rank 2 and scale 11.3137 beside 28 layers; frozen: 39 \
                tensors of 53728 values";
    outcome.prints(&[said, "--lr 2e-4"]);
    let files = names(&workspace.output());
    assert!(
        FILES
            .iter()
            .all(|name| files.iter().any(|file| file == name)),
        "{files:?}"
    );
    assert!(
        !files
            .iter()
            .any(|file| file == "config.json" || file.starts_with("model")),
        "{files:?}"
    );
    let config = read_json(&workspace.output().join("adapter_config.json"));
    let layers = [
        "down_proj",
        "gate_proj",
        "k_proj",
        "o_proj",
        "q_proj",
        "up_proj",
        "v_proj",
    ];
    for (field, value) in [
        ("peft_type", json!("LORA")),
        ("task_type", json!("CAUSAL_LM")),
        ("r", json!(2)),
        ("lora_alpha", json!(16)),
        ("use_rslora", json!(true)),
        ("target_modules", json!(layers)),
        ("base_model_name_or_path", json!(workspace.path("model"))),
    ] {
        assert_eq!(config[field], value, "{field}");
    }
    let first = read_checkpoint(&workspace.output());
    assert_eq!(first.len(), 56);
    let b = &first["base_model.model.model.layers.3.mlp.down_proj.lora_B.weight"];
    assert_eq!((b.0, b.1.as_slice()), (Dtype::F32, [32, 2].as_slice()));
    assert!(b.2.iter().any(|byte| *byte != 0));

    copy_folder(&workspace.output(), &workspace.path("adapter"));
    let again = workspace
        .finetune()
        .flag("--adapter", workspace.path("adapter").display());
    again.succeeds();
    let second = read_checkpoint(&workspace.output());
    assert!(second.keys().eq(first.keys()));
    assert!(second != first);
    assert_eq!(
        read_json(&workspace.output().join("adapter_config.json")),
        config
    );
    // Without a step it is what it was.
    again.flag("--steps", 0).succeeds();
    assert!(read_checkpoint(&workspace.output()) == first);
}

#[test]
fn a_resumed_run_has_the_bits_of_one_that_was_not_interrupted() {
    let workspace = Workspace::new();
    let program = lora(&workspace)
        .flag("--steps", 4)
        .flag("--lora-dropout", 0.2)
        .flag("--lora-targets", "q_proj,down_proj")
        .flag("--save-every", 2)
        .flag("--save-dir", workspace.path("saves").display());
    program.succeeds();
    let want = read_checkpoint(&workspace.output());
    assert_eq!(want.len(), 16);
    // 12 bytes for each of the 1216 values that are trained, and none of the base.
    let saved = workspace.path("saves/step-000002");
    let files = names(&saved)
        .into_iter()
        .filter(|name| name.ends_with(".safetensors"));
    // What follows the header, whose length the first 8 bytes tell.
    let num_bytes: u64 = files
        .map(|name| {
            let bytes = fs::read(saved.join(name)).unwrap();
            let header = u64::from_le_bytes(bytes[..8].try_into().unwrap());
            bytes.len() as u64 - 8 - header
        })
        .sum();
    assert_eq!(num_bytes, 12 * 1216);
    // The model need not be there to export it.
    let exported = workspace.path("exported");
    let last = workspace.path("saves/step-000004");
    fs::rename(workspace.path("model"), workspace.path("away")).unwrap();
    let export = candle_train("export").argument(last.display());
    export.argument(exported.display()).succeeds();
    fs::rename(workspace.path("away"), workspace.path("model")).unwrap();
    assert!(read_checkpoint(&exported) == want);
    let config = "adapter_config.json";
    assert_eq!(
        read_json(&exported.join(config)),
        read_json(&workspace.output().join(config))
    );
    let again = workspace.path("again");
    copy_folder(&saved, &again.join("step-000002"));
    let program = program
        .flag("--save-dir", again.display())
        .flag("--resume", "latest");
    program.succeeds();
    assert!(read_checkpoint(&workspace.output()) == want);
    let other = program.flag("--lora-alpha", 8);
    workspace.run_refused(&other, &["--lora-alpha is 8, and 16 in the checkpoint"]);
}

#[test]
fn merge_folds_the_adapter_in_and_keeps_types_and_files() {
    let workspace = Workspace::with_model("qwen3");
    copy_fixture("lora/qwen3/adapter", &workspace.path("adapter"));
    merge(&workspace, "adapter").succeeds();
    let merged = read_checkpoint(&workspace.path("merged"));
    let before = read_checkpoint(&workspace.path("model"));
    let want = read_tensors(&fixture("lora/qwen3/reference/merged.safetensors"));
    assert!(merged.keys().eq(before.keys()));
    let values = |bytes: &[u8]| -> Vec<f32> {
        let values = bytes.chunks_exact(4);
        values
            .map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap()))
            .collect()
    };
    for (name, (dtype, shape, bytes)) in &merged {
        let Some((_, _, expected)) = want.get(name) else {
            assert!(*bytes == before[name].2, "{name}");
            continue;
        };
        assert_eq!((*dtype, shape), (Dtype::F32, &before[name].1));
        for (ours, expected) in values(bytes).iter().zip(values(expected)) {
            assert!(
                (ours - expected).abs() <= 1e-6 * expected.abs().max(0.1),
                "{name}: {ours} {expected}"
            );
        }
    }
    assert_eq!(
        names(&workspace.path("merged")),
        names(&workspace.path("model"))
    );
    // A model that is there stays, unless it is said that it need not.
    let parts = ["merged", "it holds a model already"];
    merge(&workspace, "adapter").fails(&parts);
    merge(&workspace, "adapter")
        .switch("--overwrite")
        .flag("--save-dtype", "bf16")
        .succeeds();
    let narrow = read_checkpoint(&workspace.path("merged"));
    assert!(narrow.values().all(|(dtype, ..)| *dtype == Dtype::BF16));
    assert_eq!(
        read_json(&workspace.path("merged/config.json"))["dtype"],
        json!("bfloat16")
    );
}

#[test]
fn flags_that_contradict_each_other_are_refused() {
    let workspace = Workspace::new();
    let adapter = workspace.finetune().flag("--adapter", "somewhere");
    for flag in ["--lora-rank", "--lora-alpha", "--lora-targets", "--freeze"] {
        workspace.refuses(&adapter.clone().flag(flag, 1), &[flag, "--adapter"]);
    }
    workspace.refuses(&adapter, &["somewhere/adapter_config.json"]);
    workspace.refuses(&workspace.finetune().switch("--rslora"), &["--lora-rank"]);
    workspace.refuses(&lora(&workspace).flag("--freeze", "mlp"), &["--freeze"]);
    let targets = lora(&workspace).flag("--lora-targets", "q_proj,lm_head");
    let parts = [
        "is called lm_head",
        "hint: there are down_proj, gate_proj, k_proj",
    ];
    workspace.refuses(&targets, &parts);
    for (flag, value) in [
        ("--lora-rank", "0"),
        ("--lora-dropout", "1"),
        ("--lora-alpha", "0"),
    ] {
        workspace.refuses(&lora(&workspace).flag(flag, value), &[flag]);
    }
}

#[test]
fn a_base_in_fewer_bits_takes_less_memory_and_nearly_the_same_losses() {
    let workspace = Workspace::new();
    let path = workspace.path("metrics.jsonl");
    let run = |program: Program| {
        program.flag("--metrics", path.display()).succeeds();
        let last = metrics(&path).pop().unwrap();
        (
            last["loss"].as_f64().unwrap(),
            last["memory"]["weights_peak_bytes"].as_u64().unwrap(),
        )
    };
    let program = lora(&workspace)
        .flag("--tp", 1)
        .flag("--pp", 1)
        .flag("--dp", 2)
        .flag("--zero", 0)
        .flag("--pack-weights", "off");
    let (loss, bytes) = run(program.clone());
    // The norms and the adapters are in f32.
    let floats = 4 * (9 * 32 + 3904);
    assert_eq!(bytes, 4 * (57632 - 3904 - 9 * 32) + floats);
    let inner = 4 * (3072 + 5376);
    // No block divides the 56 columns of down_proj.
    let narrow = 2 * 4 * 32 * 56;
    for (format, expected) in [
        ("bf16", 2 * (2 * 307 * 32 + inner)),
        ("f16", 2 * (2 * 307 * 32 + inner)),
        (
            "q8_0",
            2 * 2 * 307 * 32 + (inner - 4 * 32 * 56) * 34 / 32 + narrow,
        ),
    ] {
        let (other, bytes) = run(program.clone().flag("--base-dtype", format));
        assert_eq!(bytes, expected + floats, "{format}");
        assert!(
            other != loss && (other - loss).abs() < 0.02 * loss,
            "{format}: {other} {loss}"
        );
    }
    // Divided over replicas, and tile by tile.
    let divided = program
        .flag("--zero", 3)
        .flag("--tile-linears", 2)
        .flag("--quantize-weights", "int8");
    let (other, bytes) = run(divided.flag("--base-dtype", "q8_0"));
    assert!((other - loss).abs() < 0.02 * loss, "{other} {loss}");
    // Each of the small adapters begins at a block of 256 values.
    assert!(bytes < 80_000, "{bytes}");
    let cut = lora(&workspace).flag("--base-dtype", "q8_0");
    workspace.run_refused(&cut, &["o_proj", "cuts blocks of 32 values", "hint"]);
    let parts = ["--base-dtype is given without adapters"];
    workspace.run_refused(&workspace.finetune().flag("--base-dtype", "q4k"), &parts);
}

#[test]
fn adapters_that_do_not_fit_are_refused() {
    let workspace = Workspace::new();
    let adapter = workspace.path("adapter");
    let program = workspace.finetune().flag("--adapter", adapter.display());
    let copy = |name: &str| copy_fixture(name, &adapter);
    copy("lora/qwen3/adapter");
    workspace.refuses(&program, &[".lora_", "has shape [", "; expected ["]);
    merge(&workspace, "adapter").fails(&["has shape"]);
    copy("lora/tied_bias/adapter");
    let parts = ["of the layer model.layers.4.mlp.down_proj", "another model"];
    merge(&workspace, "adapter").fails(&parts);
    assert!(!workspace.path("merged").exists());
    for (field, value) in [
        ("use_dora", json!(true)),
        ("bias", json!("all")),
        ("modules_to_save", json!(["lm_head"])),
        ("rank_pattern", json!({"q_proj": 8})),
        ("a_field_of_tomorrow", json!(1)),
        ("peft_type", json!("IA3")),
    ] {
        copy("lora/qwen3/adapter");
        edit_json(&adapter.join("adapter_config.json"), |config| {
            config[field] = value
        });
        let hint = match field == "peft_type" {
            true => "merge_and_unload",
            false => "hint: peft folds",
        };
        workspace.refuses(&program, &["adapter_config.json", field, hint]);
    }
    // The weights of these have names of their own, and are not what is blamed.
    for (field, value, word) in [
        ("use_dora", json!(true), "DoRA"),
        ("modules_to_save", json!(["lm_head"]), "whole modules"),
        ("peft_type", json!("PREFIX_TUNING"), "--lora-rank"),
    ] {
        copy("lora/qwen3/adapter");
        edit_json(&adapter.join("adapter_config.json"), |config| {
            config[field] = value
        });
        edit_tensors(&adapter.join("adapter_model.safetensors"), |tensors| {
            let tensor = tensors.values().next().unwrap().clone();
            tensors.insert("base_model.model.lm_head.weight".to_string(), tensor);
        });
        let inspect = candle_train("inspect").argument(adapter.display());
        inspect.fails(&[field, word, "hint: "]);
        merge(&workspace, "adapter").fails(&[field, word, "hint: "]);
    }
}

#[test]
fn merge_blames_the_file_with_a_nan_and_leaves_constants_as_they_are() {
    let workspace = Workspace::new();
    lora(&workspace)
        .flag("--output", workspace.path("adapter").display())
        .succeeds();
    let constant = "model.layers.0.self_attn.rotary_emb.inv_freq";
    workspace.edit_weights(|tensors| {
        let values: Vec<u8> = [1.0f32, 0.1]
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect();
        tensors.insert(constant.into(), (Dtype::F32, vec![2], values));
    });
    merge(&workspace, "adapter")
        .flag("--save-dtype", "bf16")
        .succeeds();
    let merged = read_checkpoint(&workspace.path("merged"));
    assert!(merged[constant] == read_tensors(&workspace.model("model.safetensors"))[constant]);
    assert_eq!(merged["model.norm.weight"].0, Dtype::BF16);
    let nan = |path: &Path, part: &str| {
        let mut name = String::new();
        edit_tensors(path, |tensors| {
            let (found, tensor) = tensors
                .iter_mut()
                .find(|(name, _)| name.contains(part))
                .unwrap();
            tensor.2[..4].copy_from_slice(&f32::NAN.to_le_bytes());
            name = found.clone();
        });
        name
    };
    fs::remove_dir_all(workspace.path("merged")).unwrap();
    let weight = workspace.model("model.safetensors");
    let file = workspace.path("adapter/adapter_model.safetensors");
    let before = fs::read(&file).unwrap();
    for part in ["lora_A", "lora_B"] {
        let name = nan(&file, part);
        let adapter = workspace.path("adapter").display().to_string();
        let parts = [name.as_str(), &adapter, "NaN or infinite"];
        merge(&workspace, "adapter").fails(&parts);
        fs::write(&file, &before).unwrap();
    }
    let name = nan(&weight, "mlp.up_proj");
    let model = workspace.path("model").display().to_string();
    let parts = [name.as_str(), &model, "NaN or infinite"];
    merge(&workspace, "adapter").fails(&parts);
    assert!(!workspace.path("merged").exists());
}

#[test]
fn inspect_tells_of_adapters_and_of_blocks() {
    let workspace = Workspace::new();
    let program = lora(&workspace)
        .flag("--tp", 1)
        .flag("--base-dtype", "q8_0")
        .flag("--eval-fraction", 0.2)
        .flag("--save-every", 2)
        .flag("--save-dir", workspace.path("saves").display());
    program.succeeds();
    let inspect = |name: &str| {
        let inspect = candle_train("inspect").argument(workspace.path(name).display());
        inspect.switch("--tensors").succeeds().stdout
    };
    let said = inspect("saves/step-000002");
    said.assert_has(&[
        "low-rank adapters: rank 2, alpha 16, dropout 0, beside all linear layers, of the model ",
        "least evaluation loss so far: ",
        " after step 2, 0 evaluations since then",
        "model.layers.1.self_attn.q_proj.weight [32, 32] q8_0 frozen",
        "model.embed_tokens.weight [307, 32] bf16 frozen",
        "lora_A.weight [2, 32] f32\n",
    ]);
    let adapter = inspect("output");
    adapter.assert_has(&[
        "is an adapter as peft has it",
        "rank 2, alpha 16",
        "q_proj.lora_A.weight [2, 32] f32\n",
    ]);
    let verify = candle_train("inspect").argument(workspace.output().display());
    let verify = verify.switch("--verify");
    let said = verify.succeeds().stdout;
    said.assert_has(&["verified: 56 tensors, all values are finite\n"]);
    edit_tensors(
        &workspace.path("output/adapter_model.safetensors"),
        |tensors| {
            let tensor = tensors.values_mut().next().unwrap();
            tensor.2[..4].copy_from_slice(&f32::INFINITY.to_le_bytes());
        },
    );
    verify.fails(&["lora_A", "NaN or infinite"]);
}
