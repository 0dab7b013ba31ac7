//! `candle-train export` to GGUF files: names, shapes, values, types and metadata, as llama.cpp's own conversion writes them.

use std::collections::BTreeSet;
use std::fs;

use candle_comm::{Degrees, Mesh, ProcessGroup};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Tensor};
use candle_parallel::ParamStore;
use candle_parallel::checkpoint::{HfSave, save_hf};
use candle_train_models::{CausalLm, ModelConfig};
use candle_trainer::Tokenizer;
use serde_json::json;

use super::folder::{fixture, read_checkpoint, read_json};
use super::gguf_file::Read;
use super::gguf_models::{Case, bundled, export, families, tokenizers, values};
use super::program::AssertText;
use super::workspace::Workspace;

/// What llama.cpp calls a tensor.
pub fn name_in_file(name: &str) -> String {
    let mut name = name.replace("model.layers.", "blk.");
    for (own, other) in [
        ("model.embed_tokens", "token_embd"),
        ("model.norm", "output_norm"),
        ("lm_head", "output"),
        ("self_attn.q_norm", "attn_q_norm"),
        ("self_attn.k_norm", "attn_k_norm"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.o_proj", "attn_output"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"),
    ] {
        name = name.replace(own, other);
    }
    name
}

/// The rows of q and k as llama.cpp's conversion has them: (heads, 2, half, in), of which the middle two are swapped.
pub fn swapped(weight: &Tensor, num_heads: usize) -> Tensor {
    let dims = weight.dims().to_vec();
    let half = dims[0] / num_heads / 2;
    let inner: usize = dims[1..].iter().product();
    let heads = weight.reshape((num_heads, 2, half, inner)).unwrap();
    heads
        .transpose(1, 2)
        .unwrap()
        .contiguous()
        .unwrap()
        .reshape(dims)
        .unwrap()
}

pub fn assert_same(name: &str, found: &Tensor, expected: &Tensor) {
    assert_eq!(found.dims(), expected.dims(), "{name}");
    let flat = |tensor: &Tensor| tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    assert!(flat(found) == flat(expected), "{name}");
}

#[test]
fn files_are_as_llama_cpp_s_conversion_writes_them() {
    for Case {
        name: case,
        workspace,
        architecture,
        ..
    } in families()
    {
        let file = workspace.path("model.gguf");
        export(&workspace.path("model"), &file)
            .flag("--type", "F32")
            .succeeds();
        let config = read_json(&workspace.model("config.json"));
        let mut read = Read::open(&file);
        let count = |name: &str| config[name].as_u64().unwrap();
        let heads = count("num_attention_heads");
        let head_dim = config["head_dim"]
            .as_u64()
            .unwrap_or(count("hidden_size") / heads);
        assert_eq!(read.text("general.architecture"), architecture);
        assert_eq!(read.text("general.type"), "model");
        assert_eq!(read.count("general.file_type"), 0);
        assert_eq!(read.count("general.quantization_version"), 2);
        for (key, expected) in [
            ("block_count", count("num_hidden_layers")),
            ("embedding_length", count("hidden_size")),
            ("feed_forward_length", count("intermediate_size")),
            ("attention.head_count", heads),
            ("attention.head_count_kv", count("num_key_value_heads")),
            ("attention.key_length", head_dim),
            ("attention.value_length", head_dim),
            ("rope.dimension_count", head_dim),
            ("vocab_size", count("vocab_size")),
        ] {
            assert_eq!(
                read.count(&format!("{architecture}.{key}")),
                expected,
                "{case} {key}"
            );
        }
        let eps = config["rms_norm_eps"].as_f64().unwrap() as f32;
        assert_eq!(
            read.number(&format!("{architecture}.attention.layer_norm_rms_epsilon")),
            eps
        );
        let is_tied = config["tie_word_embeddings"] == true;
        let mut expected: BTreeSet<String> = BTreeSet::new();
        for (name, tensor) in read_checkpoint(&workspace.path("model")) {
            let mut weight =
                Tensor::from_vec(values(&tensor), tensor.1.clone(), &Device::Cpu).unwrap();
            if architecture == "llama" && name.contains("q_proj") {
                weight = swapped(&weight, heads as usize);
            } else if architecture == "llama" && name.contains("k_proj") {
                weight = swapped(&weight, count("num_key_value_heads") as usize);
            } else if architecture == "gemma" && name.ends_with("norm.weight") {
                weight = (weight + 1.0).unwrap();
            }
            let name = name_in_file(&name);
            assert_same(&format!("{case} {name}"), &read.values(&name), &weight);
            expected.insert(name);
        }
        assert_eq!(expected.contains("output.weight"), !is_tied, "{case}");
        if config["rope_parameters"]["rope_type"] == "llama3" {
            expected.insert("rope_freqs.weight".to_string());
            let factors = read.values("rope_freqs.weight").to_vec1::<f32>().unwrap();
            assert_eq!(factors.len() as u64, head_dim / 2);
            // Theta 100, factor 8, of 64 tokens: pairs turn 10.2, 3.2, 1.02 and 0.32 times.
            assert_eq!((factors[0], factors[3]), (1.0, 8.0));
            assert!(
                factors[1] > 1.0 && factors[1] < factors[2] && factors[2] < 8.0,
                "{factors:?}"
            );
        }
        let found: BTreeSet<String> = read.content.tensor_infos.keys().cloned().collect();
        assert_eq!(found, expected, "{case}");
        let offsets = read.content.tensor_infos.values().map(|info| info.offset);
        assert!(offsets.into_iter().all(|offset| offset.is_multiple_of(32)));
        assert_eq!(
            read.list("tokenizer.ggml.tokens").len() as u64,
            count("vocab_size")
        );
        assert_eq!(
            read.list("tokenizer.ggml.token_type").len() as u64,
            count("vocab_size")
        );
    }
}

