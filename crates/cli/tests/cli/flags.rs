//! Values that a flag cannot have, each refused before a step is made; and that those it can have change what is trained.

use std::fs;
use std::process::Command;

use super::folder::read_tensors;
use super::workspace::{Workspace, candle_train};

/// What is said of a GPU that no machine has.
const NO_SUCH_GPU: &[&str] = if cfg!(feature = "cuda") {
    &["cuda:4096"]
} else {
    &["built without CUDA", "hint: "]
};

/// Numbers that each flag does not take, and what it expects.
const NUMBERS: &[(&str, &[&str], &str)] = &[
    ("--tp", &["0", "-1", "two"], "a whole number >= 1"),
    ("--pp", &["0", "-1", "1.5"], "a whole number >= 1"),
    ("--dp", &["0", "-1", ""], "a whole number >= 1"),
    ("--zero", &["4", "-1"], "a whole number >= 0 and <= 3"),
    ("--zero-group", &["1", "x"], "a whole number >= 2"),
    ("--tile-linears", &["0", "many"], "a whole number >= 1"),
    (
        "--deadline",
        &["0", "-5", "604801"],
        "a whole number >= 1 and <= 604800",
    ),
    ("--micro-batch-size", &["0", "-1"], "a whole number >= 1"),
    ("--global-batch-size", &["0", "-1"], "a whole number >= 1"),
    ("--seq-len", &["0", "-1"], "a whole number >= 1"),
    ("--steps", &["-1", "1e3"], "a whole number >= 0"),
    ("--epochs", &["-1", "nan", "two"], "a number >= 0"),
    (
        "--seed",
        &["-1", "18446744073709551616"],
        "a whole number >= 0",
    ),
    (
        "--lr",
        &["-1", "-1e-3", "nan", "inf", "fast"],
        "a number >= 0",
    ),
    ("--min-lr-ratio", &["-0.1", "1.5"], "a number >= 0 and <= 1"),
    ("--warmup-steps", &["-1"], "a whole number >= 0"),
    ("--weight-decay", &["-1", "inf"], "a number >= 0"),
    (
        "--adam-beta1",
        &["-0.1", "1", "nan"],
        "a number >= 0 and < 1",
    ),
    (
        "--adam-beta2",
        &["-0.1", "1", "nan"],
        "a number >= 0 and < 1",
    ),
    ("--adam-eps", &["-1e-8", "0", "inf"], "a number > 0"),
    ("--max-grad-norm", &["-1", "nan"], "a number >= 0"),
    ("--loss-scale-init", &["0", "0.5"], "a whole number >= 1"),
    ("--loss-scale-window", &["0", "-1"], "a whole number >= 1"),
    ("--sample-tokens", &["-1"], "a whole number >= 0"),
    ("--temperature", &["-1", "nan"], "a number >= 0"),
    ("--top-p", &["-0.5", "0", "1.1"], "a number > 0 and <= 1"),
];

/// Sizes of `pretrain`, which are all at least 1.
const SIZES: &[&str] = &[
    "--vocab-size",
    "--hidden-size",
    "--intermediate-size",
    "--layers",
    "--heads",
    "--kv-heads",
    "--max-positions",
];

#[test]
fn numbers_out_of_range_are_refused_with_flag_value_and_what_is_expected() {
    let workspace = Workspace::new();
    for (flag, values, expected) in NUMBERS {
        for value in *values {
            let parts = [
                &format!("invalid value '{value}' for '{flag} <"),
                &format!("expected {expected}"),
            ];
            workspace
                .finetune()
                .flag(flag, value)
                .fails(&parts.map(String::as_str));
        }
    }
    for flag in SIZES {
        for value in ["0", "-1"] {
            candle_train("pretrain").flag(flag, value).fails(&[
                &format!("invalid value '{value}' for '{flag} <"),
                "expected a whole number >= 1",
            ]);
        }
    }
    workspace.assert_output_is_untouched();
}

