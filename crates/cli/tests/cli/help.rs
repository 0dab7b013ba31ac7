//! `--help` says what each flag is for, in which unit, and what it is when it is not given.

use std::collections::BTreeMap;

use super::program::AssertText;
use super::workspace::candle_train;

/// What `--help` says about each flag.
fn help(subcommand: &'static str) -> BTreeMap<String, String> {
    let outcome = candle_train(subcommand).switch("--help").succeeds();
    let mut flags = BTreeMap::new();
    let mut name = String::new();
    for line in outcome.stdout.lines() {
        // What follows a flag is indented further.
        let starts = ["      --", "  -h, --", "  -V, --"];
        let is_flag = starts.iter().any(|start| line.starts_with(start));
        let line = line.trim();
        if is_flag {
            let flag = line.split_whitespace().find(|word| word.starts_with("--"));
            name = flag.unwrap_or_default().to_string();
        }
        let text: &mut String = flags.entry(name.clone()).or_default();
        text.push_str(line);
        text.push(' ');
    }
    flags
}

#[track_caller]
fn assert_says(help: &BTreeMap<String, String>, flag: &str, parts: &[&str]) {
    let text = help
        .get(flag)
        .unwrap_or_else(|| panic!("no {flag} in {help:?}"));
    text.assert_has(parts);
}

