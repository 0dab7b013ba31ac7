//! `candle-train export` to GGUF files, and what reads them again.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::path::Path;

use candle_comm::{Degrees, Mesh, ProcessGroup};
use candle_core::quantized::gguf_file::{Content, Value as GgufValue, VersionedMagic};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Tensor};
use candle_parallel::checkpoint::{HfSave, save_hf};
use candle_parallel::gguf::GgufReader;
use candle_parallel::{ParamStore, Pass, Pipeline, Schedule};
use candle_train_models::{CausalLm, ModelConfig};
use candle_trainer::{Tokenizer, tokenizer_from_gguf};
use candle_transformers::models::{quantized_llama, quantized_qwen3};
use serde_json::{Value, json};

use super::folder::{copy_folder, fixture, names, read_checkpoint, read_json};
use super::gguf_models::{Case, families, rewrite, tokenizers, values};
use super::program::Program;
use super::workspace::{Workspace, candle_train};

fn export(source: &Path, file: &Path) -> Program {
    candle_train("export")
        .argument(source.display())
        .argument(file.display())
}

fn bundled() -> &'static Path {
    Path::new(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../examples/assets/shakespeare-llama"
    ))
}

struct Read {
    content: Content,
    file: File,
}

impl Read {
    fn open(path: &Path) -> Self {
        let mut file = File::open(path).unwrap();
        let content = Content::read(&mut file).unwrap();
        assert!(matches!(content.magic, VersionedMagic::GgufV3));
        assert!(content.tensor_data_offset.is_multiple_of(32));
        Self { content, file }
    }

    fn tensor(&mut self, name: &str) -> QTensor {
        self.content
            .tensor(&mut self.file, name, &Device::Cpu)
            .unwrap()
    }

    fn values(&mut self, name: &str) -> Tensor {
        self.tensor(name).dequantize(&Device::Cpu).unwrap()
    }

    fn count(&self, key: &str) -> u64 {
        self.content.metadata[key].to_u64().unwrap()
    }

    fn number(&self, key: &str) -> f32 {
        self.content.metadata[key].to_f32().unwrap()
    }

    fn text(&self, key: &str) -> &str {
        self.content.metadata[key].to_string().unwrap()
    }

    fn list(&self, key: &str) -> &[GgufValue] {
        self.content.metadata[key].to_vec().unwrap()
    }
}

