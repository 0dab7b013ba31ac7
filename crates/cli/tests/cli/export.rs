//! `candle-train export` and `inspect`.

use std::fs;
use std::path::{Path, PathBuf};

use super::folder::{Snapshot, Tensors, names, read_checkpoint, snapshot};
use super::program::{AssertText, Program};
use super::workspace::{Workspace, candle_train};

/// Three steps with a checkpoint after each, and its folder.
fn save(workspace: &Workspace, program: Program) -> (Program, PathBuf) {
    let saves = workspace.path("saves");
    let program = program.flag("--steps", 3).flag("--save-every", 1);
    let program = program
        .flag("--save-dir", saves.display())
        .flag("--keep", 3);
    program.succeeds();
    (program, saves)
}

fn export(checkpoint: &std::path::Path, output: &std::path::Path) -> Program {
    candle_train("export")
        .argument(checkpoint.display())
        .argument(output.display())
}

/// A model's files, without the note about the run that has made them.
fn model(dir: &std::path::Path) -> Snapshot {
    let mut files = snapshot(dir);
    files.remove(&PathBuf::from(".candle_train.json"));
    files
}

#[test]
fn an_exported_model_is_the_one_that_the_run_saves() {
    let workspace = Workspace::new();
    let runs = [
        workspace.finetune().flag("--freeze", "layers.1|norm"),
        workspace.finetune().flag("--save-dtype", "f16"),
        candle_train("pretrain")
            .flag("--data", workspace.path("text.txt").display())
            .flag("--output", workspace.output().display())
            .switch("--overwrite")
            .flag("--vocab-size", 270)
            .flag("--hidden-size", 12)
            .flag("--seq-len", 16)
            .flag("--freeze", "embed")
            .flag("--dtype", "bf16")
            .flag("--sample-tokens", 0),
    ];
    for (index, run) in runs.into_iter().enumerate() {
        let (_, saves) = save(&workspace, run);
        let exported = workspace.path(&format!("exported-{index}"));
        let outcome = export(&saves.join("step-000003"), &exported).succeeds();
        let said = format!("the model after step 3 is in {}\n", exported.display());
        assert_eq!(outcome.stdout, said);
        let want = model(&workspace.output());
        assert!(want.len() >= 3);
        assert!(model(&exported) == want, "run {index}");
        fs::remove_dir_all(saves).unwrap();
    }
}

/// Nothing of the model with which the run began is needed.
#[test]
fn a_second_name_of_a_weight_is_exported_too() {
    let workspace = Workspace::with_model("tied_bias");
    workspace.edit_weights(|tensors| {
        let embedding = tensors["model.embed_tokens.weight"].clone();
        tensors.insert("lm_head.weight".to_string(), embedding);
    });
    let (_, saves) = save(&workspace, workspace.finetune());
    fs::remove_dir_all(workspace.path("model")).unwrap();
    let exported = workspace.path("exported");
    export(&saves.join("step-000003"), &exported).succeeds();
    assert!(read_checkpoint(&exported).contains_key("lm_head.weight"));
    assert!(model(&exported) == model(&workspace.output()));
}