#[test]
fn metadata_tell_of_rope_and_tokens() {
    let cases = families();
    let read = |name: &str| {
        let case = cases.iter().find(|case| case.name == name).unwrap();
        let file = case.workspace.path("model.gguf");
        export(&case.workspace.path("model"), &file)
            .switch("--overwrite")
            .succeeds();
        Read::open(&file)
    };
    let linear = read("linear RoPE, bf16 in files");
    assert_eq!(linear.text("llama.rope.scaling.type"), "linear");
    assert_eq!(linear.number("llama.rope.scaling.factor"), 4.0);
    // Without --type a file has what the model has.
    assert_eq!(linear.count("general.file_type"), 32);
    assert_eq!(
        linear.content.tensor_infos["blk.0.attn_q.weight"].ggml_dtype,
        GgmlDType::BF16
    );
    assert_eq!(
        linear.content.tensor_infos["blk.0.attn_norm.weight"].ggml_dtype,
        GgmlDType::F32
    );
    let yarn = read("YaRN with a factor of attention");
    assert_eq!(yarn.text("llama.rope.scaling.type"), "yarn");
    assert_eq!(
        yarn.count("llama.rope.scaling.original_context_length"),
        1479
    );
    // llama.cpp multiplies by 0.1 ln 3 + 1 itself.
    let factor = yarn.number("llama.rope.scaling.attn_factor") * (0.1 * 3f32.ln() + 1.0);
    assert!((factor - 1.3).abs() < 1e-5, "{factor}");
    assert!(
        !read("YaRN")
            .content
            .metadata
            .contains_key("llama.rope.scaling.attn_factor")
    );
    let padded = read("qwen2, rows of padding, YaRN");
    let token = |index: usize| {
        padded.list("tokenizer.ggml.tokens")[index]
            .to_string()
            .unwrap()
            .clone()
    };
    let kind = |index: usize| {
        padded.list("tokenizer.ggml.token_type")[index]
            .to_i32()
            .unwrap()
    };
    assert_eq!(
        (token(82), kind(82), kind(79)),
        ("[PAD82]".to_string(), 5, 1)
    );

    for case in tokenizers() {
        let file = case.workspace.path("model.gguf");
        export(&case.workspace.path("model"), &file).succeeds();
        let read = Read::open(&file);
        let is_bytes = !["llama2", "mistral", "zephyr", "as Gemma's"].contains(&case.name);
        assert_eq!(
            read.text("tokenizer.ggml.model"),
            if is_bytes { "gpt2" } else { "llama" }
        );
        assert_eq!(
            read.content.metadata.contains_key("tokenizer.ggml.merges"),
            is_bytes
        );
        assert_eq!(
            read.content.metadata.contains_key("tokenizer.ggml.scores"),
            !is_bytes
        );
        let pre = match case.name {
            "chatml" => "gpt-2",
            name if is_bytes && name != "chatml" => "smaug-bpe",
            _ => "default",
        };
        assert_eq!(read.text("tokenizer.ggml.pre"), pre, "{}", case.name);
        assert!(!read.text("tokenizer.chat_template").is_empty());
        let tokenizer = Tokenizer::from_dir(case.workspace.path("model")).unwrap();
        assert_eq!(
            read.count("tokenizer.ggml.eos_token_id"),
            u64::from(tokenizer.eos_id())
        );
        let types = read.list("tokenizer.ggml.token_type");
        for token in tokenizer.special_tokens() {
            let id = tokenizer.token_id(&token).unwrap() as usize;
            assert_eq!(types[id].to_i32().unwrap(), 3, "{} {token}", case.name);
        }
    }
}