/// What llama.cpp calls a tensor.
fn name_in_file(name: &str) -> String {
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
fn swapped(weight: &Tensor, num_heads: usize) -> Tensor {
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

fn assert_same(name: &str, found: &Tensor, expected: &Tensor) {
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

#[test]
fn a_file_is_a_model_again() {
    for Case {
        name, workspace, ..
    } in families()
    {
        let (dir, file) = (workspace.path("model"), workspace.path("model.gguf"));
        export(&dir, &file).flag("--type", "f32").succeeds();
        let read = GgufReader::open(&file).unwrap();
        let again = ModelConfig::from_gguf(&read).unwrap();
        let own = ModelConfig::from_file(dir.join("config.json")).unwrap();
        assert_eq!(
            again.gguf_weights(read).unwrap().tensors().len(),
            read_checkpoint(&dir).len()
        );
        let text = |model: &Path| {
            let program = candle_train("generate").flag("--model", model.display());
            let program = program
                .flag("--prompt", "The Queen")
                .flag("--max-new-tokens", 24);
            program.flag("--temperature", 0).succeeds().stdout
        };
        assert_eq!(text(&file), text(&dir), "{name}");
        // Numbers of a file are f32.
        let (found, expected) = (format!("{:.6?}", again.rope), format!("{:.6?}", own.rope));
        assert_eq!(found, expected, "{name}");
        assert_eq!(again.rms_norm_eps, own.rms_norm_eps);
    }
    for Case {
        name, workspace, ..
    } in tokenizers()
    {
        let (dir, file) = (workspace.path("model"), workspace.path("model.gguf"));
        export(&dir, &file).succeeds();
        let again = tokenizer_from_gguf(&GgufReader::open(&file).unwrap().metadata()).unwrap();
        let own = Tokenizer::from_dir(&dir).unwrap();
        let text = fs::read_to_string(fixture("text.txt")).unwrap();
        for line in text
            .lines()
            .chain(["I'VE 12345  <s>[INST] é 🙂\n\n</s>", " x"])
        {
            let ids = own.encode_with_special_tokens(line).unwrap();
            assert_eq!(
                again.encode_with_special_tokens(line).unwrap(),
                ids,
                "{name}: {line:?}"
            );
            assert_eq!(
                again.decode(&ids).unwrap(),
                own.decode(&ids).unwrap(),
                "{name}: {line:?}"
            );
        }
        let chat = |model: &Path| {
            let program = candle_train("generate")
                .flag("--model", model.display())
                .switch("--chat");
            program
                .flag("--prompt", "Hello")
                .flag("--max-new-tokens", 8)
                .flag("--temperature", 0)
                .run()
        };
        assert_eq!(chat(&file).stdout, chat(&dir).stdout, "{name}");
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
    assert!(
        said.contains("q5_0 in place of q4_k, as rows of 192 values are no whole blocks: "),
        "{said}"
    );
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
    assert!(
        said.contains(
            "f16 in place of q8_0, as rows of 56 values are no whole blocks: blk.*.ffn_down.weight"
        ),
        "{said}"
    );
}

/// The mean loss of the model in a file on a text, by the path of `candle-train generate`.
fn loss(file: &Path, ids: &[u32]) -> f64 {
    const LEN: usize = 128;
    let read = GgufReader::open(file).unwrap();
    let config = ModelConfig::from_gguf(&read).unwrap();
    let mesh = Mesh::new(ProcessGroup::single(Device::Cpu), Degrees::default()).unwrap();
    let store = ParamStore::from_checkpoint(config.gguf_weights(read).unwrap()).freeze(|_| true);
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
    let perplexity = |name: &str| {
        let file = workspace.path(&format!("{name}.gguf"));
        export(bundled(), &file).flag("--type", name).succeeds();
        loss(&file, &ids).exp()
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

/// All tensors of two files: the same, or so near.
fn assert_near(found: &Path, expected: &Path, most: f32) {
    let (mut found, mut expected) = (Read::open(found), Read::open(expected));
    let names: Vec<String> = expected.content.tensor_infos.keys().cloned().collect();
    assert_eq!(names.len(), found.content.tensor_infos.len());
    for name in names {
        let difference = (found.values(&name) - expected.values(&name))
            .unwrap()
            .abs()
            .unwrap();
        let largest = difference
            .flatten_all()
            .unwrap()
            .max(0)
            .unwrap()
            .to_scalar::<f32>()
            .unwrap();
        assert!(largest <= most, "{name}: {largest}");
    }
}

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
        workspace.finetune().flag("--freeze", "layers.1|norm"),
        workspace.finetune().flag("--lora-rank", 2),
    ];
    for run in runs {
        let output = workspace.path(if run.words().contains(&"--lora-rank".to_string()) {
            "lora"
        } else {
            "whole"
        });
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
    assert!(
        said.contains(&format!("wrote {}", file.display())),
        "{said}"
    );
    let again = workspace.path("again.gguf");
    export(&output, &again).flag("--type", "q8_0").succeeds();
    assert_near(&file, &again, 0.0);
    // What exists is not lost, and not found out after hours.
    let before = fs::read(&file).unwrap();
    let parts = [
        "trained-q8_0.gguf exists already",
        "hint: --overwrite replaces it",
    ];
    run.run().assert_error(&parts);
    assert!(fs::read(&file).unwrap() == before);
    run.clone().switch("--dry-run").run().assert_error(&parts);
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
    run.run()
        .assert_error(&["rope_type is \"dynamic\"", "hint: "]);
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
        assert!(said.contains("Modelfile"), "{said}");
        let program = export(&workspace.path("model"), &workspace.path("b.gguf"));
        program
            .switch("--modelfile")
            .run()
            .assert_error(&["Modelfile exists already", "--overwrite"]);
        assert!(!workspace.path("b.gguf").exists());
        fs::read_to_string(workspace.path("Modelfile")).unwrap()
    };
    let text = modelfile("chatml");
    assert!(
        text.starts_with("FROM ./model.gguf\nTEMPLATE \"\"\"{{ if .System }}<|im_start|>system\n"),
        "{text}"
    );
    assert!(text.contains("PARAMETER stop \"<|im_end|>\"\n"), "{text}");
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
        assert!(text.contains(&format!("PARAMETER {line}\n")), "{text}");
    }
}

#[test]
fn inspect_tells_what_a_file_has() {
    let workspace = Workspace::new();
    let file = workspace.path("model.gguf");
    export(bundled(), &file).flag("--type", "q8_0").succeeds();
    let inspect = || candle_train("inspect").argument(file.display());
    let said = inspect().succeeds().stdout;
    for part in [
        "is a GGUF file",
        "llama.block_count",
        "tokenizer.ggml.tokens",
        "1024 values",
        "29 tensors: q8_0, ",
        "9 tensors: f32, ",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    assert!(!said.contains("not supported"), "{said}");
    let said = inspect()
        .switch("--tensors")
        .switch("--verify")
        .succeeds()
        .stdout;
    assert!(
        said.contains("  blk.0.attn_q.weight [192, 192] q8_0\n"),
        "{said}"
    );
    assert!(
        said.contains("verified: 38 tensors, all values are finite"),
        "{said}"
    );
    let bytes = fs::read(&file).unwrap();
    for len in [0, 3, 20, 1000, bytes.len() - 1] {
        fs::write(&file, &bytes[..len]).unwrap();
        for program in [
            inspect(),
            candle_train("generate")
                .flag("--model", file.display())
                .flag("--prompt", "x"),
        ] {
            program.run().assert_error(&["model.gguf"]);
        }
    }
}

/// What a file says and this program does not know is no reason to compute something else.
#[test]
fn files_of_others_are_refused_by_what_is_in_them() {
    let workspace = Workspace::new();
    let (file, other) = (workspace.path("model.gguf"), workspace.path("other.gguf"));
    export(&workspace.path("model"), &file).succeeds();
    let count = |count| Some(GgufValue::U32(count));
    let cases: [(&str, Option<GgufValue>, &str); 12] = [
        ("general.alignment", count(0), "general.alignment is 0"),
        (
            "general.architecture",
            Some(GgufValue::String("mamba".into())),
            "supported: llama",
        ),
        ("llama.block_count", count(3), "blk.3."),
        ("llama.block_count", count(5), "blk.4."),
        ("llama.expert_count", count(8), "llama.expert_count"),
        (
            "llama.attention.scale",
            Some(GgufValue::F32(0.5)),
            "llama.attention.scale",
        ),
        (
            "llama.attention.sliding_window",
            count(5),
            "llama.attention.sliding_window",
        ),
        (
            "llama.attention.key_length",
            Some(GgufValue::Array(Vec::new())),
            "llama.attention.key_length",
        ),
        (
            "llama.rope.dimension_count",
            count(4),
            "llama.rope.dimension_count",
        ),
        ("llama.embedding_length", None, "llama.embedding_length"),
        (
            "tokenizer.ggml.eos_token_id",
            count(400),
            "tokenizer.ggml.eos_token_id is 400",
        ),
        (
            "tokenizer.ggml.pre",
            Some(GgufValue::String("falcon".into())),
            "supported: ",
        ),
    ];
    for (key, value, part) in cases {
        rewrite(&file, &other, &[(key, value)]);
        let generate = candle_train("generate").flag("--model", other.display());
        generate.flag("--prompt", "x").run().assert_error(&[part]);
        // It is shown all the same.
        let inspect = candle_train("inspect").argument(other.display()).run();
        assert!(
            inspect.code == Some(0) || part.contains("alignment"),
            "{}",
            inspect.stderr
        );
    }
    // Sizes that no file has, in the place of the first dim of a tensor.
    let bytes = fs::read(&file).unwrap();
    let name = b"token_embd.weight";
    let place = bytes
        .windows(name.len())
        .position(|window| window == name)
        .unwrap();
    for dim in [0, 1u64 << 62, u64::MAX] {
        let mut bytes = bytes.clone();
        let place = place + name.len() + 4;
        bytes[place..place + 8].copy_from_slice(&dim.to_le_bytes());
        fs::write(&other, bytes).unwrap();
        let generate = candle_train("generate").flag("--model", other.display());
        generate
            .flag("--prompt", "x")
            .run()
            .assert_error(&["other.gguf"]);
    }
}

#[test]
fn what_cannot_be_done_is_said() {
    let workspace = Workspace::new();
    let (dir, file) = (workspace.path("model"), workspace.path("model.gguf"));
    let refuse = |program: Program, parts: &[&str]| {
        let before = names(workspace.path("").as_path());
        program.run().assert_error(parts);
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
    let with_adapter = candle_train("generate")
        .flag("--model", file.display())
        .flag("--prompt", "x");
    let adapter = fixture("lora/qwen3/adapter");
    refuse(
        with_adapter.flag("--adapter", adapter.display()),
        &["--adapter", "export"],
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
    assert!(
        said.contains("error: the adapter in") && said.contains("which the model in"),
        "{said}"
    );
}

#[test]
fn what_llama_cpp_does_not_know_is_said() {
    let refuse = |workspace: &Workspace, parts: &[&str]| {
        let file = workspace.path("model.gguf");
        export(&workspace.path("model"), &file)
            .run()
            .assert_error(parts);
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
    assert!(
        said.contains("no windows of attention in llama: a text of more than 5 tokens"),
        "{said}"
    );
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
    program
        .run()
        .assert_error(&["lm_head.weight", "1000000", "65504"]);
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
    program.with_limited_files().run().assert_error(&[
        "cannot write",
        "model.gguf",
        "File too large",
    ]);
    assert_eq!(fs::read_to_string(&file).unwrap(), "before");
    assert_eq!(names(&folder), ["model.gguf"]);
}
