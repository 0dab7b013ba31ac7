//! What reads GGUF files again: `generate`, `inspect`, and candle's quantized models.

use std::fs::{self, File};
use std::path::Path;

use candle_comm::{Degrees, Mesh, ProcessGroup};
use candle_core::quantized::gguf_file::{Content, Value as GgufValue};
use candle_core::{DType, Device, Tensor};
use candle_parallel::gguf::GgufReader;
use candle_parallel::{ParamStore, Pass, Pipeline, Schedule};
use candle_train_models::{CausalLm, ModelConfig};
use candle_trainer::{Tokenizer, tokenizer_from_gguf};
use candle_transformers::models::{quantized_llama, quantized_qwen3};

use super::folder::{fixture, read_checkpoint};
use super::gguf_models::{Case, bundled, export, families, rewrite, tokenizers};
use super::workspace::{Workspace, candle_train};

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
    let cases: [(&str, Option<GgufValue>, &str); 14] = [
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
        ("llama.rope.freq_base", count(10_000), "expected a number"),
        (
            "llama.rope.scaling.yarn_beta_fast",
            Some(GgufValue::F32(8.0)),
            "yarn_beta_fast is 8",
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
    fs::write(&other, "not that").unwrap();
    let inspect = candle_train("inspect").argument(other.display()).run();
    inspect.assert_error(&["other.gguf is no GGUF file"]);
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
