//! What `candle-train export` refuses to write as a GGUF file, and a disk that is full.

use std::fs;

use serde_json::{Value, json};

use super::folder::{copy_folder, fixture, names};
use super::gguf_models::export;
use super::program::{AssertText, Program};
use super::workspace::{Workspace, candle_train};

#[test]
fn what_cannot_be_done_is_said() {
    let workspace = Workspace::new();
    let (dir, file) = (workspace.path("model"), workspace.path("model.gguf"));
    let refuse = |program: Program, parts: &[&str]| {
        let before = names(workspace.path("").as_path());
        program.fails(parts);
        assert_eq!(names(workspace.path("").as_path()), before);
    };
    refuse(
        export(&dir, &file).flag("--type", "q3_k"),
        &["q3_k", "f32", "q5_k_m", "q4_0"],
    );
    refuse(
        export(&dir, &workspace.path("out")).flag("--type", "f16"),
        &["--type", "ends in .gguf"],
    );
    refuse(
        export(&dir, &workspace.path("out")),
        &["is no GGUF file by its name", "out.gguf"],
    );
    std::os::unix::fs::symlink(
        workspace.model("model.safetensors"),
        workspace.path("link.gguf"),
    )
    .unwrap();
    let program = export(&dir, &workspace.path("link.gguf")).switch("--overwrite");
    refuse(program, &["is a link to", "model.safetensors"]);
    refuse(
        export(&dir, &file).flag("--dtype", "bf16"),
        &["--dtype", "--type"],
    );
    refuse(
        export(&dir, &file).switch("--adapter-only"),
        &["--adapter-only", "no adapter"],
    );
    refuse(export(&workspace.path("nowhere"), &file), &["nowhere"]);
    refuse(
        export(&dir, &file).flag("--model", dir.display()),
        &["--model", "leave it out"],
    );
    export(&dir, &file).succeeds();
    refuse(
        export(&dir, &file),
        &["model.gguf exists already", "--overwrite"],
    );
    export(&dir, &file).switch("--overwrite").succeeds();
    refuse(
        export(&file, &workspace.path("b.gguf")),
        &["is a GGUF file", "hint: give the folder"],
    );
    let train = candle_train("finetune").flag("--model", file.display());
    refuse(
        train.flag("--data", workspace.path("text.txt").display()),
        &["is a GGUF file", "hint: give the folder"],
    );
    let generate = candle_train("generate").flag("--model", file.display());
    refuse(
        generate.flag("--prompt", "x"),
        &["llama.cpp runs: llama-cli -m", "hint: give the folder"],
    );
    // An adapter whose base is not there, and one of another model.
    let moved = workspace.path("adapter");
    copy_folder(&fixture("lora/tied_bias/adapter"), &moved);
    super::folder::edit_json(&moved.join("adapter_config.json"), |config| {
        config["base_model_name_or_path"] = json!("org/nowhere");
    });
    refuse(
        export(&moved, &workspace.path("b.gguf")),
        &["org/nowhere", "hint: give that model"],
    );
    let program = export(&moved, &workspace.path("b.gguf")).flag("--model", dir.display());
    let said = program.run().stderr;
    said.assert_has(&["error: the adapter in", "which the model in"]);
}

#[test]
fn what_llama_cpp_does_not_know_is_said() {
    let refuse = |workspace: &Workspace, parts: &[&str]| {
        let file = workspace.path("model.gguf");
        export(&workspace.path("model"), &file).fails(parts);
        assert!(!file.exists());
    };
    refuse(
        &Workspace::with_model("mistral_dynamic"),
        &["rope_type is \"dynamic\"", "hint: "],
    );
    let gemma = Workspace::with_model("gemma");
    refuse(&gemma, &["attention_bias", "gemma"]);
    let yarn = Workspace::with_model("long");
    yarn.edit_config(|config| config["rope_parameters"]["beta_fast"] = json!(16.0));
    refuse(&yarn, &["beta_fast 16"]);
    let window = Workspace::with_model("mistral");
    let said = export(&window.path("model"), &window.path("model.gguf"))
        .succeeds()
        .stdout;
    said.assert_has(&["no windows of attention in llama: a text of more than 5 tokens"]);
    // Tokenizers.
    let split = |edit: fn(&mut Value)| {
        let workspace = Workspace::new();
        super::folder::edit_json(&workspace.model("tokenizer.json"), edit);
        workspace
    };
    let regex = split(|json| {
        json["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": "\\p{L}+|\\p{N}{1,2}"}, "behavior": "Isolated", "invert": false},
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false}
        ]});
    });
    refuse(&regex, &["\\p{L}+|\\p{N}{1,2}", "hint: the nearest is"]);
    let lower = split(|json| json["normalizer"] = json!({"type": "Lowercase"}));
    refuse(&lower, &["Lowercase"]);
    // A weight that config.json does not describe would be missing from the file.
    let more = Workspace::new();
    more.edit_weights(|tensors| {
        let bias = (safetensors::Dtype::F32, vec![32], vec![0; 128]);
        tensors.insert("model.layers.0.self_attn.q_proj.bias".to_string(), bias);
    });
    refuse(
        &more,
        &["model.layers.0.self_attn.q_proj.bias", "config.json"],
    );
    let nan = Workspace::new();
    nan.edit_weights(|tensors| {
        let (_, _, bytes) = tensors
            .get_mut("model.layers.2.mlp.up_proj.weight")
            .unwrap();
        bytes[4..8].copy_from_slice(&f32::NAN.to_le_bytes());
    });
    refuse(&nan, &["model.layers.2.mlp.up_proj.weight", "NaN"]);
    let large = Workspace::new();
    large.edit_weights(|tensors| {
        let (_, _, bytes) = tensors.get_mut("lm_head.weight").unwrap();
        bytes[4..8].copy_from_slice(&1e6f32.to_le_bytes());
    });
    let file = large.path("model.gguf");
    let program = export(&large.path("model"), &file).flag("--type", "f16");
    program.fails(&["lm_head.weight", "1000000", "65504"]);
}

#[test]
#[cfg(unix)]
fn a_full_disk_leaves_what_was_there() {
    let workspace = Workspace::new();
    let folder = workspace.path("gguf");
    fs::create_dir(&folder).unwrap();
    let file = folder.join("model.gguf");
    fs::write(&file, "before").unwrap();
    let program = export(&workspace.path("model"), &file)
        .flag("--type", "f32")
        .switch("--overwrite");
    program
        .with_limited_files()
        .fails(&["cannot write", "model.gguf", "File too large"]);
    assert_eq!(fs::read_to_string(&file).unwrap(), "before");
    assert_eq!(names(&folder), ["model.gguf"]);
}