#[test]
fn other_values_are_refused_with_the_name_and_the_value() {
    let workspace = Workspace::new();
    let cases: &[(&str, &str, &[&str])] = &[
        ("--schedule", "zigzag", &["'zigzag'", "1f1b, gpipe"]),
        ("--dtype", "f64", &["'f64'", "f32, bf16, f16"]),
        (
            "--matmul-precision",
            "medium",
            &["'medium'", "highest, high"],
        ),
        ("--offload", "disk", &["`disk`", "nvme:DIR"]),
        ("--zero-group", "3", &["zero-group(3)", "dp(", "hint"]),
        ("--quantize-weights", "int8", &["ZeRO stage 3", "hint"]),
        ("--tile-linears", "2", &["tile-linears(2)", "ZeRO stage 3"]),
        ("--quantize-weights", "int4", &["'int4'", "int8"]),
        ("--grad-reduce-dtype", "f16", &["'f16'", "f32, bf16"]),
        (
            "--loss-scale-init",
            "8",
            &["--loss-scale-init is for --dtype f16"],
        ),
        (
            "--loss-scale-window",
            "8",
            &["--loss-scale-window is for --dtype f16"],
        ),
        ("--device", "gpu", &["'gpu'", "--device", "`cuda:N`"]),
        ("--device", "cuda:4096", NO_SUCH_GPU),
        (
            "--freeze",
            "layers.(",
            &["'layers.('", "--freeze", "unclosed group"],
        ),
        (
            "--freeze",
            "lm_heads",
            &["--freeze lm_heads", "none of the 39 parameters", "hint: "],
        ),
        (
            "--freeze",
            "weight$",
            &["--freeze weight$", "all 39 parameters", "nothing is left"],
        ),
        ("--save-dtype", "i8", &["'i8'", "f32, bf16, f16"]),
        ("--stepz", "1", &["--stepz", "--steps"]),
    ];
    for (flag, value, parts) in cases {
        workspace.refuses(&workspace.finetune().flag(flag, value), parts);
    }
    let program = workspace.finetune().flag("--dtype", "f16");
    workspace.refuses(
        &program.flag("--loss-scale-init", 3),
        &[
            "--loss-scale-init",
            "expected a power of two from 1 to 2^40",
        ],
    );
    let program = workspace
        .finetune()
        .flag("--prompt", "")
        .flag("--sample-tokens", 1);
    workspace.refuses(&program, &["--prompt", "no tokens"]);
}

#[test]
fn zero_steps_save_the_model_as_it_is() {
    let workspace = Workspace::new();
    let outcome = workspace.finetune().flag("--steps", 0).succeeds();
    assert!(outcome.stdout.contains("0 steps"), "{}", outcome.stdout);
    let saved = read_tensors(&workspace.output().join("model.safetensors"));
    assert!(saved == read_tensors(&workspace.model("model.safetensors")));
}

#[test]
fn a_number_of_the_optimizer_changes_the_weights() {
    let weights = |flags: &[(&str, &str)]| {
        let workspace = Workspace::new();
        let program = workspace.finetune().flag("--lr", 0.05);
        let program = program.flag("--warmup-steps", 0).flag("--steps", 3);
        let program = program.flags(flags);
        program.succeeds();
        fs::read(workspace.output().join("model.safetensors")).unwrap()
    };
    let default = weights(&[]);
    let named = [
        ("--adam-beta1", "0.9"),
        ("--adam-beta2", "0.95"),
        ("--adam-eps", "1e-8"),
        ("--weight-decay", "0.01"),
        ("--lr-schedule", "cosine"),
        ("--max-grad-norm", "1"),
    ];
    assert!(weights(&named) == default);
    let mut all = vec![default];
    for flag in [
        ("--adam-beta1", "0"),
        ("--adam-beta2", "0.5"),
        ("--adam-eps", "1e-3"),
        ("--weight-decay", "0"),
        ("--max-grad-norm", "0.01"),
        ("--max-grad-norm", "0"),
        ("--lr", "0"),
        ("--min-lr-ratio", "1"),
        ("--warmup-steps", "2"),
        ("--lr-schedule", "linear"),
    ] {
        let changed = weights(&[flag]);
        assert!(
            !all.contains(&changed),
            "{flag:?} gives what another flag gave"
        );
        all.push(changed);
    }
    let wsd = ("--lr-schedule", "wsd");
    assert!(!all.contains(&weights(&[wsd, ("--lr-decay-ratio", "0.7")])));
    // Of three steps a fifth is the last one, whose rate is the highest still.
    let never_falls = weights(&[("--min-lr-ratio", "1")]);
    assert!(weights(&[wsd]) == never_falls);
    assert!(weights(&[("--lr-schedule", "constant")]) == never_falls);
    // 0 is no limit at all, where as large a one as there is scales nothing.
    assert!(weights(&[("--max-grad-norm", "0")]) == weights(&[("--max-grad-norm", "1e300")]));
}

