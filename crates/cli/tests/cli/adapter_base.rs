//! The model that an adapter belongs to: found by the adapter, told apart from it, and not another one.

use std::fs;
use std::path::Path;

use serde_json::json;

use super::folder::{copy_folder, edit_json};
use super::lora::{lora, merge};
use super::program::Outcome;
use super::workspace::{Workspace, candle_train};

#[test]
fn an_adapters_folder_finds_its_model() {
    let workspace = Workspace::new();
    let adapter = workspace.path("adapter");
    lora(&workspace)
        .flag("--output", adapter.display())
        .succeeds();
    let shown = adapter.display().to_string();
    let model = workspace.path("model").display().to_string();
    let note = |base: &str| {
        edit_json(&adapter.join("adapter_config.json"), |config| {
            config["base_model_name_or_path"] = json!(base);
        });
    };
    let generate = candle_train("generate")
        .flag("--prompt", "The Queen")
        .flag("--max-new-tokens", 4);
    let alone = generate.clone().flag("--model", &shown);
    let both = generate
        .clone()
        .flag("--model", &model)
        .flag("--adapter", &shown);
    let expected = both.succeeds().stdout;
    assert_ne!(
        generate.clone().flag("--model", &model).succeeds().stdout,
        expected
    );
    let merge = merge(&workspace, "adapter")
        .without("--model")
        .switch("--overwrite");
    for base in [model.as_str(), "../model"] {
        note(base);
        let outcome = alone.clone().flag("--tp", 2).succeeds();
        assert_eq!(outcome.stdout, expected);
        let said = format!("{shown} is an adapter: it is used with its model, ");
        assert_eq!(
            outcome.stderr.matches(&said).count(),
            1,
            "{}",
            outcome.stderr
        );
        merge.succeeds();
        let merged = workspace.path("merged").display().to_string();
        let of_merged = generate.clone().flag("--model", merged).succeeds();
        assert_eq!(of_merged.stdout, expected);
    }
    note("nobody/nothing");
    let flags = format!("--model nobody/nothing --adapter {shown}");
    let parts = ["was trained on nobody/nothing", "hub's cache", &flags];
    alone.fails(&parts);
    merge.fails(&parts);
    note("");
    let parts = ["base_model_name_or_path", "--model BASE --adapter"];
    alone.fails(&parts);
    merge.fails(&parts);
}

#[test]
fn an_adapter_in_place_of_a_model_is_told_apart() {
    let workspace = Workspace::new();
    let adapter = workspace.path("adapter");
    lora(&workspace)
        .flag("--output", adapter.display())
        .succeeds();
    let (shown, model) = (
        adapter.display().to_string(),
        workspace.path("model").display().to_string(),
    );
    let both = format!(
        "hint: give the model that it was trained on, and the adapter by its own flag: --model {model} --adapter {shown}"
    );
    let parts = ["is an adapter, and no model", both.as_str()];
    workspace.run_refused(&workspace.finetune().flag("--model", &shown), &parts);
    merge(&workspace, "adapter")
        .flag("--model", &shown)
        .fails(&parts);
    let generate = candle_train("generate")
        .flag("--prompt", "The Queen")
        .flag("--model", &shown)
        .flag("--adapter", &shown);
    generate.fails(&parts);
    let export = candle_train("export")
        .argument(&shown)
        .argument(workspace.path("exported").display());
    export.fails(&["is an adapter", "candle-train merge --adapter"]);
    // The tokenizer is beside the adapter, or else with its model.
    let preview = candle_train("preview")
        .flag("--data", workspace.path("text.txt").display())
        .flag("--seq-len", 16)
        .flag("--model", &shown);
    let said = preview.succeeds().stdout;
    fs::remove_file(adapter.join("tokenizer.json")).unwrap();
    assert_eq!(preview.succeeds().stdout, said);
}

/// What `merge`, `generate` and `finetune` say of an adapter whose base is called `base`.
fn with_base(workspace: &Workspace, base: &Path) -> [Outcome; 3] {
    let adapter = workspace.path("adapter");
    edit_json(&adapter.join("adapter_config.json"), |config| {
        config["base_model_name_or_path"] = json!(base);
    });
    let generate = candle_train("generate")
        .flag("--model", workspace.path("model").display())
        .flag("--adapter", adapter.display())
        .flag("--prompt", "The Queen")
        .flag("--max-new-tokens", 1)
        .flag("--tp", 2);
    let finetune = workspace.finetune().flag("--adapter", adapter.display());
    let programs = [merge(workspace, "adapter"), generate, finetune];
    programs.map(|program| {
        let hub = workspace.path("hub");
        let program = program.variable("HF_HOME", hub.display());
        program.variable("HF_ENDPOINT", "http://127.0.0.1:1").run()
    })
}

#[test]
fn an_adapter_of_another_model_is_refused_by_its_type_or_told_by_its_name() {
    let workspace = Workspace::new();
    let adapter = workspace.path("adapter");
    lora(&workspace)
        .flag("--output", adapter.display())
        .succeeds();
    let says = |base: &Path, is_right: bool| {
        for outcome in with_base(&workspace, base) {
            assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
            let said = format!(
                "warning: the adapter in {} was trained on {}, and --model is {}",
                adapter.display(),
                base.display(),
                workspace.path("model").display()
            );
            let count = outcome.stderr.matches(&said).count();
            assert_eq!(count, usize::from(!is_right), "{}", outcome.stderr);
            assert!(is_right != outcome.stderr.contains("was trained on"));
            let _ = fs::remove_dir_all(workspace.path("merged"));
        }
    };
    says(&workspace.path("model"), true);
    says("org/model".as_ref(), true);
    says("org/another".as_ref(), false);
    // A model of this type that is at hand under another name, and one of another type.
    let other = workspace.path("other");
    copy_folder(&workspace.path("model"), &other);
    says(&other, false);
    let cached = workspace.path("hub/hub/models--org--cached");
    let snapshot = cached.join("snapshots").join("a".repeat(40));
    copy_folder(&workspace.path("model"), &snapshot);
    fs::create_dir_all(cached.join("refs")).unwrap();
    fs::write(cached.join("refs/main"), "a".repeat(40)).unwrap();
    says("org/cached".as_ref(), false);
    for dir in [&other, &snapshot] {
        edit_json(&dir.join("config.json"), |config| {
            config["model_type"] = json!("qwen2")
        });
    }
    for base in [other.as_path(), "org/cached".as_ref()] {
        for outcome in with_base(&workspace, base) {
            let of_type = format!("was trained on {}, a model of type qwen2", base.display());
            outcome.assert_error(&[&of_type, "is of type llama", "hint: --model"]);
        }
    }
    assert!(!workspace.path("merged").exists());
}
