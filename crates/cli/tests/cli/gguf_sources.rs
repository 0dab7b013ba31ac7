//! Of what GGUF files are made: adapters, checkpoints, runs; and Ollama's Modelfile beside them.

use std::fs;

use candle_core::{Device, Tensor};
use candle_launch::NOT_SAVED_EXIT_CODE;
use serde_json::json;

use super::folder::{fixture, read_checkpoint};
use super::gguf::{assert_same, name_in_file, swapped};
use super::gguf_file::{Read, assert_near};
use super::gguf_models::{export, tokenizers, values};
use super::program::AssertText;
use super::workspace::{Workspace, candle_train};

#[test]
fn an_adapter_is_folded_in_before_anything_is_rounded() {
    let workspace = Workspace::with_model("tied_bias");
    let adapter = fixture("lora/tied_bias/adapter");
    let (base, merged) = (workspace.path("model"), workspace.path("merged"));
    candle_train("merge")
        .flag("--model", base.display())
        .flag("--adapter", adapter.display())
        .flag("--output", merged.display())
        .succeeds();
    for gguf_type in ["f32", "q8_0"] {
        let (of_merged, of_adapter) = (
            workspace.path("merged.gguf"),
            workspace.path("adapter.gguf"),
        );
        export(&merged, &of_merged)
            .flag("--type", gguf_type)
            .switch("--overwrite")
            .succeeds();
        let program = export(&adapter, &of_adapter).flag("--model", base.display());
        program
            .flag("--type", gguf_type)
            .switch("--overwrite")
            .succeeds();
        // Sums of other blocks of rows may be rounded otherwise, and blocks then have another scale.
        assert_near(
            &of_adapter,
            &of_merged,
            if gguf_type == "f32" { 1e-6 } else { 1e-2 },
        );
    }
    let alone = workspace.path("alone.gguf");
    let program = export(&adapter, &alone).flag("--model", base.display());
    program.switch("--adapter-only").succeeds();
    let mut read = Read::open(&alone);
    assert_eq!(read.text("general.type"), "adapter");
    assert_eq!(read.text("general.architecture"), "llama");
    assert_eq!(read.text("adapter.type"), "lora");
    // alpha 3 by the root of rank 4, of which llama.cpp takes a fourth.
    assert_eq!(read.number("adapter.lora.alpha"), 6.0);
    let tensors = read_checkpoint(&adapter);
    assert_eq!(read.content.tensor_infos.len(), tensors.len());
    for (name, tensor) in tensors {
        let values = Tensor::from_vec(values(&tensor), tensor.1.clone(), &Device::Cpu).unwrap();
        let name = name.strip_prefix("base_model.model.").unwrap();
        let is_b = name.contains("lora_B");
        let layer = name
            .replace(".lora_A.weight", ".weight.lora_a")
            .replace(".lora_B.weight", ".weight.lora_b");
        let own = name_in_file(&layer);
        let expected = match is_b && own.contains("attn_q.") {
            true => swapped(&values, 6),
            false => values,
        };
        assert_same(&own, &read.values(&own), &expected);
    }
}

#[test]
fn a_checkpoint_is_the_model_that_the_run_saves() {
    let workspace = Workspace::new();
    let saves = workspace.path("saves");
    let runs = [
        (
            "whole",
            workspace.finetune().flag("--freeze", "layers.1|norm"),
        ),
        ("lora", workspace.finetune().flag("--lora-rank", 2)),
    ];
    for (name, run) in runs {
        let output = workspace.path(name);
        run.flag("--output", output.display())
            .flag("--save-every", 1)
            .flag("--save-dir", saves.display())
            .succeeds();
        let (of_run, of_checkpoint) = (
            workspace.path("run.gguf"),
            workspace.path("checkpoint.gguf"),
        );
        export(&output, &of_run)
            .flag("--type", "f32")
            .switch("--overwrite")
            .succeeds();
        let program = export(&saves.join("step-000002"), &of_checkpoint).flag("--type", "f32");
        program.switch("--overwrite").succeeds();
        assert_near(&of_checkpoint, &of_run, 0.0);
        fs::remove_dir_all(&saves).unwrap();
    }
}