const TRAINING: &[(&str, &[&str])] = &[
    ("--tp", &["[default: 1]", "RANKS"]),
    ("--pp", &["[default: 1]", "RANKS"]),
    ("--dp", &["[default: what", "REPLICAS"]),
    (
        "--zero",
        &["[default: 1]", "optimizer's state", "gradients", "weights"],
    ),
    (
        "--zero-group",
        &["HSDP", "[default: all replicas]", "REPLICAS"],
    ),
    ("--zero-secondary", &["hpZ", "needs --zero 3"]),
    ("--grad-reduce-dtype", &["[default: f32]", "bf16"]),
    ("--quantize-gradients", &["[default: no]", "int8"]),
    ("--quantize-weights", &["[default: no]", "int8", "--zero 3"]),
    ("--tile-linears", &["[default: 1]", "TILES", "--zero 3"]),
    ("--no-overlap", &["same bits"]),
    (
        "--pack-weights",
        &["[default: auto]", "auto", "on", "off", "same bits"],
    ),
    ("--offload", &["LIST", "nvme:DIR", "same bits"]),
    (
        "--recompute",
        &["[default: none]", "none", "selective", "full"],
    ),
    (
        "--schedule",
        &[
            "[default: 1f1b, or what offloaded weights ask for]",
            "1f1b",
            "gpipe",
            "zb-h1",
            "zb-2p",
            "zbv",
            "dualpipev",
        ],
    ),
    (
        "--virtual-stages",
        &["[default: 1, of zbv and dualpipev 2]", "interleaved"],
    ),
    ("--pipeline-layout", &["[default: auto]", "7,8,8,7"]),
    ("--pipeline-prefetch", &["[default: 1]", "RECEIVES"]),
    (
        "--backend",
        &[
            "[default: local; for one of several processes",
            "mpi",
            "nccl",
        ],
    ),
    ("--check-collectives", &["processes", "rank 0"]),
    ("--half-sums", &["[default: f32]", "native", "nccl"]),
    ("--deterministic", &["same bits", "attention"]),
    (
        "--matmul-precision",
        &["[default: highest]", "high:", "AMX", "TF32"],
    ),
    ("--deadline", &["[default: 600]", "SECONDS"]),
    ("--device", &["[default: cuda", "DEVICE", "cuda:N"]),
    ("--dtype", &["[default: bf16 on GPUs", "bf16", "f16"]),
    ("--bf16", &["--dtype bf16"]),
    ("--fp16", &["--dtype f16"]),
    (
        "--freeze",
        &["[default: none]", "PATTERN", "regular expression"],
    ),
    (
        "--per-device-train-batch-size",
        &[
            "--micro-batch-size",
            "--gradient-accumulation-steps",
            "SEQUENCES",
        ],
    ),
    ("--global-batch-size", &["[default: 16, or", "SEQUENCES"]),
    ("--gradient-accumulation-steps", &["--global-batch-size"]),
    ("--seq-len", &["[default: ", "TOKENS"]),
    (
        "--steps",
        &[
            "[default: as many as --epochs takes]",
            "in place of --epochs",
            "0: ",
        ],
    ),
    ("--max-secs", &["[default: never]", "SECONDS", "save"]),
    ("--epochs", &["[default: 3]", "PASSES"]),
    ("--no-shuffle", &["order of the data"]),
    ("--seed", &["[default: 0]"]),
    ("--lr", &["[default: ", "learning-rate"]),
    (
        "--lr-schedule",
        &["[default: cosine]", "linear", "constant", "wsd"],
    ),
    ("--lr-decay-ratio", &["[default: 0.2]", "wsd"]),
    ("--min-lr-ratio", &["[default: 0.1]", "FRACTION"]),
    ("--warmup-ratio", &["[default: 0.03]", "FRACTION"]),
    ("--warmup-steps", &["STEPS", "in place of --warmup-ratio"]),
    ("--weight-decay", &["[default: "]),
    (
        "--adam-beta1",
        &["[default: 0.9]", "average of the gradients"],
    ),
    ("--adam-beta2", &["[default: 0.95]", "squared gradients"]),
    ("--adam-eps", &["[default: 1e-8]", "EPSILON"]),
    ("--max-grad-norm", &["[default: 1]", "NORM", "0: never"]),
    (
        "--loss-scale-init",
        &["[default: 256]", "SCALE", "power of two", "halves"],
    ),
    (
        "--loss-scale-window",
        &["[default: 2000]", "STEPS", "double"],
    ),
    (
        "--metrics",
        &[
            "[default: none]",
            "step, loss, grad_norm, learning_rate, loss_scale, skipped_steps, padding (the fraction of positions without a token), num_tokens, tokens_per_sec, step_secs, gflops_per_sec",
        ],
    ),
    (
        "--tensorboard",
        &["[default: none]", "DIR", "TensorBoard", "resumed"],
    ),
    (
        "--trace",
        &[
            "[default: none]",
            "FILE",
            "Perfetto",
            "candle-train timeline",
        ],
    ),
    (
        "--trace-steps",
        &["[default: the first 10 of the run]", "FIRST..END", "from 0"],
    ),
    ("--overwrite", &["earlier run of the same command", "never"]),
    (
        "--rescue-dir",
        &["DIR", "[default: beside the folder of the checkpoints"],
    ),
    (
        "--save-every",
        &[
            "[default: where the run is stopped only]",
            "STEPS",
            "--save-dir",
        ],
    ),
    ("--save-dir", &["[default: none]", "step-000015"]),
    ("--keep", &["[default: 2]", "newest"]),
    ("--resume", &["DIR|latest", "any layout", "--save-dir"]),
    ("--resume-anyway", &["other data"]),
    (
        "--chat-template-kwargs",
        &["[default: none]", "enable_thinking", "apply_chat_template"],
    ),
    ("--overlong", &["[default: truncate]", "drop"]),
    ("--no-packing", &["padding"]),
    ("--no-document-mask", &["other records"]),
    ("--train-on-prompt", &["completions"]),
    ("--mask-history", &["last message", "--train-on-prompt"]),
    ("--keep-argument-strings", &["JSON", "transformers"]),
    ("--prompt", &["[default: ", "TEXT"]),
    (
        "--sample-tokens",
        &["[default: 80]", "TOKENS", "0: no samples"],
    ),
    ("--temperature", &["[default: 0.5]"]),
    ("--top-p", &["[default: 0.9]"]),
];

