//! Sequences that ranks share, from the command line: training, evaluation and samples with each method, resuming on other ranks, and what is refused.

use serde_json::{Value, json};

use super::folder::{edit_json, fixture, read_json};
use super::program::{AssertText, Program};
use super::training::metrics;
use super::workspace::Workspace;

/// Two steps of two sequences on one rank, but for `flags`, of which an empty value stands for a switch.
fn with_flags(workspace: &Workspace, flags: &[(&str, &str)]) -> Program {
    let program = workspace
        .finetune()
        .without("--tp")
        .without("--pp")
        .without("--dp");
    let program = program
        .flag("--global-batch-size", 2)
        .flag("--metrics", workspace.path("metrics.jsonl").display());
    let flags = flags.iter();
    flags.fold(program, |program, (flag, value)| match value.is_empty() {
        true => program.switch(flag),
        false => program.flag(flag, value),
    })
}

/// The same of 37 tokens, with evaluation and a sample.
fn finetune(workspace: &Workspace, flags: &[(&str, &str)]) -> Program {
    let text = workspace.short_text().display().to_string();
    let own = [
        ("--seq-len", "37"),
        ("--eval-data", text.as_str()),
        ("--eval-every", "1"),
        ("--prompt", "The quick brown"),
        ("--sample-tokens", "8"),
        ("--temperature", "0"),
    ];
    with_flags(workspace, &[&own, flags].concat())
}

/// Losses of training, of evaluation, and accuracies.
fn numbers_of(workspace: &Workspace) -> Vec<f64> {
    let lines = metrics(&workspace.path("metrics.jsonl"));
    let of = |name: &str| {
        let of_lines = lines.iter().filter_map(|line| line.get(name)?.as_f64());
        of_lines.collect::<Vec<_>>()
    };
    [
        of("loss"),
        of("eval_loss"),
        of("eval_accuracy"),
        of("num_tokens"),
    ]
    .concat()
}

#[test]
fn ranks_that_share_sequences_train_and_evaluate_as_one() {
    let alone = Workspace::new();
    finetune(&alone, &[]).succeeds();
    let expected = numbers_of(&alone);
    assert!(expected.len() > 6);
    let cases: [(&[(&str, &str)], &str); 5] = [
        (&[("--cp", "2")], "2 ranks share a sequence, by"),
        (&[("--cp", "4"), ("--cp-method", "ring")], "by a ring"),
        (
            &[
                ("--cp", "2"),
                ("--cp-method", "all-gather"),
                ("--zero", "3"),
            ],
            "by all-gather",
        ),
        (
            &[("--cp", "4"), ("--ulysses", "2"), ("--recompute", "full")],
            "Ulysses in groups of 2, in a ring of 2",
        ),
        (
            &[
                ("--cp", "2"),
                ("--tp", "2"),
                ("--pp", "2"),
                ("--sequence-parallel", ""),
            ],
            "cp 2 x tp 2",
        ),
    ];
    for (flags, words) in cases {
        let workspace = Workspace::new();
        let out = finetune(&workspace, flags).succeeds().stdout;
        out.assert_has(&[words]);
        let got = numbers_of(&workspace);
        let pairs = got.iter().zip(&expected);
        let is_close = |(got, want): (&f64, &f64)| (got - want).abs() <= 1e-5 * want.abs();
        assert!(
            got.len() == expected.len() && pairs.clone().all(is_close),
            "{flags:?}: {got:?} {expected:?}"
        );
        for line in metrics(&workspace.path("metrics.jsonl")) {
            let Some(ranks) = line.get("context") else {
                assert!(line.contains_key("eval_loss"), "{line:?}");
                continue;
            };
            let ranks = ranks.as_array().unwrap();
            let sum = |field: &str| -> u64 {
                ranks.iter().map(|rank| rank[field].as_u64().unwrap()).sum()
            };
            assert_eq!(ranks.len().to_string(), flags[0].1);
            // Of two sequences, every query of which sees itself and what is before it.
            assert_eq!(sum("num_rows"), 2 * 37);
            assert_eq!(sum("num_pairs"), 37 * 38);
        }
    }
}

#[test]
fn a_checkpoint_goes_on_with_other_ranks_of_a_sequence() {
    let whole = Workspace::new();
    finetune(&whole, &[("--steps", "4")]).succeeds();
    let expected = numbers_of(&whole);
    let workspace = Workspace::new();
    let saves = workspace.path("saves");
    let saved = saves.display().to_string();
    let flags = [
        ("--cp", "3"),
        ("--cp-method", "ring"),
        ("--steps", "4"),
        ("--save-every", "2"),
        ("--keep", "9"),
        ("--save-dir", &saved),
    ];
    finetune(&workspace, &flags).succeeds();
    let step = saves.join("step-000002").display().to_string();
    let flags = [
        ("--cp", "2"),
        ("--cp-method", "ulysses"),
        ("--zero", "2"),
        ("--steps", "4"),
        ("--resume", &step),
    ];
    let warning = finetune(&workspace, &flags).succeeds_with_warnings().stderr;
    warning.assert_has(&[
        "--cp is 2",
        "--cp-method is ulysses",
        "ring",
        "added in another order",
    ]);
    let last = metrics(&workspace.path("metrics.jsonl"));
    let loss = last
        .iter()
        .rev()
        .find_map(|line| line.get("loss")?.as_f64());
    let (got, want) = (loss.unwrap(), expected[3]);
    assert!((got - want).abs() < 1e-5 * want, "{got} {want}");
}

