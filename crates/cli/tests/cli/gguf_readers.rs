//! Readers of GGUF files: `inspect`, candle's quantized models, and for their perplexity the model that they were made of.

use std::fs::{self, File};
use std::path::Path;

use candle_comm::{Degrees, Mesh, ProcessGroup};
use candle_core::quantized::gguf_file::Content;
use candle_core::{DType, Device, Tensor};
use candle_parallel::{ParamStore, Pass, Pipeline, Schedule};
use candle_train_models::{CausalLm, ModelConfig};
use candle_trainer::Tokenizer;
use candle_transformers::models::{quantized_llama, quantized_qwen3};
use safetensors::Dtype;

use super::folder::copy_folder;
use super::gguf::name_in_file;
use super::gguf_file::Read;
use super::gguf_models::{bundled, export, families};
use super::program::AssertText;
use super::workspace::{Workspace, candle_train};

/// Gives a model of Llama's the weights that a file made of it has.
fn take_weights(workspace: &Workspace, file: &Path) {
    let config = ModelConfig::from_file(workspace.model("config.json")).unwrap();
    let mut read = Read::open(file);
    workspace.edit_weights(|tensors| {
        for (name, (dtype, shape, bytes)) in tensors {
            let mut found = read.values(&name_in_file(name));
            // The rows of a pair, beside each other in a file, are half a head apart again.
            for (part, num_heads) in [
                ("q_proj", config.num_attention_heads),
                ("k_proj", config.num_key_value_heads),
            ] {
                if name.contains(part) {
                    let rows = (num_heads, config.head_dim / 2, 2, config.hidden_size);
                    let heads = found.reshape(rows).and_then(|heads| heads.transpose(1, 2));
                    found = heads.and_then(|it| it.contiguous()).unwrap();
                }
            }
            let found = found.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            assert_eq!(found.len(), shape.iter().product::<usize>());
            *dtype = Dtype::F32;
            *bytes = found.iter().flat_map(|value| value.to_le_bytes()).collect();
        }
    });
}

/// The mean loss of a model on a text.
fn loss(dir: &Path, ids: &[u32]) -> f64 {
    const LEN: usize = 128;
    let config = ModelConfig::from_file(dir.join("config.json")).unwrap();
    let mesh = Mesh::new(ProcessGroup::single(Device::Cpu), Degrees::default()).unwrap();
    let store = ParamStore::from_pretrained(dir).unwrap().freeze(|_| true);
    let part = CausalLm::part(&config, &mesh, &store.builder(DType::F32, &Device::Cpu)).unwrap();
    let pipeline = Pipeline::new(Schedule::GPipe, &mesh);
    let (mut sum, mut number) = (0.0, 0);
    for ids in ids.chunks_exact(LEN) {
        let pass = Pass::infer(Tensor::from_slice(ids, (1, LEN), &Device::Cpu).unwrap());
        let places: Vec<usize> = (0..LEN - 1).collect();
        let logits = pipeline.logits(&part, &pass, &places).unwrap();
        let rows = logits
            .reshape((LEN - 1, config.vocab_size))
            .unwrap()
            .to_vec2::<f32>()
            .unwrap();
        for (row, next) in rows.iter().zip(&ids[1..]) {
            let all: f64 = row.iter().map(|logit| f64::from(*logit).exp()).sum();
            sum += all.ln() - f64::from(row[*next as usize]);
            number += 1;
        }
    }
    sum / f64::from(number)
}

#[test]
fn the_perplexity_of_the_bundled_model_hardly_changes() {
    let workspace = Workspace::new();
    let text = Path::new(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../examples/assets/tinyshakespeare.txt"
    ));
    let text = fs::read_to_string(text).unwrap();
    let end = text.len() - 30_000;
    let tail = &text[text[end..].find('\n').unwrap() + end..];
    let ids = Tokenizer::from_dir(bundled())
        .unwrap()
        .encode(tail)
        .unwrap();
    fs::remove_dir_all(workspace.path("model")).unwrap();
    copy_folder(bundled(), &workspace.path("model"));
    let perplexity = |name: &str| {
        let file = workspace.path(&format!("{name}.gguf"));
        export(bundled(), &file).flag("--type", name).succeeds();
        take_weights(&workspace, &file);
        loss(&workspace.path("model"), &ids).exp()
    };
    let exact = perplexity("f32");
    assert!(exact > 5.0 && exact < 50.0, "{exact}");
    for (name, most) in [
        ("q8_0", 1.002),
        ("q6_k", 1.01),
        ("q5_k_m", 1.02),
        ("q4_k_m", 1.05),
    ] {
        let ratio = perplexity(name) / exact;
        eprintln!("{name}: perplexity {ratio:.5} of f32's {exact:.3}");
        assert!(ratio < most && ratio > 0.98, "{name}: {ratio}");
    }
}

