//! `bench_train`: what it counts, in each type and with frozen parameters.

use serde_json::Value;

use crate::example;
use crate::program::Program;

/// A model of hidden width 16, MLP width 24, 2 layers, 2 heads, 1 key/value head, vocabulary 50.
fn bench() -> Program {
    let sizes = [
        ("--hidden-size", 16),
        ("--intermediate-size", 24),
        ("--layers", 2),
        ("--heads", 2),
        ("--kv-heads", 1),
        ("--vocab-size", 50),
        ("--seq-len", 8),
        ("--steps", 1),
    ];
    sizes
        .into_iter()
        .fold(example("bench_train"), |program, (flag, value)| {
            program.flag(flag, value)
        })
}

fn measured(program: Program) -> Value {
    serde_json::from_str(&program.succeeds().stdout).unwrap()
}

#[test]
fn parameters_are_counted_with_and_without_the_frozen_ones() {
    let (embedding, norms) = (50 * 16, (2 * 2 + 1) * 16);
    let layer = 2 * 16 * 16 + 2 * 8 * 16 + 3 * 16 * 24;
    let all = 2 * embedding + norms + 2 * layer;
    for (dtype, pattern, trainable) in [
        ("f32", None, all),
        ("bf16", None, all),
        ("f32", Some("proj|embed|lm_head"), norms),
        ("bf16", Some("proj|embed|lm_head"), norms),
        ("bf16", Some(r"layers\.1\.mlp"), all - 3 * 16 * 24),
        ("bf16", Some("^lm_head"), all - embedding),
    ] {
        let program = bench().flag("--device", "cpu").flag("--pp", 2);
        let mut program = program.flag("--dtype", dtype);
        if let Some(pattern) = pattern {
            program = program.flag("--freeze", pattern);
        }
        let measured = measured(program);
        assert_eq!(measured["dtype"], dtype);
        assert_eq!(measured["attention"], "cpu");
        assert!(measured["libraries"].is_null());
        assert_eq!(measured["parameters"], all, "{pattern:?}");
        assert_eq!(measured["trainable_parameters"], trainable, "{pattern:?}");
    }
}

#[test]
fn a_pattern_must_leave_something_to_train_and_something_to_freeze() {
    let run = |pattern| bench().flag("--freeze", pattern).run();
    run("model.embed$").assert_error(&["model.embed$", "none of the 21 parameters", "hint: "]);
    run(".").assert_error(&["--freeze .", "all 21 parameters", "hint: "]);
}

#[test]
fn a_number_of_threads_that_no_machine_has_is_refused() {
    let run = |threads: &str| bench().flag("--threads", threads).run();
    run("1025").assert_error(&["--threads is 1025", "at most 1024"]);
    run("18446744073709551615").assert_error(&["--threads is 18446744073709551615"]);
}

#[test]
fn a_profile_needs_a_gpu() {
    let outcome = bench().flag("--device", "cpu").switch("--profile").run();
    outcome.assert_error(&["--profile", "CUDA events", "CPU", "hint: --device cuda"]);
}
