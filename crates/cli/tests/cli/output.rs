//! Places that cannot be written to, and output folders that hold something already.

use std::fs;

use super::folder::{names, read_json, snapshot};
use super::workspace::Workspace;

#[test]
fn an_output_that_cannot_be_a_folder_is_an_error_before_any_step() {
    let workspace = Workspace::new();
    let file = workspace.path("file");
    fs::write(&file, "in the way").unwrap();
    let below = file.join("below/output");
    for output in [&file, &below] {
        let output = output.display().to_string();
        let outcome = workspace.finetune().flag("--output", &output).run();
        outcome.assert_error(&["cannot write to the output folder", &output]);
        assert_eq!(outcome.stderr.lines().count(), 1, "{}", outcome.stderr);
    }
    assert_eq!(fs::read_to_string(&file).unwrap(), "in the way");
}

#[test]
fn a_refused_run_makes_no_folder() {
    let workspace = Workspace::new();
    let output = workspace.path("new");
    let program = workspace.finetune().flag("--output", output.display());
    program.flag("--tp", 5).run().assert_error(&["tp(5)"]);
    assert!(!output.exists());
}

#[test]
fn metrics_that_cannot_be_written_are_an_error_before_any_step() {
    let workspace = Workspace::new();
    for metrics in [
        workspace.path("missing/metrics.jsonl"),
        workspace.path("model"),
    ] {
        let program = workspace.finetune().flag("--metrics", metrics.display());
        let outcome = program.flag("--sample-tokens", 1).run();
        outcome.assert_error(&["cannot write the metrics file", metrics.to_str().unwrap()]);
        assert!(!outcome.stdout.contains("before"), "{}", outcome.stdout);
        workspace.assert_output_is_untouched();
    }
}

#[test]
fn a_folder_with_the_name_of_a_file_to_be_written_is_left_alone() {
    let workspace = Workspace::new();
    let output = workspace.path("odd");
    fs::create_dir_all(output.join("config.json")).unwrap();
    fs::write(output.join("model.safetensors"), "old").unwrap();
    let before = snapshot(&output);
    let outcome = workspace
        .finetune()
        .flag("--output", output.display())
        .flag("--sample-tokens", 1)
        .run();
    outcome.assert_error(&[
        "cannot write to",
        "a folder has the name of the file config.json",
    ]);
    assert!(
        !outcome.stdout.contains("before"),
        "it is known before the first step"
    );
    assert_eq!(snapshot(&output), before);
}

#[test]
fn a_new_checkpoint_replaces_the_old_one_and_nothing_else() {
    let workspace = Workspace::new();
    workspace.finetune().succeeds();
    // The old one was in five files with an index.
    let expected = [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "logs",
        "model.safetensors",
        "notes.bin",
        "tokenizer.json",
        "tokenizer_config.json",
    ];
    assert_eq!(names(&workspace.output()), expected);
    assert_eq!(names(&workspace.output().join("logs")), ["run.log"]);
    let read = |path| fs::read(path).unwrap();
    for file in ["config.json", "tokenizer.json", "tokenizer_config.json"] {
        assert_eq!(
            read(workspace.output().join(file)),
            read(workspace.model(file)),
            "{file}"
        );
    }
}

#[test]
fn a_model_can_be_trained_in_place() {
    let workspace = Workspace::new();
    let config = read_json(&workspace.model("config.json"));
    let weights = fs::read(workspace.model("model.safetensors")).unwrap();
    let files = names(&workspace.path("model"));
    let program = workspace
        .finetune()
        .flag("--output", workspace.path("model").display());
    program.succeeds();
    assert_eq!(names(&workspace.path("model")), files);
    assert_eq!(read_json(&workspace.model("config.json")), config);
    let trained = fs::read(workspace.model("model.safetensors")).unwrap();
    assert!(trained != weights);
    // What was written is a model again.
    program.flag("--steps", 0).succeeds();
    assert!(fs::read(workspace.model("model.safetensors")).unwrap() == trained);
}
