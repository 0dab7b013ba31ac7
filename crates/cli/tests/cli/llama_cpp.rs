//! What a real llama.cpp makes of exported files: `scripts/llama-cpp-check.sh` fetches one and names its folder in `CANDLE_TRAIN_LLAMA_CPP`.

use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::Command;

use candle_comm::{Degrees, Mesh, ProcessGroup};
use candle_core::{DType, Device};
use candle_parallel::{Adapter, ParamStore, Pipeline, Schedule};
use candle_train_models::{CausalLm, ModelConfig};
use candle_trainer::{
    Chat, ChatTemplate, GenerateConfig, Sampler, SamplingConfig, Tokenizer, generate,
};
use serde_json::{Value, json};

use super::folder::{edit_json, fixture};
use super::gguf_file::Read;
use super::gguf_models::{Case, families, tokenizers};
use super::workspace::{Workspace, candle_train};

const NEW_TOKENS: usize = 24;

/// The folder of npm packages, if there is one.
fn packages() -> Option<PathBuf> {
    let folder = std::env::var_os("CANDLE_TRAIN_LLAMA_CPP").map(PathBuf::from);
    if folder.is_none() {
        eprintln!("SKIPPED: no llama.cpp; scripts/llama-cpp-check.sh fetches one");
    }
    folder
}

/// What llama.cpp answers to a request about a file.
fn ask(packages: &Path, request: &Value) -> Value {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("request.json");
    fs::write(&path, request.to_string()).unwrap();
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../scripts/llama-cpp.mjs");
    let mut node = Command::new("node");
    let output = node.arg(script).arg(packages).arg(path).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    serde_json::from_slice(&output.stdout).unwrap()
}

fn export(workspace: &Workspace, source: &str, file: &str, gguf_type: &str) -> String {
    let program = candle_train("export")
        .argument(workspace.path(source).display())
        .argument(workspace.path(file).display());
    program.flag("--type", gguf_type).succeeds().stdout
}

/// A generator of numbers that are the same each time.
struct Draw(u64);

impl Draw {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % end
    }
}

fn prompts(num_tokens: u32) -> Vec<Vec<u32>> {
    let mut draw = Draw(7);
    let mut prompt = || {
        let len = 2 + draw.below(28);
        (0..len)
            .map(|_| 5 + draw.below(num_tokens as usize - 5) as u32)
            .collect()
    };
    (0..20).map(|_| prompt()).collect()
}

/// The most likely tokens after each prompt, by the path of `candle-train generate`, none of which ends a text.
fn continuations(dir: &Path, adapter: Option<&Path>, prompts: &[Vec<u32>]) -> Vec<Vec<u32>> {
    let config = ModelConfig::from_file(dir.join("config.json")).unwrap();
    let mesh = Mesh::new(ProcessGroup::single(Device::Cpu), Degrees::default()).unwrap();
    let store = ParamStore::from_pretrained(dir).unwrap();
    let store = match adapter {
        Some(adapter) => store.with_adapter(Adapter::open(adapter).unwrap()).unwrap(),
        None => store.freeze(|_| true),
    };
    let vb = store.builder(DType::F32, &Device::Cpu);
    let part = CausalLm::part(&config, &mesh, &vb).unwrap();
    let pipeline = Pipeline::new(Schedule::GPipe, &mesh);
    let limits = GenerateConfig {
        max_context: config.max_seq_len(),
        max_new_tokens: NEW_TOKENS,
        eos_ids: Vec::new(),
        use_cache: true,
    };
    let one = |prompt: &Vec<u32>| {
        let greedy = SamplingConfig {
            temperature: 0.0,
            repetition_penalty: 1.0,
            ..SamplingConfig::default()
        };
        let mut sampler = Sampler::new(greedy).unwrap();
        let go_on = |_: &[u32]| Ok(ControlFlow::Continue(()));
        generate(&pipeline, &part, prompt, &limits, &mut sampler, go_on).unwrap()
    };
    prompts.iter().map(one).collect()
}

fn ids(answer: &Value) -> Vec<Vec<u32>> {
    serde_json::from_value(answer.clone()).unwrap()
}

