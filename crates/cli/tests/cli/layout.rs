//! Degrees and batch sizes: those that follow from others, those that do not fit the model, the data or each other, and flags for more ranks.

use serde_json::json;

use super::program::{AssertText, Program};
use super::workspace::{Workspace, candle_train};

#[test]
fn degrees_and_sizes_that_do_not_fit_are_named_with_their_numbers() {
    let workspace = Workspace::new();
    let max = usize::MAX.to_string();
    type Flags<'a> = &'a [(&'a str, &'a str)];
    let cases: &[(Flags<'_>, &[&str])] = &[
        (
            &[("--tp", "5"), ("--pp", "1")],
            &["tp(5) > num_attention_heads(4)", "hint: use tp <= 4"],
        ),
        (
            &[("--pp", "5")],
            &["pp(5) > number of layers(4)", "hint: use pp <= 4"],
        ),
        (
            &[("--global-batch-size", "6"), ("--micro-batch-size", "2")],
            &["global_batch_size(6) % (micro_batch_size(2) * dp(2) = 4) = 2 != 0"],
        ),
        (
            &[("--global-batch-size", "1")],
            &["global_batch_size(1) % (micro_batch_size(1) * dp(2) = 2)"],
        ),
        (
            &[("--tp", "64"), ("--pp", "64"), ("--dp", "64")],
            &["pp(64) * dp(64) * cp(1) * tp(64) is more than the 1024 ranks that may be threads"],
        ),
        (
            &[("--tp", &max), ("--pp", &max), ("--dp", &max)],
            &["pp(18446744073709551615)", "1024"],
        ),
        (
            &[("--dp", &max), ("--tp", "1"), ("--pp", "1")],
            &["dp(18446744073709551615)", "1024"],
        ),
        (
            &[("--micro-batch-size", &max)],
            &[
                "global_batch_size(4)",
                "micro_batch_size(18446744073709551615)",
            ],
        ),
    ];
    for (flags, parts) in cases {
        let program = workspace.finetune().flags(flags);
        workspace.refuses(&program, parts);
    }
}

#[test]
fn sequences_are_not_longer_than_the_model_allows() {
    let workspace = Workspace::new();
    workspace.edit_config(|config| config["max_position_embeddings"] = 12.into());
    let parts = ["--seq-len 16", "12 tokens", "max_position_embeddings"];
    workspace.refuses(&workspace.finetune(), &parts);
    workspace.finetune().flag("--seq-len", 12).succeeds();
    workspace.edit_config(|config| {
        config["rope_parameters"] = json!({"rope_type": "dynamic", "factor": 2})
    });
    workspace.finetune().succeeds();
}

#[test]
fn the_batch_size_of_a_device_decides_that_of_a_step_unless_that_is_given() {
    let workspace = Workspace::new();
    let program = workspace
        .finetune()
        .without("--micro-batch-size")
        .flag("--steps", 1)
        .flag("--per-device-train-batch-size", 3);
    let of_ranks = program.clone().without("--global-batch-size");
    let out = of_ranks.succeeds().stdout;
    out.assert_has(&[
        "1 step of 6 sequences",
        "a step: micro-batch 3 x dp 2 x accumulation 1 = 6 sequences\n",
        "--global-batch-size 6",
    ]);
    // The file of the run says the same, whoever runs it again.
    let file = workspace.output().join("candle_train.toml");
    let again = candle_train("finetune")
        .flag("--config", file.display())
        .flag("--output", workspace.path("again").display());
    let out = again.succeeds().stdout;
    out.assert_has(&["1 step of 6 sequences"]);
    let out = program.flag("--global-batch-size", 12).succeeds().stdout;
    out.assert_has(&["1 step of 12 sequences"]);
    assert!(!out.contains("a step: "), "{out}");
}

#[test]
fn flags_for_more_devices_start_a_run_on_one_which_says_what_they_do_not_do() {
    let workspace = Workspace::new();
    let program = workspace.finetune().flag("--steps", 1);
    let of_eight = [
        ("--zero", "3"),
        ("--schedule", "gpipe"),
        ("--rank-timeout", "9"),
        ("--offload", "optimizer"),
    ];
    let of_eight = |program: Program| {
        let program = program.flags(&of_eight);
        program.switch("--no-overlap").switch("--deterministic")
    };
    let alone = ["--tp", "--pp", "--dp"].map(|flag| (flag, 1));
    let alone = program.clone().flags(&alone);
    let outcome = of_eight(alone.clone()).succeeds();
    let said = "\nwithout effect here: --zero 3 (one replica, so memory is not divided), --no-overlap (one replica), \
                --schedule gpipe (one stage), --rank-timeout 9 (no processes), --deterministic (a CPU), --offload optimizer (a CPU, whose \
                memory is the host's: --offload-dir names a folder)\n";
    outcome.prints(&[said]);
    assert!(!outcome.stdout.contains("ZeRO"), "{}", outcome.stdout);
    let outcome = of_eight(program.clone()).succeeds();
    let said = "\nwithout effect here: --rank-timeout 9 (no processes), --deterministic (a CPU), --offload optimizer";
    outcome.prints(&[said, "ZeRO-3"]);
    let divided = of_eight(program.clone().flag("--pack-weights", "on")).succeeds();
    divided.prints(&["--pack-weights on (weights are not here between uses)"]);
    // Defaults, which the file of a run has, do nothing and ask for nothing.
    let outcome = alone
        .flag("--zero", 1)
        .flag("--schedule", "1f1b")
        .succeeds();
    assert!(
        !outcome.stdout.contains("without effect"),
        "{}",
        outcome.stdout
    );
}