/// candle's own quantized models read the files: same logits for f32, near ones for q8_0.
#[test]
fn candle_s_quantized_models_read_them() {
    let ids: Vec<u32> = (5..29).collect();
    let tokens = Tensor::from_slice(&ids, (1, ids.len()), &Device::Cpu).unwrap();
    for case in families() {
        let forward = |file: &Path| {
            let mut open = File::open(file).unwrap();
            let content = Content::read(&mut open).unwrap();
            let logits = match case.name {
                "llama" => {
                    let mut model =
                        quantized_llama::ModelWeights::from_gguf(content, &mut open, &Device::Cpu)
                            .unwrap();
                    model.forward(&tokens, 0).unwrap()
                }
                _ => {
                    let mut model =
                        quantized_qwen3::ModelWeights::from_gguf(content, &mut open, &Device::Cpu)
                            .unwrap();
                    model.forward(&tokens, 0).unwrap()
                }
            };
            logits.flatten_all().unwrap().to_vec1::<f32>().unwrap()
        };
        if !["llama", "qwen3"].contains(&case.name) {
            continue;
        }
        let dir = case.workspace.path("model");
        let config = ModelConfig::from_file(dir.join("config.json")).unwrap();
        let mesh = Mesh::new(ProcessGroup::single(Device::Cpu), Degrees::default()).unwrap();
        let store = ParamStore::from_pretrained(&dir).unwrap();
        let part =
            CausalLm::part(&config, &mesh, &store.builder(DType::F32, &Device::Cpu)).unwrap();
        let pipeline = Pipeline::new(Schedule::GPipe, &mesh);
        let logits = pipeline
            .logits(&part, &Pass::infer(tokens.clone()), &[ids.len() - 1])
            .unwrap();
        let own = logits.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let scale = own.iter().fold(0.0, |max: f32, logit| max.max(logit.abs()));
        // That of Qwen3 has its cosines and sines in f16.
        let of_f32 = if case.name == "qwen3" { 1e-3 } else { 1e-5 };
        for (name, most) in [("f32", of_f32), ("q8_0", 0.05)] {
            let file = case.workspace.path(&format!("{name}.gguf"));
            export(&dir, &file).flag("--type", name).succeeds();
            let found = forward(&file);
            let differences = found.iter().zip(&own).map(|(a, b)| (a - b).abs());
            let largest = differences.fold(0.0, f32::max) / scale;
            assert!(
                found.len() == own.len() && largest < most,
                "{} {name}: {largest}",
                case.name
            );
        }
    }
}

#[test]
fn inspect_tells_what_a_file_has() {
    let workspace = Workspace::new();
    let file = workspace.path("model.gguf");
    export(bundled(), &file).flag("--type", "q8_0").succeeds();
    let inspect = || candle_train("inspect").argument(file.display());
    let said = inspect().succeeds().stdout;
    said.assert_has(&[
        "is a GGUF file",
        "llama.block_count",
        "tokenizer.ggml.tokens",
        "1024 values",
        "29 tensors: q8_0, ",
        "9 tensors: f32, ",
    ]);
    let said = inspect()
        .switch("--tensors")
        .switch("--verify")
        .succeeds()
        .stdout;
    said.assert_has(&[
        "  blk.0.attn_q.weight [192, 192] q8_0\n",
        "verified: 38 tensors, all values are finite",
    ]);
    let bytes = fs::read(&file).unwrap();
    for len in [0, 3, 20, 1000, bytes.len() - 1] {
        fs::write(&file, &bytes[..len]).unwrap();
        inspect().fails(&["model.gguf"]);
    }
    fs::write(&file, "not that").unwrap();
    inspect().fails(&["model.gguf is no GGUF file"]);
    // Sizes that no file has, in the place of the first dim of a tensor.
    let name = b"token_embd.weight";
    let place = bytes
        .windows(name.len())
        .position(|window| window == name)
        .unwrap();
    for dim in [1u64 << 62, u64::MAX] {
        let mut bytes = bytes.clone();
        let place = place + name.len() + 4;
        bytes[place..place + 8].copy_from_slice(&dim.to_le_bytes());
        fs::write(&file, bytes).unwrap();
        inspect().switch("--verify").fails(&["model.gguf"]);
    }
}