#[test]
fn a_run_writes_a_file_at_its_end() {
    let workspace = Workspace::new();
    let output = workspace.path("trained");
    let run = workspace
        .finetune()
        .without("--overwrite")
        .flag("--output", output.display());
    let run = run.flag("--export-gguf", "q8_0");
    run.clone().switch("--dry-run").succeeds();
    let said = run.succeeds().stdout;
    let file = workspace.path("trained-q8_0.gguf");
    said.assert_has(&[&format!("wrote {}", file.display())]);
    let again = workspace.path("again.gguf");
    export(&output, &again).flag("--type", "q8_0").succeeds();
    assert_near(&file, &again, 0.0);
    // The same command replaces what it made, as it does the model.
    let before = fs::read(&file).unwrap();
    run.succeeds();
    assert!(fs::read(&file).unwrap() == before);
    // What is not its own is not lost, and that is not found out after hours.
    fs::copy(&again, &file).unwrap();
    let before = fs::read(&file).unwrap();
    let parts = [
        "trained-q8_0.gguf exists already",
        "hint: --overwrite replaces it",
    ];
    run.fails(&parts);
    assert!(fs::read(&file).unwrap() == before);
    run.clone().switch("--dry-run").fails(&parts);
    // What comes into its place while the run trains is not lost, and the model is there.
    let output = workspace.path("second");
    let file = workspace.path("second-f32.gguf");
    let run = workspace
        .finetune()
        .without("--overwrite")
        .flag("--output", output.display());
    let run = run.flag("--export-gguf", "f32").flag("--steps", 100);
    let outcome = run
        .run_and(|stderr| {
            if stderr.contains("step ") && !file.exists() {
                fs::write(&file, "mine").unwrap();
            }
        })
        .exited(NOT_SAVED_EXIT_CODE.into());
    outcome.says(&["not as a GGUF file"]);
    assert_eq!(fs::read_to_string(&file).unwrap(), "mine");
    assert_eq!(
        read_checkpoint(&output).len(),
        read_checkpoint(&workspace.path("model")).len()
    );
    // A model that began with random numbers, and its tokenizer.
    let trained = candle_train("pretrain")
        .flag("--data", workspace.path("text.txt").display())
        .flag("--output", workspace.path("new").display())
        .flag("--vocab-size", 270)
        .flag("--hidden-size", 12)
        .flag("--seq-len", 16)
        .flag("--steps", 1)
        .flag("--sample-tokens", 0)
        .flag("--export-gguf", "q8_0");
    trained.succeeds();
    assert_eq!(
        Read::open(&workspace.path("new-q8_0.gguf")).text("tokenizer.ggml.pre"),
        "gpt-2"
    );
    // An adapter is folded into its model.
    let lora = workspace.path("lora");
    let run = workspace
        .finetune()
        .flag("--output", lora.display())
        .flag("--lora-rank", 2);
    run.flag("--export-gguf", "f32").succeeds();
    let merged = workspace.path("merged.gguf");
    export(&lora, &merged)
        .flag("--type", "f32")
        .flag("--model", workspace.path("model").display())
        .succeeds();
    assert_near(&workspace.path("lora-f32.gguf"), &merged, 0.0);
    // What llama.cpp does not know is refused before the first step.
    let dynamic = Workspace::with_model("mistral_dynamic");
    let run = dynamic
        .finetune()
        .flag("--output", dynamic.path("out").display())
        .flag("--export-gguf", "f32");
    run.fails(&["rope_type is \"dynamic\"", "hint: "]);
}

#[test]
fn a_modelfile_says_how_ollama_uses_the_file() {
    let cases = tokenizers();
    let modelfile = |name: &str| {
        let case = cases.iter().find(|case| case.name == name).unwrap();
        let workspace = &case.workspace;
        let file = workspace.path("model.gguf");
        let said = export(&workspace.path("model"), &file)
            .switch("--modelfile")
            .succeeds()
            .stdout;
        said.assert_has(&["Modelfile"]);
        let program = export(&workspace.path("model"), &workspace.path("b.gguf"));
        program
            .switch("--modelfile")
            .fails(&["Modelfile exists already", "--overwrite"]);
        assert!(!workspace.path("b.gguf").exists());
        fs::read_to_string(workspace.path("Modelfile")).unwrap()
    };
    let text = modelfile("chatml");
    text.assert_begins("FROM ./model.gguf\nTEMPLATE \"\"\"{{ if .System }}<|im_start|>system\n");
    text.assert_has(&["PARAMETER stop \"<|im_end|>\"\n"]);
    // The first token is llama.cpp's to add.
    let text = modelfile("zephyr");
    assert!(text.contains("TEMPLATE") && !text.contains("<s>"), "{text}");
    let workspace = Workspace::new();
    let config = json!({"do_sample": true, "temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1, "eos_token_id": [1, 2]});
    fs::write(
        workspace.model("generation_config.json"),
        config.to_string(),
    )
    .unwrap();
    export(&workspace.path("model"), &workspace.path("model.gguf"))
        .switch("--modelfile")
        .succeeds();
    let text = fs::read_to_string(workspace.path("Modelfile")).unwrap();
    for line in [
        "temperature 0.6",
        "top_k 50",
        "top_p 0.9",
        "repeat_penalty 1.1",
    ] {
        text.assert_has(&[&format!("PARAMETER {line}\n")]);
    }
}

#[test]
fn a_tied_pair_that_is_there_as_the_head_alone_is_exported_and_counted() {
    let workspace = Workspace::with_model("tied_bias");
    let model = workspace.path("model");
    let inspected = || {
        let said = candle_train("inspect").argument(model.display()).succeeds();
        let lines = said.stdout.lines().map(str::to_string);
        Vec::from_iter(lines.filter(|line| line.starts_with("parameters")))
    };
    let written = || {
        let file = workspace.path("model.gguf");
        export(&model, &file).switch("--overwrite").succeeds();
        fs::read(file).unwrap()
    };
    let want = (inspected(), written());
    workspace.edit_weights(|tensors| {
        let embedding = tensors.remove("model.embed_tokens.weight").unwrap();
        tensors.insert("lm_head.weight".to_string(), embedding);
    });
    assert_eq!(inspected(), want.0);
    assert!(written() == want.1);
}
