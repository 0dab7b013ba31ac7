//! `candle-train export` and `inspect`.

use std::fs;
use std::path::PathBuf;

use super::folder::{Snapshot, names, read_checkpoint, snapshot};
use super::program::Program;
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
    run.run()
        .assert_error(&["holds a model already", "--overwrite"]);
    assert!(snapshot(&output) == before);
    run.clone().switch("--overwrite").succeeds();
    assert!(!names(&output).contains(&"model.safetensors.index.json".to_string()));
    let parts = ["has no manifest.json", "step-000003"];
    export(&saves, &output).run().assert_error(&parts);
    let over_itself = export(&checkpoint, &checkpoint).switch("--overwrite");
    over_itself.run().assert_error(&["it is or holds"]);
    run.clone()
        .flag("--max-shard-size", "much")
        .run()
        .assert_error(&["a size such as 5GB"]);
    let moved = workspace.path("moved");
    fs::rename(workspace.path("model"), &moved).unwrap();
    let again = run.switch("--overwrite");
    again
        .run()
        .assert_error(&["it is not there", "hint: --model"]);
    again.clone().flag("--model", moved.display()).succeeds();
    let other = super::folder::fixture("bf16_sharded/model");
    let parts = ["are not those with which the run began"];
    again
        .flag("--model", other.display())
        .run()
        .assert_error(&parts);
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
    for part in [
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
    ] {
        assert!(said.contains(part), "{part:?} is not in: {said}");
    }
    assert!(!said.contains("verified"), "{said}");
    let said = inspect.clone().switch("--verify").succeeds().stdout;
    assert!(said.contains(" verified"), "{said}");
    let folder = candle_train("inspect").argument(saves.display());
    let list = folder.succeeds().stdout;
    let lines: Vec<&str> = list.lines().collect();
    assert_eq!(lines.len(), 3, "{list}");
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
    let damaged = inspect.switch("--verify").run();
    damaged.assert_error(&["rank-00001.safetensors was changed"]);
    let marked = damaged
        .stdout
        .lines()
        .filter(|line| line.ends_with("DAMAGED"));
    assert_eq!(marked.count(), 1, "{}", damaged.stdout);
    folder.succeeds();
    let list = folder.switch("--verify").run();
    list.assert_error(&["1 of 3 checkpoints in"]);
    assert!(
        list.stdout.contains("step-000002: NOT VALID: "),
        "{}",
        list.stdout
    );
    fs::create_dir(workspace.path("empty")).unwrap();
    fs::create_dir(workspace.path("step-000009")).unwrap();
    for (argument, part) in [
        ("nowhere", "does not exist"),
        ("empty", "there is no checkpoint in"),
        ("step-000009", "has no manifest.json"),
    ] {
        let inspect = candle_train("inspect").argument(workspace.path(argument).display());
        inspect.run().assert_error(&[part]);
    }
    let model = candle_train("inspect").argument(workspace.path("model").display());
    let said = model.succeeds().stdout;
    for part in [
        "is a model as transformers has it, and no checkpoint of a run: 39 tensors of 53728 values:",
        "  model.norm.weight [32] f32\n",
    ] {
        assert!(said.contains(part), "{part:?} is not in: {said}");
    }
}