#[test]
fn exports_that_are_refused_and_other_types_and_sizes() {
    let workspace = Workspace::new();
    let (_, saves) = save(&workspace, workspace.finetune().flag("--freeze", "norm"));
    let checkpoint = saves.join("step-000002");
    let output = workspace.path("exported");
    let run = export(&checkpoint, &output);
    let small = run
        .clone()
        .flag("--max-shard-size", "50kB")
        .flag("--dtype", "bf16");
    small.succeeds();
    let files = names(&output);
    assert!(
        files.contains(&"model.safetensors.index.json".to_string()),
        "{files:?}"
    );
    assert!(
        files
            .iter()
            .filter(|name| name.ends_with(".safetensors"))
            .count()
            > 2
    );
    let before = snapshot(&output);
    run.fails(&["holds a model already", "--overwrite"]);
    assert!(snapshot(&output) == before);
    run.clone().switch("--overwrite").succeeds();
    assert!(!names(&output).contains(&"model.safetensors.index.json".to_string()));
    let parts = ["has no manifest.json", "step-000003"];
    export(&saves, &output).fails(&parts);
    let over_itself = export(&checkpoint, &checkpoint).switch("--overwrite");
    over_itself.fails(&["it is or holds"]);
    run.clone()
        .flag("--max-shard-size", "much")
        .fails(&["a size such as 5GB"]);
    let moved = workspace.path("moved");
    fs::rename(workspace.path("model"), &moved).unwrap();
    let again = run.switch("--overwrite");
    again.fails(&["it is not there", "hint: --model"]);
    again.clone().flag("--model", moved.display()).succeeds();
    let other = super::folder::fixture("bf16_sharded/model");
    let parts = ["are not those with which the run began"];
    again.flag("--model", other.display()).fails(&parts);
}

