//! Pipeline schedules from the command line: training, resuming, evaluation and samples with each; the command that shows them.

use std::fs;

use super::folder::read_checkpoint;
use super::program::{AssertText, Program};
use super::training::metrics;
use super::workspace::{Workspace, candle_train};

/// Two steps of four micro-batches on a pipeline of two ranks, in two replicas.
fn pipeline(workspace: &Workspace, flags: &[(&str, &str)]) -> Program {
    let program = workspace.finetune().without("--tp");
    let program = program
        .flag("--global-batch-size", 8)
        .flag("--seq-len", 128)
        .flag("--eval-data", workspace.short_text().display())
        .flag("--eval-every", 1)
        .flag("--prompt", "The quick brown")
        .flag("--sample-tokens", 8)
        .flag("--temperature", 0)
        .flag("--metrics", workspace.path("metrics.jsonl").display());
    program.flags(flags)
}

/// Losses, of training and of evaluation.
fn losses_of(workspace: &Workspace) -> Vec<String> {
    let lines = metrics(&workspace.path("metrics.jsonl"));
    let loss = |name: &str| {
        let of_lines = lines.iter().filter_map(|line| line.get(name));
        of_lines.map(ToString::to_string).collect::<Vec<_>>()
    };
    [loss("loss"), loss("eval_loss")].concat()
}

/// What a run prints of its samples.
fn samples(stdout: &str) -> Vec<&str> {
    let parts = stdout.split("--- ").skip(1);
    parts
        .map(|part| part.split("\n---").next().unwrap())
        .collect()
}

const ALL: [&[(&str, &str)]; 8] = [
    &[("--schedule", "gpipe")],
    &[("--schedule", "1f1b"), ("--virtual-stages", "2")],
    &[("--schedule", "zb-h1"), ("--pipeline-layout", "1,3")],
    &[
        ("--schedule", "zb-h1"),
        ("--virtual-stages", "2"),
        ("--zero", "3"),
    ],
    &[("--schedule", "zb-2p"), ("--pipeline-prefetch", "0")],
    &[("--schedule", "zbv"), ("--pipeline-layout", "0,2,1,1")],
    &[
        ("--schedule", "zbv"),
        ("--zero", "2"),
        ("--recompute", "full"),
    ],
    &[("--schedule", "dualpipev"), ("--pipeline-prefetch", "4")],
];

#[test]
fn every_schedule_trains_evaluates_and_writes_as_1f1b_does() {
    let run = |flags: &[(&str, &str)]| {
        let workspace = Workspace::new();
        let out = pipeline(&workspace, flags).succeeds().stdout;
        let written = samples(&out).join("|");
        let weights = read_checkpoint(&workspace.output());
        let numbers = (losses_of(&workspace), written, weights);
        (workspace, numbers)
    };
    // Stages of ZeRO that add gradients up after each micro-batch have sums of their own.
    let of_1f1b = ["1", "2", "3"].map(|zero| run(&[("--zero", zero)]).1);
    assert_eq!(of_1f1b[0].0.len(), 4);
    assert_eq!(of_1f1b[0].1.split('|').count(), 2, "{}", of_1f1b[0].1);
    for flags in ALL {
        let zero = flags.iter().find(|(flag, _)| *flag == "--zero");
        let zero = zero.map_or(1, |(_, zero)| zero.parse().unwrap());
        let (workspace, got) = run(flags);
        let expected = &of_1f1b[zero - 1];
        assert_eq!((&got.0, &got.1), (&expected.0, &expected.1), "{flags:?}");
        assert!(got.2 == expected.2, "{flags:?}");
        for line in metrics(&workspace.path("metrics.jsonl")) {
            let Some(ranks) = line.get("pipeline") else {
                assert!(line.contains_key("eval_loss"), "{line:?}");
                continue;
            };
            let ranks = ranks.as_array().unwrap();
            assert_eq!(ranks.len(), 2);
            for rank in ranks {
                let idle = rank["idle_share"].as_f64().unwrap();
                assert!((0.0..1.0).contains(&idle), "{line:?}");
                assert!(
                    rank["peak_activations_bytes"].as_u64().unwrap() > 0,
                    "{line:?}"
                );
            }
        }
    }
}