#[test]
fn sequences_that_cannot_be_shared_are_refused() {
    let workspace = Workspace::new();
    for (flags, words) in [
        (
            &[("--cp", "38")][..],
            &["--cp 38", "37 tokens", "hint: --cp 37"][..],
        ),
        (
            &[("--cp", "4"), ("--ulysses", "3")],
            &[
                "ulysses 3 does not divide cp 4",
                "hint: ulysses 4 (--ulysses 4)",
            ],
        ),
        (
            &[("--cp", "16"), ("--cp-method", "ulysses")],
            &["16", "query heads of a tensor-parallel rank", "(--ulysses"],
        ),
        (
            &[("--cp", "16"), ("--ulysses", "16")],
            &["ulysses 16 is more than", "(--ulysses"],
        ),
        (
            &[("--sequence-parallel", "")],
            &["--sequence-parallel", "--tp 1", "hint: --tp 2"],
        ),
        (
            &[("--cp", "2"), ("--strategy", "parameter-server")],
            &["--cp 2", "parameter-server", "hint"],
        ),
    ] {
        finetune(&workspace, flags).fails(words);
    }
}

#[test]
fn yarn_lengthens_a_model_and_the_output_says_so() {
    let workspace = Workspace::new();
    workspace.edit_config(|config| {
        config["max_position_embeddings"] = 16.into();
        config["rope_parameters"]["rope_theta"] = json!(500.0);
    });
    edit_json(&workspace.model("tokenizer_config.json"), |fields| {
        fields["model_max_length"] = 16.into();
    });
    let longer = |factor: &str| finetune(&workspace, &[("--rope-scaling", factor)]);
    let words = [
        "--seq-len 37",
        "16 tokens",
        "hint: --seq-len 16 at most, or --rope-scaling yarn:3",
    ];
    finetune(&workspace, &[]).fails(&words);
    longer("yarn:2").fails(&["--seq-len 37", "32 tokens", "yarn:3"]);
    for factor in ["yarn:1", "yarn:inf", "yarn:", "4", "linear:4"] {
        longer(factor).fails(&["--rope-scaling", "yarn:4"]);
    }
    longer("yarn:1.01").fails(&["1.01", "16 tokens", "more than 16", "config.json"]);
    let adapter = longer("yarn:3").flag("--lora-rank", 2);
    adapter.fails(&[
        "adapter",
        "\"max_position_embeddings\": 48",
        "\"factor\":3.0",
        "\"rope_theta\":500.0",
    ]);
    let out = longer("yarn:3").flag("--steps", 1).succeeds().stdout;
    out.assert_has(&["lengthened from 16 to 48 tokens by YaRN"]);
    let config = std::fs::read_to_string(workspace.output().join("config.json")).unwrap();
    let config: Value = serde_json::from_str(&config).unwrap();
    assert_eq!(config["max_position_embeddings"], 48);
    let rope = json!({"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 16, "rope_theta": 500.0});
    assert_eq!(
        (&config["rope_scaling"], &config["rope_parameters"]),
        (&rope, &rope)
    );
    let tokenizer = read_json(&workspace.output().join("tokenizer_config.json"));
    assert_eq!(tokenizer["model_max_length"], 48);
    // What is trained is what is written: the output is the same model, to go on with and to lengthen further.
    let first = numbers_of(&workspace);
    workspace.edit_config(|own| {
        for field in ["max_position_embeddings", "rope_scaling", "rope_parameters"] {
            own[field] = config[field].clone();
        }
    });
    finetune(&workspace, &[("--steps", "1")]).succeeds();
    assert_eq!(numbers_of(&workspace), first);
    longer("yarn:2.5").fails(&["2.5", "no fewer than the 48"]);
    let out = longer("yarn:4").flag("--steps", 1).succeeds().stdout;
    out.assert_has(&["lengthened from 16 to 64 tokens"]);
    workspace.edit_config(|config| {
        config["rope_scaling"] = json!({"rope_type": "linear", "factor": 4.0});
    });
    longer("yarn:3").fails(&["scaled already", "linear", "config.json"]);
}

#[test]
fn sequences_of_4437_tokens_train_as_in_pytorch() {
    let reference = metrics(&fixture("long/reference/metrics.jsonl"));
    let workspace = Workspace::with_model("long");
    let scaled = read_json(&workspace.model("config.json"));
    workspace.edit_config(|config| {
        config["max_position_embeddings"] = 1479.into();
        config["rope_parameters"] = json!({"rope_type": "default", "rope_theta": 10000.0});
    });
    let steps = reference.len().to_string();
    let as_in_reference = [
        ("--rope-scaling", "yarn:3"),
        ("--seq-len", "4437"),
        ("--steps", steps.as_str()),
        ("--warmup-steps", "2"),
        ("--min-lr-ratio", "0.1"),
        ("--weight-decay", "0.1"),
        ("--no-shuffle", ""),
    ];
    let ring = [("--cp", "4"), ("--cp-method", "ring")];
    let both = [
        ("--cp", "2"),
        ("--cp-method", "ulysses"),
        ("--tp", "2"),
        ("--sequence-parallel", ""),
    ];
    for flags in [&ring[..], &both] {
        with_flags(&workspace, &[&as_in_reference, flags].concat()).succeeds();
        let lines = metrics(&workspace.path("metrics.jsonl"));
        assert_eq!(lines.len(), reference.len());
        for (line, expected) in lines.iter().zip(&reference) {
            for field in ["loss", "grad_norm"] {
                let (got, want) = (
                    line[field].as_f64().unwrap(),
                    expected[field].as_f64().unwrap(),
                );
                assert!(
                    (got - want).abs() <= 1e-5 * want,
                    "{flags:?}: {field} is {got} instead of {want}"
                );
            }
        }
        let written = read_json(&workspace.output().join("config.json"));
        for field in ["rope_parameters", "max_position_embeddings"] {
            assert_eq!(written[field], scaled[field]);
        }
    }
}