/// A model whose rows are whole blocks of all types, with random weights.
fn wide_model(workspace: &Workspace) {
    let config = json!({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 320, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 9,
        "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "max_position_embeddings": 64, "tie_word_embeddings": false,
    });
    let text = config.to_string();
    let mesh = Mesh::new(ProcessGroup::single(Device::Cpu), Degrees::default()).unwrap();
    let vb = ParamStore::init(3).builder(DType::F32, &Device::Cpu);
    let part = CausalLm::part(&ModelConfig::from_json(&text).unwrap(), &mesh, &vb).unwrap();
    let mut files = vec![("config.json".to_string(), text.into_bytes())];
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        files.push((
            name.to_string(),
            fs::read(fixture("gqa/model").join(name)).unwrap(),
        ));
    }
    save_hf(
        part.params(),
        &mesh,
        &HfSave::new(workspace.path("wide"), files),
    )
    .unwrap();
}

#[test]
fn types_are_mixed_as_llama_cpp_does() {
    let workspace = Workspace::new();
    wide_model(&workspace);
    let dir = workspace.path("wide");
    let weights = read_checkpoint(&dir);
    // Of 9 layers the first and the last two, and every third between.
    let more = [0, 3, 6, 7, 8];
    let cases = [
        ("f16", 1, GgmlDType::F16, GgmlDType::F16, GgmlDType::F16),
        (
            "bf16",
            32,
            GgmlDType::BF16,
            GgmlDType::BF16,
            GgmlDType::BF16,
        ),
        ("q8_0", 7, GgmlDType::Q8_0, GgmlDType::Q8_0, GgmlDType::Q8_0),
        ("q6_k", 18, GgmlDType::Q6K, GgmlDType::Q6K, GgmlDType::Q6K),
        ("q5_k_m", 17, GgmlDType::Q5K, GgmlDType::Q6K, GgmlDType::Q6K),
        ("q4_k_m", 15, GgmlDType::Q4K, GgmlDType::Q6K, GgmlDType::Q6K),
        ("q4_0", 2, GgmlDType::Q4_0, GgmlDType::Q4_0, GgmlDType::Q6K),
    ];
    for (name, file_type, usual, better, head) in cases {
        let file = workspace.path(&format!("{name}.gguf"));
        let said = export(&dir, &file).flag("--type", name).succeeds().stdout;
        assert!(!said.contains("in place of"), "{said}");
        let mut read = Read::open(&file);
        assert_eq!(read.count("general.file_type"), file_type);
        for (weight, tensor) in &weights {
            let own = name_in_file(weight);
            let layer: Option<usize> = own.split('.').nth(1).and_then(|it| it.parse().ok());
            let is_sensitive = own.contains("attn_v") || own.contains("ffn_down");
            let expected = match () {
                () if tensor.1.len() == 1 => GgmlDType::F32,
                () if own == "output.weight" => head,
                () if is_sensitive && more.contains(&layer.unwrap()) => better,
                () => usual,
            };
            let found = read.tensor(&own);
            assert_eq!(found.dtype(), expected, "{name} {own}");
            if own.contains("attn_q") || own.contains("attn_k") {
                continue;
            }
            // The blocks are candle's.
            let values = Tensor::from_vec(values(tensor), tensor.1.clone(), &Device::Cpu).unwrap();
            let quantised = QTensor::quantize(&values, expected).unwrap();
            assert!(
                found.data().unwrap() == quantised.data().unwrap(),
                "{name} {own}"
            );
        }
    }
}

#[test]
fn rows_that_are_no_whole_blocks_have_another_type_and_a_line_says_so() {
    let workspace = Workspace::new();
    let file = workspace.path("model.gguf");
    // Rows of 192 values but for those of down, of 512.
    let said = export(bundled(), &file)
        .flag("--type", "q4_k_m")
        .succeeds()
        .stdout;
    said.assert_has(&["q5_0 in place of q4_k, as rows of 192 values are no whole blocks: "]);
    assert!(
        said.contains("blk.*.attn_q.weight") && !said.contains("blk.*.ffn_down.weight"),
        "{said}"
    );
    let read = Read::open(&file);
    let dtype = |name: &str| read.content.tensor_infos[name].ggml_dtype;
    assert_eq!(dtype("blk.1.attn_q.weight"), GgmlDType::Q5_0);
    assert_eq!(dtype("blk.0.ffn_down.weight"), GgmlDType::Q4K);
    assert_eq!(dtype("blk.3.ffn_down.weight"), GgmlDType::Q6K);
    assert_eq!(dtype("blk.3.attn_v.weight"), GgmlDType::Q8_0);
    // The head is the embedding.
    assert_eq!(dtype("token_embd.weight"), GgmlDType::Q8_0);
    let narrow = Workspace::new();
    let file = narrow.path("model.gguf");
    let said = export(&narrow.path("model"), &file)
        .flag("--type", "q8_0")
        .succeeds()
        .stdout;
    said.assert_has(&[
        "f16 in place of q8_0, as rows of 56 values are no whole blocks: blk.*.ffn_down.weight",
    ]);
}