#[test]
fn finetune_explains_its_flags() {
    let help = help("finetune");
    for (flag, parts) in TRAINING {
        assert_says(&help, flag, parts);
    }
    assert_says(&help, "--model", &["org/name[@revision]", "\"qwen3\""]);
    assert_says(
        &help,
        "--data",
        &["PATH[:WEIGHT]", "hub://datasets", "messages"],
    );
    for (flag, default) in [
        ("--lr", "2e-5, of adapters 2e-4"),
        ("--weight-decay", "0.01"),
        ("--micro-batch-size", "1"),
    ] {
        assert_says(&help, flag, &[&format!("[default: {default}]")]);
    }
    assert_says(&help, "--output", &["[default: finetuned]", "output-dir"]);
    for (flag, parts) in [
        (
            "--lora-rank",
            &["RANK", "peft", "[default: train the weights]"][..],
        ),
        ("--lora-alpha", &["[default: 16]"]),
        ("--lora-dropout", &["PROBABILITY", "[default: 0]"]),
        ("--lora-targets", &["NAMES", "[default: all-linear]"]),
        ("--rslora", &["√rank"]),
        ("--adapter", &["DIR", "[default: none]"]),
        (
            "--base-dtype",
            &["bf16", "q8_0", "q4k", "[default: --dtype]"],
        ),
    ] {
        assert_says(&help, flag, parts);
    }
    assert_says(
        &help,
        "--save-dtype",
        &[
            "[default: each tensor's own in the input checkpoint]",
            "bf16",
        ],
    );
}

#[test]
fn merge_explains_its_flags() {
    let help = help("merge");
    assert_says(&help, "--model", &["org/name[@revision]"]);
    assert_says(&help, "--adapter", &["peft"]);
    assert_says(&help, "--save-dtype", &["[default: each tensor's own"]);
    assert_says(&help, "--overwrite", &["--output"]);
}

#[test]
fn pretrain_explains_its_flags() {
    let help = help("pretrain");
    for (flag, parts) in TRAINING {
        assert_says(&help, flag, parts);
    }
    for (flag, default) in [
        ("--lr", "0.001"),
        ("--weight-decay", "0.1"),
        ("--seq-len", "128"),
    ] {
        assert_says(&help, flag, &[&format!("[default: {default}]")]);
    }
    assert_says(&help, "--output", &["[default: pretrained]"]);
    assert_says(
        &help,
        "--tokenizer",
        &["[default: a byte-level BPE is trained on the data]"],
    );
    assert_says(&help, "--vocab-size", &["[default: 1024]", "TOKENS"]);
    assert_says(&help, "--hidden-size", &["[default: 192]"]);
    assert_says(&help, "--intermediate-size", &["[default: 512]"]);
    assert_says(&help, "--layers", &["[default: 4]"]);
    assert_says(&help, "--heads", &["[default: 6]"]);
    assert_says(&help, "--kv-heads", &["[default: 2]"]);
    assert_says(&help, "--max-positions", &["[default: 512,", "TOKENS"]);
    assert_says(&help, "--untied", &["own weight"]);
    assert_says(&help, "--save-dtype", &["[default: f32]"]);
}

#[test]
fn a_short_help_has_the_flags_of_a_first_run_and_an_example() {
    for (subcommand, num_own) in [("finetune", 0), ("train", 0), ("sft", 0), ("pretrain", 0)] {
        let said = candle_train(subcommand).switch("-h").succeeds().stdout;
        let flags = said.lines().filter(|line| line.starts_with("      --"));
        let flags = flags.filter(|line| !line.contains("--help") && !line.contains("--version"));
        assert_eq!(flags.count(), 25 + num_own, "{said}");
        for part in [
            "Example",
            "candle-train",
            "--help has all flags",
            "--epochs",
            "[default: 2e-5, of",
        ] {
            assert!(
                said.contains(part) || subcommand == "pretrain",
                "{part}: {said}"
            );
        }
        assert!(
            said.lines().all(|line| line.chars().count() <= 110),
            "{said}"
        );
        assert!(!said.contains("--half-sums"));
    }
    let all = candle_train("finetune").switch("--help").succeeds().stdout;
    assert!(all.lines().all(|line| line.chars().count() <= 110), "{all}");
    // What people look for comes before what a cluster needs.
    let place = |heading: &str| all.find(&format!("\n{heading}:")).unwrap();
    let order = [
        "Adapters",
        "Batches",
        "Optimizer",
        "Evaluation",
        "Checkpoints",
        "Layout",
        "Ranks",
    ];
    assert!(order.is_sorted_by_key(|heading| place(heading)), "{all}");
}
