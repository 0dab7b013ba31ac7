//! Command lines as people bring them from other programs, and what is said of flags that are other programs'.

use std::fs;

use super::folder::read_tensors;
use super::program::{AssertText, Program};
use super::workspace::{Workspace, candle_train};

fn weights(workspace: &Workspace) -> super::folder::Tensors {
    read_tensors(&workspace.output().join("model.safetensors"))
}

#[test]
fn a_script_for_another_trainer_trains_the_same() {
    let workspace = Workspace::new();
    let here = workspace
        .finetune()
        .without("--steps")
        .without("--data")
        .flag("--data", workspace.short_text().display())
        .flag("--epochs", 1)
        .flag("--dtype", "bf16")
        .switch("--no-shuffle");
    let said = here.succeeds().stdout;
    let expected = weights(&workspace);
    let there = |subcommand| {
        candle_train(subcommand)
            .flag("--model", workspace.path("model").display())
            .flag("--data", workspace.short_text().display())
            .flag("--output_dir", workspace.output().display())
            .flag("--overwrite", "True")
            .flag("--tp", 2)
            .flag("--pp", 2)
            .flag("--dp", 2)
            .flag("--learning_rate", "1e-3")
            .flag("--num_train_epochs", "1.0")
            .flag("--max_seq_len", 16)
            .flag("--global_batch_size", 4)
            .flag("--sample_tokens", 0)
            .flag("--fp16", "false")
            .flag("--dtype", "bfloat16")
            .flag("--no_shuffle", "true")
    };
    for subcommand in ["train", "sft"] {
        fs::remove_dir_all(workspace.output()).unwrap();
        let outcome = there(subcommand).succeeds();
        assert!(weights(&workspace) == expected, "{}", outcome.stdout);
        let first = |said: &str| said.lines().next().unwrap_or_default().to_string();
        assert_eq!(first(&outcome.stdout), first(&said));
    }
}

#[test]
fn the_last_of_two_equal_flags_wins_and_data_adds_up() {
    let workspace = Workspace::new();
    let run = workspace
        .finetune()
        .argument("--steps=7")
        .argument("--seed=3")
        .argument("--bf16")
        .argument("--bf16=false");
    let said = run.clone().flag("--steps", 1).succeeds().stdout;
    said.assert_has(&["1 step of"]);
    let toml = fs::read_to_string(workspace.output().join("candle_train.toml")).unwrap();
    assert!(
        toml.contains("seed = 3") && !toml.contains("dtype = "),
        "{toml}"
    );
    let one = workspace.finetune().succeeds().stdout;
    let other = workspace.path("other.txt");
    fs::copy(workspace.path("text.txt"), &other).unwrap();
    let both = workspace
        .finetune()
        .argument(format!("--data={}", other.display()))
        .succeeds()
        .stdout;
    assert!(
        one.contains("1 text,") && both.contains("2 texts,"),
        "{one}{both}"
    );
}

#[test]
fn a_switch_that_is_given_as_false_wins_over_the_file() {
    let workspace = Workspace::new();
    let file = workspace.path("run.toml");
    fs::write(&file, "no-shuffle = true\nbf16 = true\n").unwrap();
    let run = workspace.finetune().flag("--config", file.display());
    let of = |run: &Program| {
        run.succeeds();
        fs::read_to_string(workspace.output().join("candle_train.toml")).unwrap()
    };
    let toml = of(&run);
    let are_on = |toml: &str| ["no-shuffle = true", "dtype = \"bf16\""].map(|on| toml.contains(on));
    assert_eq!(are_on(&toml), [true; 2], "{toml}");
    let toml = of(&run.flag("--bf16", "false").flag("--no_shuffle", "False"));
    assert_eq!(are_on(&toml), [false; 2], "{toml}");
}