/// The last step of the epoch has too few micro-batches for DualPipeV.
#[test]
fn a_short_last_step_is_no_obstacle() {
    let run = |schedule: &str| {
        let workspace = Workspace::new();
        let program = pipeline(&workspace, &[("--schedule", schedule)]);
        let program = program.without("--steps").without("--dp").flag("--dp", 1);
        let program = program.flag("--epochs", 1).flag("--seq-len", 64);
        program.flag("--global-batch-size", 7).succeeds();
        (losses_of(&workspace), read_checkpoint(&workspace.output()))
    };
    assert!(run("dualpipev") == run("1f1b"));
}

/// Checkpoints move between all schedules and their stages.
#[test]
fn a_run_goes_on_with_another_schedule_to_the_same_bits() {
    let expected = Workspace::new();
    pipeline(&expected, &[("--steps", "4")]).succeeds();
    let weights = read_checkpoint(&expected.output());
    let mut all: Vec<Vec<(&str, &str)>> = ALL.iter().map(|flags| flags.to_vec()).collect();
    all.push(Vec::new());
    for flags in &mut all {
        // Whose sums are others.
        flags.retain(|(flag, _)| *flag != "--zero");
    }
    for (index, first) in all.iter().enumerate() {
        let second = &all[(index + 3) % all.len()];
        let workspace = Workspace::new();
        let saving = |flags: &[(&str, &str)], dir: &str| {
            let program = pipeline(&workspace, flags);
            let program = program.flag("--save-dir", workspace.path(dir).display());
            let program = program.flag("--save-every", 2).flag("--keep", 5);
            program.flag("--steps", 4)
        };
        saving(first, "first").succeeds();
        let checkpoint = workspace.path("first/step-000002");
        let resumed = saving(second, "second").flag("--resume", checkpoint.display());
        resumed.succeeds_with_warnings();
        assert!(
            read_checkpoint(&workspace.output()) == weights,
            "{first:?} {second:?}"
        );
    }
}

#[test]
fn what_a_schedule_does_not_take_is_refused_with_what_it_takes() {
    let workspace = Workspace::new();
    for (flags, parts) in [
        (
            &[("--schedule", "zb-2p"), ("--virtual-stages", "2")][..],
            &[
                "the schedule zb-2p has 1 stage on each rank, got 2",
                "(--virtual-stages 1)",
            ][..],
        ),
        (
            &[("--schedule", "zbv"), ("--virtual-stages", "3")],
            &[
                "the schedule zbv has 2 stages on each rank, got 3",
                "hint: virtual stages 2 (--virtual-stages 2)",
            ],
        ),
        (
            &[("--virtual-stages", "3")],
            &[
                "pp(2) x virtual stages(3) = 6 > number of layers(4)",
                "hint: use pp <= 1, or 2 virtual stages or fewer",
            ],
        ),
        (
            &[
                ("--schedule", "dualpipev"),
                ("--global-batch-size", "16"),
                ("--batch-ramp", "6,2,100"),
            ],
            &[
                "the first steps of --batch-ramp 6,2,100",
                "dualpipev needs two micro-batches for each rank: 4 or more for pp 2, got 3",
            ],
        ),
        (
            &[("--schedule", "dualpipev"), ("--global-batch-size", "6")],
            &[
                "dualpipev needs two micro-batches for each rank: 4 or more for pp 2, got 3",
                "the schedule zbv",
            ],
        ),
        (
            &[("--pipeline-layout", "2,3")],
            &[
                "--pipeline-layout 2,3 has 5 layers in 2 stages; expected the 4 layers of the model in 2 stages",
                "hint: --pipeline-layout 2,2",
            ],
        ),
        (
            &[("--pipeline-layout", "1,1,1,1")],
            &["has 4 layers in 4 stages; expected the 4 layers of the model in 2 stages"],
        ),
        (
            &[("--schedule", "zbv"), ("--pipeline-layout", "2,0,1,1")],
            &["--pipeline-layout 2,0,1,1 has no layers in stage 1; expected 1 or more"],
        ),
        (
            &[("--pipeline-layout", "two")],
            &["expected auto, or a number of layers for each stage"],
        ),
        (
            &[("--virtual-stages", "0")],
            &["expected a whole number >= 1"],
        ),
        (
            &[("--pipeline-prefetch", "-1")],
            &["expected a whole number >= 0"],
        ),
    ] {
        workspace.refuses(&pipeline(&workspace, flags), parts);
    }
}