#[test]
fn a_processor_without_tiles_multiplies_with_all_bits_and_says_so() {
    let workspace = Workspace::new();
    let program = workspace.finetune();
    let high = program.clone().flag("--matmul-precision", "high");
    let said = high.succeeds().stderr;
    let file = fs::read_to_string(workspace.output().join("candle_train.toml")).unwrap();
    assert!(file.contains("matmul-precision = \"high\""), "{file}");
    let is_same = said.contains("warning: --matmul-precision high changes nothing");
    let processor = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    assert_eq!(is_same, !processor.contains("amx_bf16"), "{said}");
    let weights = || read_tensors(&workspace.output().join("model.safetensors"));
    let of_high = weights();
    program.switch("--overwrite").succeeds();
    assert!(!is_same || weights() == of_high);
}

#[test]
fn flags_that_would_do_nothing_are_refused() {
    let workspace = Workspace::new();
    let run = workspace.finetune().without("--sample-tokens");
    let nothing = "is given where nothing is sampled";
    for (flags, parts) in [
        (
            vec![("--temperature", "0.7")],
            vec!["--temperature", nothing],
        ),
        (
            vec![("--top-p", "0.7")],
            vec!["--top-p", nothing, "hint: --prompt"],
        ),
        (
            vec![("--sample-tokens", "7")],
            vec!["--sample-tokens", nothing],
        ),
        (
            vec![
                ("--prompt", "a"),
                ("--sample-tokens", "0"),
                ("--top-p", "0.7"),
            ],
            vec!["--top-p", nothing],
        ),
        (
            vec![
                ("--prompt", "a"),
                ("--temperature", "0"),
                ("--top-p", "0.7"),
            ],
            vec!["--top-p is given beside --temperature 0"],
        ),
        (
            vec![("--lr-schedule", "constant"), ("--min-lr-ratio", "0.2")],
            vec!["--min-lr-ratio is given beside --lr-schedule constant"],
        ),
        (
            vec![("--lr-decay-ratio", "0.2")],
            vec!["--lr-decay-ratio is given without --lr-schedule wsd"],
        ),
        (
            vec![("--dtype", "bf16"), ("--matmul-precision", "high")],
            vec!["--matmul-precision is given beside --dtype bf16 or f16"],
        ),
        (
            vec![("--keep", "3")],
            vec!["--keep is given without --save-dir"],
        ),
        (
            vec![("--epochs", "2")],
            vec!["--steps", "cannot be used with"],
        ),
        (
            vec![("--warmup-steps", "2"), ("--warmup-ratio", "0.5")],
            vec!["--warmup-steps", "cannot be used with"],
        ),
        (
            vec![("--half-sums", "native")],
            vec!["--half-sums native", "backend local", "hint: "],
        ),
        (
            vec![("--mpi-reduction", "native")],
            vec![
                "--mpi-reduction",
                "sums over mpi have the bits of threads",
                "leave it out",
            ],
        ),
        (
            vec![("--zero", "0"), ("--zero-group", "2")],
            vec!["zero-group", "ZeRO stage 0"],
        ),
        (
            vec![("--lora-alpha", "8")],
            vec!["--lora-alpha is given without --lora-rank"],
        ),
    ] {
        let run = run.clone().flags(&flags);
        workspace.refuses(&run, &parts);
    }
    let run = workspace.finetune();
    let both = run
        .clone()
        .switch("--no-packing")
        .switch("--no-document-mask");
    workspace.refuses(&both, &["--no-document-mask", "cannot be used with"]);
    workspace.refuses(
        &run.switch("--check-collectives"),
        &["--check-collectives", "threads", "hint: "],
    );
    let pretrain = candle_train("pretrain")
        .flag("--data", workspace.path("text.txt").display())
        .flag("--output", workspace.path("new").display())
        .flag("--tokenizer", workspace.path("model").display());
    workspace.refuses(
        &pretrain.clone().flag("--vocab-size", 300),
        &["--vocab-size", "cannot be used with", "--tokenizer"],
    );
    let short = pretrain.flag("--seq-len", 32).flag("--max-positions", 16);
    workspace.refuses(&short, &["--seq-len 32", "16 tokens"]);
}

/// A message has the beginning and the end of a name, however long that is.
#[test]
fn long_names_do_not_fill_the_screen() {
    let long = "x".repeat(100_000);
    let commands: [&[&str]; 5] = [
        &[&long],
        &["finetune", &format!("--{long}")],
        &["finetune", "--model", &long, "--data", "text.txt"],
        &["preview", "--model", "nowhere", "--data", &long],
        &["launch", "--nproc-per-node", "1", &long],
    ];
    for words in commands {
        let output = Command::new(env!("CARGO_BIN_EXE_candle-train"))
            .args(words)
            .output()
            .unwrap();
        assert!(!output.status.success());
        assert!(output.stderr.len() < 4000, "{:.60?}", words.concat());
    }
}