#[test]
fn parts_of_epochs_are_trained() {
    let workspace = Workspace::new();
    let num_steps = |program: Program, epochs: &str| -> usize {
        let said = program
            .without("--steps")
            .flag("--epochs", epochs)
            .flag("--lr", 0)
            .succeeds()
            .stdout;
        let steps = said
            .split(" steps of")
            .next()
            .or(said.split(" step of").next());
        let steps = steps.and_then(|said| said.rsplit(' ').next());
        steps
            .and_then(|steps| steps.parse().ok())
            .unwrap_or_else(|| panic!("{said}"))
    };
    let run = || {
        let run = workspace.finetune().without("--data");
        let run = run.flag("--data", workspace.short_text().display());
        run.flag("--global-batch-size", 6)
    };
    let [half, whole, more] = ["0.5", "1", "1.5"].map(|epochs| num_steps(run(), epochs));
    assert!(half > 1 && more == whole + half, "{half} {whole} {more}");
    assert_eq!(half, whole.div_ceil(2));
    // Going on ends at the same step.
    let saves = workspace.path("saves");
    let saving = run()
        .flag("--save-every", 10)
        .flag("--save-dir", saves.display());
    assert_eq!(num_steps(saving, "1.5"), more);
    let resumed = run().flag("--resume", saves.join("step-000010").display());
    let outcome = resumed
        .without("--steps")
        .flag("--epochs", "1.5")
        .flag("--lr", 0)
        .succeeds();
    outcome.says(&[&format!("step {more}/{more} ")]);
}

#[test]
fn flags_of_others_are_answered_with_those_of_here() {
    let workspace = Workspace::new();
    for (flag, value, tip) in [
        (
            "--gradient_checkpointing",
            Some("true"),
            "this is --recompute full here",
        ),
        ("--load-in-4bit", None, "--base-dtype q4k"),
        ("--save_steps=500", None, "--save-every"),
        ("--val_set_size", Some("0.1"), "--eval-fraction"),
        ("--cutoff-len", Some("2048"), "--seq-len"),
        ("--packing", None, "--no-packing"),
        ("--deepspeed", Some("ds.json"), "--zero 1, 2 or 3"),
        ("--optim", Some("adamw_torch"), "the optimizer is AdamW"),
        ("--report_to", Some("wandb"), "--tensorboard"),
        ("--use_dora", None, "DoRA is not supported"),
        (
            "--model_name_or_path",
            Some("x"),
            "the model is --model here",
        ),
        ("--template", Some("qwen"), "--chat-template"),
    ] {
        let run = match value {
            Some(value) => workspace.finetune().flag(flag, value),
            None => workspace.finetune().switch(flag),
        };
        let name = flag.split('=').next().unwrap_or_default().replace('_', "-");
        workspace.refuses(
            &run,
            &[&format!("unexpected argument '{name}"), "tip: ", tip],
        );
    }
    // One that nobody knows gets the nearest one.
    workspace.refuses(
        &workspace.finetune().flag("--epoch-s", 3),
        &["similar argument", "--epochs"],
    );
    let toml = workspace.path("run.toml");
    fs::write(&toml, "gradient_checkpointing = true\n").unwrap();
    let run = workspace.finetune().flag("--config", toml.display());
    workspace.refuses(
        &run,
        &[
            "gradient_checkpointing is no flag of finetune",
            "hint: this is --recompute full here",
        ],
    );
    let generate = candle_train("generate").flag("--max_tokens", 3);
    generate.fails(&["tip: this is --max-new-tokens here"]);
    // What is not done here is not done in another way either.
    for (flag, value, tip) in [
        (
            "--train_on_inputs",
            "false",
            "false is what is done without it",
        ),
        ("--stage", "dpo", "there is no dpo"),
    ] {
        let run = workspace.finetune().flag(flag, value);
        workspace.refuses(&run, &["tip: ", tip]);
    }
    for (program, tip) in [
        (candle_train("eval"), "finetune --steps 0 --eval-data FILE"),
        (
            candle_train("serve"),
            "candle-train export writes a GGUF file",
        ),
        (
            candle_train("generate").argument("my-model"),
            "--model my-model",
        ),
    ] {
        program.fails(&["tip: ", tip]);
    }
}

#[test]
fn chat_is_generate_with_a_conversation() {
    let workspace = Workspace::new();
    fs::write(
        workspace.model("chat_template.jinja"),
        "{% for m in messages %}{{ m.content }}{% endfor %}",
    )
    .unwrap();
    let of = |subcommand| {
        candle_train(subcommand)
            .flag("--model", workspace.path("model").display())
            .flag("--prompt", "Hello")
            .flag("--max-new-tokens", 8)
    };
    let said = of("chat").succeeds().stdout;
    assert_eq!(said, of("generate").switch("--chat").succeeds().stdout);
}