#[test]
fn the_command_prints_rows_idle_shares_and_peaks() {
    let out = candle_train("schedule").succeeds().stdout;
    out.assert_has(&[
        "1f1b: 4 ranks, 4 stages, 8 micro-batches; a micro-batch takes 1 forward",
        "\nrank 3  3F0 3B0 3F1 3B1",
        "\n0     0          27.3%   4\n",
        "\n3     3          27.3%   1\n",
        "a step takes 33, of which the busiest rank works 24 and waits 9: a bubble of 27.3%",
    ]);
    let interleaved = candle_train("schedule").flag("--schedule", "zb-h1");
    let interleaved = interleaved
        .flag("--virtual-stages", 2)
        .flag("--times", "1,1.5,0.5");
    let out = interleaved.succeeds().stdout;
    out.assert_has(&[
        "a step takes 27, of which",
        "\n0     0,4        11.1%   4\n",
    ]);
}

/// docs/design.md explains a step by a list that the command prints.
#[test]
fn the_list_of_the_documents_is_what_the_command_prints() {
    let design = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/design.md"));
    let design = design.unwrap();
    let list = |rank| {
        let program = candle_train("schedule").switch("--program");
        let program = program.flag("--pp", 2).flag("--dp", 2).flag("--zero", 3);
        let program = program.flag("--layers", 4).flag("--micro-batches", 2);
        program.flag("--rank", rank)
    };
    let printed = list(0).succeeds().stdout;
    design.assert_has(&[&format!("```text\n{printed}```\n")]);
    // The second replica of a stage does the same, the other stage has a head.
    assert_eq!(list(1).succeeds().stdout, printed);
    let other = list(2).succeeds().stdout;
    other.assert_has(&["head.weight", "1F0   Gather", "Norm\n"]);
    list(4).fails(&["--rank is 4; expected one of 4, from 0"]);
}

#[test]
fn a_schedule_that_was_written_is_read_checked_and_drawn() {
    let workspace = Workspace::new();
    let file = workspace.path("mine.csv");
    let schedule = candle_train("schedule").flag("--schedule", "zbv");
    let csv = schedule.clone().switch("--csv").succeeds().stdout;
    assert_eq!(csv.lines().count(), 4);
    csv.assert_begins("0F0,0F1,0F2,0F3,0F4,0F5,0F6,7F0,7I0,7W0,");
    fs::write(&file, &csv).unwrap();
    let check = candle_train("schedule").flag("--check", file.display());
    let picture = workspace.path("mine.svg");
    let outcome = check.clone().flag("-o", picture.display()).succeeds();
    outcome.says(&[&format!("wrote {}\n", picture.display())]);
    let out = outcome.stdout;
    let table = schedule.succeeds().stdout;
    let rows = |text: &str| text.lines().skip(1).map(str::to_string).collect::<Vec<_>>();
    assert_eq!(rows(&out), rows(&table));
    let drawn = fs::read_to_string(&picture).unwrap();
    drawn.assert_has(&["rank 0 (stages 0,7)", "weight", "8 micro-batches"]);
    fs::write(&file, csv.replacen("0F1", "0F0", 1)).unwrap();
    let parts =
        ["mine.csv: the schedule has the forward pass of micro-batch 0 in stage 0 on rank 0"];
    check.fails(&parts);
    fs::write(&file, csv.replacen("0F1", "0G1", 1)).unwrap();
    check.fails(&["mine.csv: row 1, column 2: \"0G1\" is no instruction"]);
    fs::remove_file(&file).unwrap();
    check.fails(&["cannot read the schedule", "mine.csv"]);
    let both = check.flag("--pp", 2);
    both.fails(&["--check", "--pp"]);
    for (flag, value, part) in [
        ("--micro-batches", "0", "expected a whole number >= 1"),
        (
            "--times",
            "1,2",
            "expected three times, each 0 or from 0.001 to 1e9, not all 0",
        ),
        ("--times", "-1,2,1", "expected three times"),
        ("--times", "0,0,0", "expected three times"),
        ("--times", "1,1,inf", "expected three times"),
        (
            "--pp",
            "18446744073709551615",
            "expected 4096 stages or fewer",
        ),
        (
            "--virtual-stages",
            "18446744073709551615",
            "expected 4096 stages or fewer",
        ),
        (
            "--micro-batches",
            "10000000",
            "10000000 micro-batches in each of 4 stages; expected 2097152 or fewer together",
        ),
        (
            "-o",
            "picture.gif",
            "expected a name that ends with .png or .svg",
        ),
    ] {
        let program = candle_train("schedule").flag(flag, value);
        program.fails(&[part]);
    }
}