#[test]
fn inspect_tells_what_is_there_and_what_is_damaged() {
    let workspace = Workspace::new();
    let run = workspace
        .finetune()
        .flag("--freeze", "norm")
        .flag("--zero", 2);
    let run = run.flag("--eval-fraction", 0.1).flag("--eval-every", 1);
    let (_, saves) = save(&workspace, run);
    let inspect = candle_train("inspect").argument(saves.join("step-000002").display());
    let said = inspect.succeeds().stdout;
    assert!(!said.contains("model.norm.weight"), "{said}");
    let said = inspect.clone().switch("--tensors").succeeds().stdout;
    said.assert_has(&[
        "step-000002: after step 2, 20",
        "evaluation loss ",
        "pp 2 x dp 2 x tp 2, ZeRO-2",
        "next sample: 9 of epoch 1, 8 seen in all",
        "--lr 0.001",
        "model.embed_tokens.weight [307, ",
        "model.norm.weight [",
        "f32 frozen",
        "rank-00000.safetensors",
        "model/config.json",
        "xxh3 ",
    ]);
    assert!(!said.contains("verified"), "{said}");
    let said = inspect.clone().switch("--verify").succeeds().stdout;
    said.assert_has(&[" verified"]);
    let line = said.lines().last().unwrap();
    let (what, found) = line.split_once(": all files").unwrap();
    assert!(
        what.starts_with("verified: 1") && what.contains(" files, "),
        "{line}"
    );
    assert_eq!(found, " have their checksums, and all values are finite");
    let folder = candle_train("inspect").argument(saves.display());
    let list = folder.succeeds().stdout;
    let lines: Vec<&str> = list.lines().collect();
    assert_eq!(lines.len(), 3, "{list}");
    let all = folder.clone().switch("--verify").succeeds().stdout;
    let line = all.lines().last().unwrap();
    assert!(line.starts_with("verified: "), "{all}");
    folder
        .clone()
        .switch("--tensors")
        .fails(&["--tensors", "has 3 checkpoints", "hint: "]);
    assert!(
        lines[0].starts_with("step-000003: after step 3, "),
        "{list}"
    );
    let file = saves.join("step-000002/rank-00001.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(&file, bytes).unwrap();
    inspect.succeeds();
    let damaged = inspect
        .switch("--verify")
        .fails(&["rank-00001.safetensors was changed"]);
    let marked = damaged
        .stdout
        .lines()
        .filter(|line| line.ends_with("DAMAGED"));
    assert_eq!(marked.count(), 1, "{}", damaged.stdout);
    folder.succeeds();
    let list = folder
        .clone()
        .switch("--verify")
        .fails(&["1 of 3 checkpoints in"]);
    list.prints(&["step-000002: NOT VALID: "]);
    for step in ["step-000001", "step-000002", "step-000003"] {
        fs::rename(saves.join(step), saves.join(format!("{step}.failed"))).unwrap();
    }
    let none = folder.clone().switch("--verify").succeeds().stdout;
    let line = none.lines().last().unwrap();
    assert!(line.starts_with("nothing was verified: "), "{none}");
    fs::create_dir(workspace.path("empty")).unwrap();
    fs::create_dir(workspace.path("step-000009")).unwrap();
    for (argument, part) in [
        ("nowhere", "does not exist"),
        ("empty", "there is no checkpoint in"),
        ("step-000009", "has no manifest.json"),
    ] {
        let inspect = candle_train("inspect").argument(workspace.path(argument).display());
        inspect.fails(&[part]);
    }
}

fn inspect(workspace: &Workspace) -> Program {
    candle_train("inspect").argument(workspace.path("model").display())
}

#[test]
fn inspect_tells_what_a_model_is() {
    let workspace = Workspace::new();
    let said = inspect(&workspace).succeeds().stdout;
    let facts = [
        "model is a model as transformers has it\n",
        "family         llama (LlamaForCausalLM)\n",
        "parameters     53728\n",
        "layers         4, hidden size 32, 4 heads and 2 of keys and values\n",
        "weights        f32, 214.9 kB in 1 file, 39 tensors\n",
        "embeddings     not tied: the head has a weight of its own\n",
        "tokenizer      307 tokens\n",
    ];
    said.assert_has(&facts);
    assert!(!said.contains("model.norm.weight"), "{said}");
    let said = inspect(&workspace).switch("--tensors").succeeds().stdout;
    said.assert_has(&["  model.norm.weight [32] f32\n"]);
    fs::write(workspace.model("chat_template.jinja"), "{{ messages }}").unwrap();
    let said = inspect(&workspace).succeeds().stdout;
    said.assert_has(&["chat template  in chat_template.jinja\n"]);
    fs::write(workspace.model("chat_template.jinja"), "{{ messages").unwrap();
    fs::remove_file(workspace.model("tokenizer.json")).unwrap();
    let said = inspect(&workspace).succeeds().stdout;
    let parts = [
        "chat template  none that can be used: the chat template of",
        "tokenizer      none that can be read: cannot read the tokenizer",
    ];
    said.assert_has(&parts);
}

#[test]
fn inspect_verifies_a_model() {
    let verified = |name: &str, tensors: &str| {
        let workspace = Workspace::with_model(name);
        let said = inspect(&workspace).switch("--verify").succeeds().stdout;
        let line = said.lines().last().unwrap();
        let said = format!("verified: {tensors}, ");
        assert!(line.starts_with(&said), "{line}");
        line.assert_has(&["all values are finite"]);
    };
    verified("gqa", "39 tensors in 1 file");
    verified("bf16_sharded", "30 tensors in 5 files");
    verified("tied_bias", "82 tensors in 1 file");
    let name = "model.layers.1.input_layernorm.weight";
    let refuses = |edit: &dyn Fn(&mut Tensors), parts: &[&str]| {
        let workspace = Workspace::new();
        workspace.edit_weights(|tensors| edit(tensors));
        inspect(&workspace).succeeds();
        let verify = inspect(&workspace).switch("--verify");
        verify.fails(parts);
    };
    refuses(
        &|tensors| drop(tensors.remove(name)),
        &[name, "is missing from the checkpoint"],
    );
    refuses(
        &|tensors| {
            let norm = tensors.get_mut(name).unwrap();
            norm.1 = vec![16];
            norm.2.truncate(64);
        },
        &[name, "[16]", "expected [32]"],
    );
    refuses(
        &|tensors| {
            let norm = tensors.get_mut(name).unwrap();
            norm.2[..4].copy_from_slice(&f32::NAN.to_le_bytes());
        },
        &[name, "NaN or infinite"],
    );
    refuses(
        &|tensors| {
            let norm = tensors[name].clone();
            tensors.insert("model.more.weight".to_string(), norm);
        },
        &[
            "1 tensors that the configured model does not use",
            "model.more.weight",
        ],
    );
}

#[test]
fn inspect_tells_what_it_can_of_models_that_are_not_supported() {
    let workspace = Workspace::new();
    workspace.edit_config(|config| {
        config["model_type"] = "mamba".into();
        config["architectures"] = serde_json::json!(["MambaForCausalLM"]);
    });
    let said = inspect(&workspace).succeeds().stdout;
    let parts = [
        "family         mamba (MambaForCausalLM)\n",
        "parameters     53728\n",
        "layers         4, hidden size 32",
        "not supported: ",
        "model_type is \"mamba\"; supported: model_type \"llama\"",
    ];
    said.assert_has(&parts);
    let verify = inspect(&workspace).switch("--verify");
    verify.fails(&["model_type is \"mamba\""]);
    fs::remove_file(workspace.model("model.safetensors")).unwrap();
    let said = inspect(&workspace).succeeds().stdout;
    said.assert_has(&[
        "layers         4",
        "no weights: ",
        "has neither model.safetensors",
    ]);
    fs::write(workspace.model("config.json"), "{").unwrap();
    inspect(&workspace).fails(&["config.json"]);
}

/// In KiB, of a line that begins with these words: `weights 1.2 MiB, ..` or `1.2 MiB  2.3 KiB`.
fn numbers(stdout: &str, beginning: &str) -> Vec<f64> {
    let mut lines = stdout
        .lines()
        .filter_map(|line| line.trim().strip_prefix(beginning));
    let words: Vec<&str> = lines.next().unwrap().split_whitespace().collect();
    let pairs = words.windows(2).filter_map(|pair| {
        let number: f64 = pair[0].parse().ok()?;
        match pair[1].trim_end_matches(',') {
            "KiB" => Some(number),
            "MiB" => Some(number * 1024.0),
            _ => None,
        }
    });
    pairs.collect()
}

/// What a run of the same flags says before its first step, which is what it then holds.
#[test]
fn the_memory_that_inspect_tells_is_that_of_a_run() {
    let assets = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/assets");
    let model = assets.join("shakespeare-llama").display().to_string();
    let told = candle_train("inspect").argument(&model).succeeds().stdout;
    let workspace = Workspace::new();
    for (flags, line) in [
        (&[("--dtype", "f32")][..], "--dtype f32 "),
        (&[("--dtype", "bf16")], "--dtype bf16  "),
        (
            &[("--dtype", "bf16"), ("--lora-rank", "16")],
            "--dtype bf16 --lora-rank 16  ",
        ),
        (
            &[
                ("--dtype", "bf16"),
                ("--lora-rank", "16"),
                ("--base-dtype", "q4k"),
            ],
            "--dtype bf16 --lora-rank 16 --base-dtype q4k ",
        ),
    ] {
        let run = candle_train("finetune")
            .flag("--model", &model)
            .flag("--data", workspace.path("text.txt").display())
            .flag("--output", workspace.path("new").display())
            .switch("--overwrite")
            .flag("--steps", 1)
            .flag("--seq-len", 512)
            .flag("--micro-batch-size", 1)
            .flag("--global-batch-size", 1)
            // Which depends on the processor, and on what memory is free.
            .flag("--pack-weights", "off")
            .flag("--sample-tokens", 0);
        let run = run.flags(flags);
        let said = run.succeeds().stdout;
        let mut expected = numbers(&said, "memory of the largest rank, expected: ");
        expected.push(expected.iter().sum());
        let got = numbers(&told, line);
        assert_eq!(got.len(), 5, "{told}");
        for (got, expected) in got.iter().zip(&expected) {
            // Of two roundings.
            let difference = (got - expected).abs();
            assert!(
                difference <= 0.02 * expected,
                "{line}: {got} of {expected}: {told}{said}"
            );
        }
    }
}
