//! Degrees and batch sizes that do not fit the model, the data or each other.

use serde_json::json;

use super::workspace::Workspace;

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
        let program = flags
            .iter()
            .fold(workspace.finetune(), |program, (name, value)| {
                program.flag(name, value)
            });
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