/// llama.cpp stops at what ends a text.
fn assert_continued(name: &str, answer: &Value, expected: &[Vec<u32>]) {
    let found = ids(answer);
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        assert!(!found.is_empty(), "{name}");
        assert_eq!(found[..], expected[..found.len()], "{name}");
    }
}

fn lines() -> Vec<String> {
    let text = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../examples/assets/tinyshakespeare.txt"
    );
    let text = fs::read_to_string(text).unwrap();
    let mut lines: Vec<String> = text.lines().take(600).map(str::to_string).collect();
    lines.extend(
        fs::read_to_string(fixture("text.txt"))
            .unwrap()
            .lines()
            .map(str::to_string),
    );
    let parts = [
        "I'VE",
        "we'll",
        "  ",
        "\t",
        "\n",
        "\n\n",
        "12345",
        "3.14",
        "été",
        "naïve",
        "日本語",
        "🙂👍🏽",
        "_x_",
        "==",
        "...",
        "\r\n",
        "don't",
        "'S",
        " ",
        "\u{a0}",
        "<|im_end|>",
        "</s>",
        "[INST]",
        "<s>",
        "xxxxxxxxxxxxxxxxxxxx",
        "Ünï",
        "code",
        " of",
    ];
    let mut draw = Draw(3);
    while lines.len() < 1000 {
        let number = 1 + draw.below(12);
        lines.push(
            (0..number)
                .map(|_| parts[draw.below(parts.len())])
                .collect(),
        );
    }
    lines
}

#[test]
fn greedy_tokens_are_those_of_generate() {
    let Some(packages) = packages() else { return };
    let (mut num_same, mut num_prompts) = (0, 0);
    for Case {
        name,
        workspace,
        architecture,
        num_tokens,
    } in families()
    {
        let dir = workspace.path("model");
        let prompts = prompts(num_tokens);
        let expected = continuations(&dir, None, &prompts);
        let ask = |file: &str| {
            let file = workspace.path(file);
            ask(
                &packages,
                &json!({"model": file, "prompts": prompts, "max_new_tokens": NEW_TOKENS}),
            )
        };
        export(&workspace, "model", "model.gguf", "f32");
        let answer = ask("model.gguf");
        assert_eq!(answer["metadata"]["architecture"], architecture);
        assert_continued(name, &answer["continuations"], &expected);
        // Of models with random weights near ties are many.
        export(&workspace, "model", "q8.gguf", "q8_0");
        let rounded = ids(&ask("q8.gguf")["continuations"]);
        let firsts = rounded.iter().zip(&expected);
        let same = firsts.filter(|(a, b)| a[0] == b[0]).count();
        eprintln!(
            "{name}: f32 the same tokens, q8_0 {same} of {} first ones",
            prompts.len()
        );
        num_same += same;
        num_prompts += prompts.len();
    }
    assert!(
        100 * num_same >= 95 * num_prompts,
        "q8_0: {num_same} of {num_prompts}"
    );
}

#[test]
fn token_ids_and_conversations_are_those_of_the_tokenizer() {
    let Some(packages) = packages() else { return };
    let conversations = json!([
        [{"role": "user", "content": "Hello there"}],
        [{"role": "user", "content": "A?"}, {"role": "assistant", "content": "B."}, {"role": "user", "content": "C é 🙂"}],
    ]);
    let lines = lines();
    let bundled = Workspace::new();
    let folder = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../examples/assets/shakespeare-llama"
    );
    super::folder::copy_folder(Path::new(folder), &bundled.path("model"));
    let mut cases: Vec<(&str, Workspace)> = tokenizers()
        .into_iter()
        .map(|case| (case.name, case.workspace))
        .collect();
    cases.push(("bundled", bundled));
    for (name, workspace) in cases {
        let dir = workspace.path("model");
        let said = export(&workspace, "model", "model.gguf", "f32");
        let tokenizer = Tokenizer::from_dir(&dir).unwrap();
        let tokens = tokenizer.named_special_tokens().clone();
        let template = ChatTemplate::from_dir(&dir, tokens).unwrap();
        let file = workspace.path("model.gguf");
        let asked = template
            .as_ref()
            .map_or(json!([]), |_| conversations.clone());
        let answer = ask(
            &packages,
            &json!({"model": file, "texts": lines, "conversations": asked}),
        );
        let (found, around) = (ids(&answer["ids"]), ids(&answer["with_added"]));
        for (index, line) in lines.iter().enumerate() {
            let expected = tokenizer.encode(line).unwrap();
            assert_eq!(found[index], expected, "{name}: {line:?}\n{said}");
            let expected = tokenizer.encode_with_special_tokens(line).unwrap();
            assert_eq!(around[index], expected, "{name}: {line:?}");
        }
        for (index, rendered) in answer["rendered"].as_array().unwrap().iter().enumerate() {
            let chat = Chat::from_json(conversations[index].as_array().unwrap()).unwrap();
            let expected = template.as_ref().unwrap().generation_prompt(&chat).unwrap();
            assert_eq!(rendered, &json!(expected), "{name}");
        }
        eprintln!(
            "{name}: {} lines, {} conversations",
            lines.len(),
            answer["rendered"].as_array().unwrap().len()
        );
    }
}

