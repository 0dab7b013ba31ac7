//! Small models of each family that llama.cpp runs.

use std::fs;
use std::path::Path;

use half::{bf16, f16};
use safetensors::Dtype;
use serde_json::{Value, json};

use super::folder::{Tensors, edit_json, fixture};
use super::program::Program;
use super::workspace::{Workspace, candle_train};

/// A model, and what it is made for.
pub struct Case {
    pub name: &'static str,
    pub workspace: Workspace,
    /// Its architecture in a file.
    pub architecture: &'static str,
    /// Tokens of which each has a text of its own.
    pub num_tokens: u32,
}

/// Without windows, which llama.cpp does not have in these architectures.
fn without_windows(config: &mut Value) {
    config["sliding_window"] = Value::Null;
    config["use_sliding_window"] = json!(false);
    config["layer_types"] = Value::Null;
}

/// Families and kinds of RoPE, biases, tied heads, uneven heads, stored types, rows of padding.
pub fn families() -> Vec<Case> {
    let case = |name: &'static str, folder: &str, architecture, num_tokens| Case {
        name,
        workspace: Workspace::with_model(folder),
        architecture,
        num_tokens,
    };
    let cases = vec![
        case("llama", "gqa", "llama", 300),
        case(
            "llama3 RoPE, tied, biases, heads wider than the model",
            "tied_bias",
            "llama",
            300,
        ),
        case("linear RoPE, bf16 in files", "bf16_sharded", "llama", 300),
        case("f16, tied", "f16_tied", "llama", 300),
        case("YaRN", "long", "llama", 80),
        case("YaRN with a factor of attention", "long", "llama", 80),
        case("mistral", "mistral", "llama", 80),
        case("qwen2, rows of padding, YaRN", "qwen2", "qwen2", 80),
        case("qwen3", "qwen3", "qwen3", 80),
        case("gemma", "gemma", "gemma", 80),
    ];
    for case in &cases {
        case.workspace.edit_config(without_windows);
        match case.name {
            "YaRN with a factor of attention" => case.workspace.edit_config(|config| {
                config["rope_parameters"]["attention_factor"] = json!(1.3);
            }),
            "gemma" => {
                case.workspace
                    .edit_config(|config| config["attention_bias"] = json!(false));
                let is_bias = |name: &str| name.ends_with(".bias");
                let edit = |tensors: &mut Tensors| tensors.retain(|name, _| !is_bias(name));
                case.workspace.edit_weights(edit);
            }
            _ => {}
        }
    }
    cases
}

/// The tokenizers of `tests/fixtures/chat` whose ids llama.cpp can have, with a model of that many rows.
pub fn tokenizers() -> Vec<Case> {
    let names = [
        "chatml",
        "llama2",
        "llama3",
        "mistral",
        "qwen2.5",
        "qwen3",
        "zephyr",
        "as Gemma's",
    ];
    let case = |name: &'static str| {
        let workspace = Workspace::new();
        match name {
            "as Gemma's" => {
                with_tokenizer(&workspace, "llama2");
                edit_json(&workspace.model("tokenizer.json"), as_that_of_gemma);
            }
            name => with_tokenizer(&workspace, name),
        }
        Case {
            name,
            workspace,
            architecture: "llama",
            num_tokens: 380,
        }
    };
    names.map(case).into()
}

/// No space before texts, and tokens of several spaces or lines, which are found first.
fn as_that_of_gemma(json: &mut Value) {
    json["normalizer"] = json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
    json["pre_tokenizer"] = json!({"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": false});
    json["decoder"] = json!({"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}
    ]});
    json["model"]["vocab"]["▁▁"] = json!(384);
    json["model"]["merges"]
        .as_array_mut()
        .unwrap()
        .push(json!(["▁", "▁"]));
    let added = json["added_tokens"].as_array_mut().unwrap();
    for (id, content) in [(384, "▁▁"), (385, "\n\n"), (386, "<start_of_turn>")] {
        let special = content.starts_with('<');
        added.push(json!({
            "id": id, "content": content, "special": special, "normalized": false, "single_word": false, "lstrip": false, "rstrip": false
        }));
    }
}

/// The tokenizer and chat template of that fixture for the model `gqa`, which gets more rows.
fn with_tokenizer(workspace: &Workspace, name: &str) {
    const NUM_ROWS: usize = 392;
    let files = [
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "generation_config.json",
    ];
    for file in files {
        let from = fixture("chat").join(name).join(file);
        let _ = fs::remove_file(workspace.model(file));
        if from.exists() {
            fs::copy(from, workspace.model(file)).unwrap();
        }
    }
    edit_json(&workspace.model("config.json"), |config| {
        config["vocab_size"] = json!(NUM_ROWS);
        for id in ["bos_token_id", "eos_token_id", "pad_token_id"] {
            config[id] = Value::Null;
        }
    });
    workspace.edit_weights(|tensors| {
        for name in ["model.embed_tokens.weight", "lm_head.weight"] {
            let (_, shape, bytes) = tensors.get_mut(name).unwrap();
            let row = 4 * shape[1];
            // No two rows are the same.
            let more = bytes[row / 2..row / 2 + (NUM_ROWS - shape[0]) * row].to_vec();
            bytes.extend(more);
            shape[0] = NUM_ROWS;
        }
    });
}

/// The values of a tensor of a file.
pub fn values((dtype, _, bytes): &(Dtype, Vec<usize>, Vec<u8>)) -> Vec<f32> {
    let pairs = || bytes.chunks_exact(2).map(|pair| [pair[0], pair[1]]);
    match dtype {
        Dtype::F16 => pairs()
            .map(|pair| f16::from_le_bytes(pair).to_f32())
            .collect(),
        Dtype::BF16 => pairs()
            .map(|pair| bf16::from_le_bytes(pair).to_f32())
            .collect(),
        Dtype::F32 => {
            let quads = bytes.chunks_exact(4);
            quads
                .map(|quad| f32::from_le_bytes([quad[0], quad[1], quad[2], quad[3]]))
                .collect()
        }
        other => panic!("{other:?}"),
    }
}

/// Writes a model, a checkpoint or an adapter as a GGUF file.
pub fn export(source: &Path, file: &Path) -> Program {
    candle_train("export")
        .argument(source.display())
        .argument(file.display())
}

/// The model that comes with the examples.
pub fn bundled() -> &'static Path {
    Path::new(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../examples/assets/shakespeare-llama"
    ))
}
