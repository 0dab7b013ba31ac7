//! Models that are not there, and configurations that are damaged or describe something else.

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};

use super::workspace::{Workspace, candle_train, refuses_file, refuses_model};

#[track_caller]
fn refuses_config(edit: impl FnOnce(&mut Value), parts: &[&str]) {
    refuses_model(|workspace| workspace.edit_config(edit), parts);
}

#[test]
fn a_model_that_is_nowhere_is_an_error_that_says_what_a_model_is() {
    let workspace = Workspace::new();
    let at = |model: &str| workspace.finetune().flag("--model", model);
    let nowhere = workspace.path("nowhere").display().to_string();
    workspace.refuses(
        &at(&nowhere),
        &[&nowhere, "neither an existing folder nor the name"],
    );
    workspace.refuses(&at(""), &["model \"\" is neither"]);
    let file = workspace.model("config.json").display().to_string();
    workspace.refuses(&at(&file), &[&file, "is a file, expected the folder"]);
    // Nothing in these tests may reach for the network: HF_HUB_OFFLINE is set.
    workspace.refuses(
        &at("someone/something"),
        &["someone/something@main", "HF_HUB_OFFLINE"],
    );
}

#[test]
fn a_configuration_that_is_missing_or_damaged_is_named() {
    refuses_file(
        "model/config.json",
        |path| fs::remove_file(path).unwrap(),
        &["cannot read", "model/config.json"],
    );
    refuses_file(
        "model/config.json",
        |path| fs::write(path, "{\"vocab").unwrap(),
        &["config.json", "not a JSON file"],
    );
    refuses_file(
        "model/config.json",
        |path| fs::write(path, "[]").unwrap(),
        &["config.json"],
    );
    refuses_file(
        "model/config.json",
        |path| fs::write(path, [0xff, 0xfe]).unwrap(),
        &["config.json", "UTF-8"],
    );
}

#[test]
fn a_pointer_of_git_lfs_in_place_of_a_file_is_named() {
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n";
    for name in [
        "model/config.json",
        "model/tokenizer.json",
        "model/tokenizer_config.json",
        "model/model.safetensors",
        "text.txt",
    ] {
        refuses_file(
            name,
            |path| fs::write(path, pointer).unwrap(),
            &[
                name.rsplit('/').next().unwrap(),
                "it is a Git LFS pointer",
                "hint: git lfs pull",
            ],
        );
    }
}

#[test]
fn a_pipe_in_place_of_a_file_is_named_and_not_waited_for() {
    let pipe = |path: &Path| {
        let _ = fs::remove_file(path);
        let made = Command::new("mkfifo").arg(path).status().unwrap();
        assert!(made.success());
    };
    for name in [
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
        "model.safetensors",
    ] {
        let file = format!("model/{name}");
        refuses_file(&file, pipe, &[name, "it is a pipe, expected a file"]);
    }
    let workspace = Workspace::new();
    let (adapter, saves) = (workspace.path("adapter"), workspace.path("saves"));
    fs::create_dir_all(&adapter).unwrap();
    fs::create_dir_all(saves.join("step-000001")).unwrap();
    pipe(&adapter.join("adapter_config.json"));
    pipe(&saves.join("step-000001/manifest.json"));
    let run = workspace.finetune().flag("--adapter", adapter.display());
    workspace.refuses(&run, &["adapter_config.json", "it is a pipe"]);
    let step = saves.join("step-000001");
    let run = workspace.finetune().flag("--resume", step.display());
    workspace.refuses(&run, &["manifest.json", "it is a pipe"]);
    candle_train("inspect")
        .argument(step.display())
        .fails(&["manifest.json", "it is a pipe"]);
}

#[test]
fn another_architecture_is_named_with_what_is_supported() {
    refuses_config(
        |config| config["model_type"] = json!("none"),
        &[
            "model_type is \"none\"",
            "\"llama\", \"mistral\", \"qwen2\", \"qwen3\"",
        ],
    );
    refuses_config(
        |config| config["architectures"] = json!(["MistralForCausalLM"]),
        &[
            "architectures",
            "\"MistralForCausalLM\"",
            "\"LlamaForCausalLM\"",
        ],
    );
    refuses_config(
        |config| config["hidden_act"] = json!("gelu"),
        &["hidden_act is \"gelu\"", "\"silu\""],
    );
    refuses_config(
        |config| config["rope_parameters"]["rope_type"] = json!("longrope"),
        &[
            "rope_parameters.rope_type is \"longrope\"",
            "\"default\", \"linear\", \"dynamic\", \"llama3\", \"yarn\"",
        ],
    );
}

#[test]
fn fields_that_are_missing_wrong_or_at_odds_are_named() {
    let remove = |name: &'static str| {
        move |config: &mut Value| drop(config.as_object_mut().unwrap().remove(name))
    };
    refuses_config(remove("hidden_size"), &["config.json", "hidden_size"]);
    refuses_config(
        remove("num_hidden_layers"),
        &["config.json", "num_hidden_layers"],
    );
    refuses_config(
        |config| config["hidden_size"] = json!("wide"),
        &["config.json", "\"wide\""],
    );
    refuses_config(
        |config| config["vocab_size"] = json!(-1),
        &["config.json", "-1"],
    );
    refuses_config(
        |config| config["num_attention_heads"] = json!(0),
        &["num_attention_heads is 0"],
    );
    refuses_config(
        |config| config["num_key_value_heads"] = json!(3),
        &["num_attention_heads(4)", "num_key_value_heads(3)"],
    );
    refuses_config(|config| config["head_dim"] = json!(7), &["head_dim is 7"]);
    refuses_config(
        |config| config["rope_parameters"]["rope_theta"] = json!(0),
        &["rope_theta is 0"],
    );
}

#[test]
fn a_configuration_that_does_not_describe_the_weights_is_an_error() {
    refuses_config(
        |config| config["num_hidden_layers"] = json!(3),
        &[
            "9 tensors",
            "model.layers.3.input_layernorm.weight",
            "config.json",
        ],
    );
    refuses_config(
        |config| config["num_hidden_layers"] = json!(5),
        &["model.layers.4.", "missing"],
    );
    refuses_config(
        |config| config["intermediate_size"] = json!(60),
        &["mlp.", "[56, 32]", "[60, 32]"],
    );
    refuses_config(
        |config| config["attention_bias"] = json!(true),
        &["_proj.bias", "missing"],
    );
}