/// Each way to split texts that an export can name is what llama.cpp calls so.
#[test]
fn texts_are_split_by_name() {
    let Some(packages) = packages() else { return };
    let lines = lines();
    let case = tokenizers()
        .into_iter()
        .find(|case| case.name == "chatml")
        .unwrap();
    let workspace = &case.workspace;
    let ways = fs::read_to_string(fixture("pre_tokenizers.json")).unwrap();
    for way in serde_json::from_str::<Vec<Value>>(&ways).unwrap() {
        let name = way["name"].as_str().unwrap();
        edit_json(&workspace.model("tokenizer.json"), |json| {
            json["pre_tokenizer"] = way["pre_tokenizer"].clone();
            json["model"]["ignore_merges"] = way["ignore_merges"].clone();
        });
        let file = format!("{name}.gguf");
        export(workspace, "model", &file, "f32");
        let file = workspace.path(&file);
        assert_eq!(Read::open(&file).text("tokenizer.ggml.pre"), name);
        let tokenizer = Tokenizer::from_dir(workspace.path("model")).unwrap();
        let found = ids(&ask(&packages, &json!({"model": file, "texts": lines}))["ids"]);
        for (line, found) in lines.iter().zip(found) {
            assert_eq!(found, tokenizer.encode(line).unwrap(), "{name}: {line:?}");
        }
        eprintln!("{name}: {} lines", lines.len());
    }
}

/// Folded in, and beside its base.
#[test]
fn an_adapter_does_what_it_does_here() {
    let Some(packages) = packages() else { return };
    for model in ["tied_bias", "qwen3"] {
        let workspace = Workspace::with_model(model);
        workspace.edit_config(|config| {
            config["use_sliding_window"] = json!(false);
            config["layer_types"] = Value::Null;
        });
        let (base, adapter) = (
            workspace.path("model"),
            fixture("lora").join(model).join("adapter"),
        );
        let prompts = prompts(80);
        let expected = continuations(&base, Some(&adapter), &prompts);
        let export = |file: &str| {
            candle_train("export")
                .argument(adapter.display())
                .argument(workspace.path(file).display())
                .flag("--model", base.display())
        };
        export("merged.gguf").flag("--type", "f32").succeeds();
        export("adapter.gguf").switch("--adapter-only").succeeds();
        candle_train("export")
            .argument(base.display())
            .argument(workspace.path("base.gguf").display())
            .flag("--type", "f32")
            .succeeds();
        let request = |file: &str, adapter: Option<PathBuf>| json!({"model": workspace.path(file), "adapter": adapter, "prompts": prompts, "max_new_tokens": NEW_TOKENS});
        let merged = ask(&packages, &request("merged.gguf", None));
        assert_continued(model, &merged["continuations"], &expected);
        let beside = ask(
            &packages,
            &request("base.gguf", Some(workspace.path("adapter.gguf"))),
        );
        assert_continued(model, &beside["continuations"], &expected);
        let alone = ask(&packages, &request("base.gguf", None));
        assert_ne!(ids(&alone["continuations"]), ids(&beside["continuations"]));
        eprintln!("{model}: the adapter folded in and beside its base");
    }
}
