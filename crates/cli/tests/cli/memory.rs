//! The memory that a run says it will need, beside what it then held.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use candle_ops::ProductChoice;

use super::program::{AssertText, Program};
use super::workspace::{Workspace, candle_train};

/// How far apart they may be, and how many KiB: what is too small to matter.
const TOLERANCE: f64 = 0.15;
const NEGLIGIBLE_KIB: f64 = 200.0;

/// The numbers of a line, in KiB.
fn numbers(stdout: &str, beginning: &str) -> BTreeMap<String, f64> {
    let line = stdout.lines().find_map(|line| line.strip_prefix(beginning));
    let line = line.unwrap_or_else(|| panic!("{beginning:?} is not in {stdout}"));
    let number = |part: &str| {
        let words: Vec<&str> = part.split(' ').collect();
        let unit = match words[2] {
            "bytes" => 1.0 / 1024.0,
            "KiB" => 1.0,
            "MiB" => 1024.0,
            unit => panic!("{unit}"),
        };
        (
            words[0].to_string(),
            words[1].parse::<f64>().unwrap() * unit,
        )
    };
    line.split(", ").map(number).collect()
}

fn run(workspace: &Workspace) -> Program {
    let assets = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/assets");
    candle_train("finetune")
        .flag("--model", assets.join("shakespeare-llama").display())
        .flag("--data", workspace.path("text.txt").display())
        .flag("--output", workspace.path("new").display())
        // A buffer that a thread keeps from its first product on makes the step in whose last passes it comes seem to hold less.
        .flag("--steps", 2)
        .flag("--seq-len", 64)
        .flag("--micro-batch-size", 1)
        .flag("--global-batch-size", 8)
}

#[test]
fn more_memory_than_there_is_is_told_before_anything_is_held() {
    let workspace = Workspace::new();
    for dry_run in [true, false] {
        let mut program = candle_train("pretrain")
            .flag("--data", workspace.path("text.txt").display())
            .flag("--output", workspace.path("new").display())
            .flag("--hidden-size", 800_000)
            .flag("--heads", 80)
            .flag("--steps", 1);
        if dry_run {
            program = program.switch("--dry-run");
        }
        let outcome = program.run();
        let said = outcome.stderr;
        // Starting it again would not help.
        assert_eq!(outcome.code, Some(2), "{said}");
        said.assert_has(&[
            "error: this run needs ",
            " GiB in all, swap included\nhint: a shorter --seq-len",
        ]);
        assert!(!workspace.path("new").exists());
    }
    // More than a step has of sequences takes nothing.
    let many = 10_000_000;
    let program = workspace.finetune_by_default().flag("--steps", 1);
    let program = program.flag("--seq-len", 64).flag("--dp", 1);
    let program = program.flag("--micro-batch-size", many);
    program.flag("--global-batch-size", many).succeeds();
}

#[test]
fn an_end_for_want_of_memory_says_what_takes_less() {
    let workspace = Workspace::new();
    let limit = "ulimit -v 5000000; exec \"$0\" \"$@\"";
    let outcome = candle_train("pretrain")
        .under(["sh", "-c", limit].map(String::from).into())
        .flag("--data", workspace.path("text.txt").display())
        .flag("--output", workspace.path("new").display())
        .flag("--hidden-size", 8_000)
        .flag("--heads", 80)
        .flag("--steps", 1)
        .run();
    // Killed by its own signal.
    assert_eq!(outcome.code, None, "{}", outcome.stderr);
    outcome.says(&[
        "error: there is no memory for ",
        "hint: a shorter --seq-len",
    ]);
}

/// The processor decides which weights stay packed, and the environment variable holds for a whole process.
#[test]
fn in_each_way_of_multiplying() {
    let possible = ProductChoice::ALL.into_iter();
    for choice in possible.filter(|choice| choice.is_possible()) {
        let output = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "cli::lora::a_base_in_fewer_bits_takes_less_memory_and_nearly_the_same_losses",
                "cli::memory::the_memory_of_packed_weights_is_expected",
            ])
            .env("CANDLE_TRAIN_PRODUCTS", choice.to_string())
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(
            said.contains("test result: ok. 2 passed"),
            "{choice}: {said}"
        );
    }
}

#[test]
fn the_memory_of_packed_weights_is_expected() {
    assert_expected(&[
        "--pack-weights on --lora-rank 8 --global-batch-size 2 --steps 4",
        "--pack-weights on --bf16 --freeze layers.[01] --global-batch-size 2 --steps 4",
    ]);
}

#[test]
fn the_memory_that_is_expected_is_what_is_held() {
    assert_expected(&[
        "",
        "--recompute full",
        "--pp 2 --tp 2",
        "--pp 2 --schedule gpipe",
        "--cp 2 --cp-method ring",
        "--cp 2 --cp-method ulysses --zero 3",
        "--tp 2 --sequence-parallel",
        "--dp 2 --zero 0",
        "--dp 2 --zero 1",
        "--dp 2 --zero 2",
        "--dp 2 --zero 3",
        "--dp 2 --zero 3 --pp 2 --recompute full",
        "--dp 2 --zero 3 --tile-linears 4",
        "--dp 4 --zero 3 --zero-group 2",
        "--dp 2 --zero 1 --bf16",
        "--dp 2 --zero 3 --bf16 --tp 2",
        "--dp 2 --zero 2 --quantize-gradients int8",
        "--dp 4 --zero 3 --zero-secondary 2 --quantize-gradients int4",
        "--dp 2 --zero 2 --no-overlap",
        "--freeze embed_tokens|layers.[01]",
        "--lora-rank 8",
        "--lora-rank 8 --lora-targets layers.3.self_attn.q_proj",
        "--lora-rank 8 --dp 2 --zero 3 --base-dtype bf16",
        "--lora-rank 8 --base-dtype q8_0",
    ]);
}

/// Compares what runs with these flags expect with what they hold.
fn assert_expected(all_flags: &[&str]) {
    let workspace = Workspace::new();
    let mut wrong = Vec::new();
    for flags in all_flags {
        let mut words = flags.split(' ').filter(|word| !word.is_empty()).peekable();
        let mut program = run(&workspace);
        while let Some(flag) = words.next() {
            program = match words.next_if(|word| !word.starts_with("--")) {
                Some(value) => program.flag(flag, value),
                None => program.switch(flag),
            };
        }
        let stdout = program.switch("--overwrite").succeeds().stdout;
        let expected = numbers(&stdout, "memory of the largest rank, expected: ");
        let held = numbers(&stdout, "memory of the largest rank: ");
        for name in expected.keys().chain(held.keys()) {
            let [expected, held] =
                [&expected, &held].map(|all| all.get(name).copied().unwrap_or(0.0));
            let difference = (expected - held).abs();
            if difference > TOLERANCE * held && difference > NEGLIGIBLE_KIB {
                wrong.push(format!(
                    "{flags}: {name} {expected:.0} KiB are expected, {held:.0} were held"
                ));
            }
        }
    }
    wrong.dedup();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
