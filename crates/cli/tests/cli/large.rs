//! A model that takes a while to be written, and what happens meanwhile.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use serde_json::{Map, json};

use super::folder::{fixture, names};
use super::program::Program;
use super::workspace::{Workspace, candle_train};

const HIDDEN: usize = 2048;
const INNER: usize = 8192;

/// A Llama of one layer with 126 MB of weights, all of them 0 and none on the disk.
pub fn large_model(workspace: &Workspace) -> PathBuf {
    let dir = workspace.path("large");
    fs::create_dir(&dir).unwrap();
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        fs::copy(fixture("gqa/model").join(name), dir.join(name)).unwrap();
    }
    let config = json!({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 320, "hidden_size": HIDDEN, "intermediate_size": INNER,
        "num_hidden_layers": 1, "num_attention_heads": 16, "num_key_value_heads": 16, "rms_norm_eps": 1e-5, "max_position_embeddings": 64,
        "tie_word_embeddings": true,
    });
    fs::write(dir.join("config.json"), config.to_string()).unwrap();
    let layer = |name: &str| format!("model.layers.0.{name}.weight");
    write_zeros(
        &dir.join("model.safetensors"),
        &[
            ("model.embed_tokens.weight".into(), vec![320, HIDDEN]),
            ("model.norm.weight".into(), vec![HIDDEN]),
            (layer("input_layernorm"), vec![HIDDEN]),
            (layer("post_attention_layernorm"), vec![HIDDEN]),
            (layer("self_attn.q_proj"), vec![HIDDEN, HIDDEN]),
            (layer("self_attn.k_proj"), vec![HIDDEN, HIDDEN]),
            (layer("self_attn.v_proj"), vec![HIDDEN, HIDDEN]),
            (layer("self_attn.o_proj"), vec![HIDDEN, HIDDEN]),
            (layer("mlp.gate_proj"), vec![INNER, HIDDEN]),
            (layer("mlp.up_proj"), vec![INNER, HIDDEN]),
            (layer("mlp.down_proj"), vec![HIDDEN, INNER]),
        ],
    );
    dir
}

/// A file of tensors in bf16.
fn write_zeros(path: &Path, tensors: &[(String, Vec<usize>)]) {
    let (mut header, mut end) = (Map::new(), 0);
    for (name, shape) in tensors {
        let start = end;
        end += 2 * shape.iter().product::<usize>();
        let tensor = json!({"dtype": "BF16", "shape": shape, "data_offsets": [start, end]});
        header.insert(name.clone(), tensor);
    }
    let header = serde_json::to_vec(&header).unwrap();
    let mut file = File::create(path).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes())
        .unwrap();
    file.write_all(&header).unwrap();
    file.set_len((8 + header.len() + end) as u64).unwrap();
}

/// Writes `large.gguf` of the large model.
pub fn export(workspace: &Workspace) -> Program {
    candle_train("export")
        .argument(workspace.path("large").display())
        .argument(workspace.path("large.gguf").display())
        .flag("--type", "q8_0")
}

/// Writes the folder `merged` of the large model with an adapter that changes nothing.
pub fn merge(workspace: &Workspace) -> Program {
    let adapter = workspace.path("adapter");
    fs::create_dir_all(&adapter).unwrap();
    let config = json!({"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "base_model_name_or_path": "large"});
    fs::write(adapter.join("adapter_config.json"), config.to_string()).unwrap();
    let name =
        |matrix| format!("base_model.model.model.layers.0.self_attn.q_proj.lora_{matrix}.weight");
    let tensors = [(name("A"), vec![2, HIDDEN]), (name("B"), vec![HIDDEN, 2])];
    write_zeros(&adapter.join("adapter_model.safetensors"), &tensors);
    candle_train("merge")
        .flag("--model", workspace.path("large").display())
        .flag("--adapter", adapter.display())
        .flag("--output", workspace.path("merged").display())
}

/// Whether a part of something that is not whole is there.
pub fn is_saving(workspace: &Workspace) -> bool {
    let mut names = names(&workspace.path("")).into_iter();
    names.any(|name| {
        let path = workspace.path(&name);
        let has_content = match fs::read_dir(&path) {
            Ok(mut entries) => entries.next().is_some(),
            Err(_) => path.metadata().is_ok_and(|file| file.len() > 0),
        };
        name.ends_with(".saving") && has_content
    })
}
