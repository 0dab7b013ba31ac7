//! `bench_train`: what it counts, in each type and with frozen parameters. `bench_pipeline`: ranks wait as long as a simulation says.
//! `bench_start`: many ranks start as few do.

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
    example("bench_train").flags(&sizes)
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
        ("f16", None, all),
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
        let scale = if dtype == "f16" { 256.0 } else { 1.0 };
        assert_eq!(measured["loss_scale"], scale);
        assert_eq!(measured["skipped_steps"], 0);
        assert_eq!(measured["attention"], "cpu");
        assert!(measured["libraries"].is_null());
        assert_eq!(measured["parameters"], all, "{pattern:?}");
        assert_eq!(measured["trainable_parameters"], trainable, "{pattern:?}");
    }
}

/// What the peak grows by with the number of layers belongs to layers alone.
#[test]
fn a_layer_keeps_what_the_design_says_in_each_mode_and_layout() {
    const TOKENS: usize = 6 * 256;
    let (h, kv, intermediate, heads) = (64, 32, 96, 4);
    let peak = |mode: &str, ([tp, pp, dp, cp], more): ([usize; 4], &str), layers: usize| {
        let sizes = [
            ("--hidden-size", h),
            ("--intermediate-size", intermediate),
            ("--heads", heads),
            ("--kv-heads", 2),
            ("--vocab-size", 50),
            ("--seq-len", 256),
            ("--batch-size", 6),
            ("--steps", 1),
            ("--layers", layers),
            ("--tp", tp),
            ("--pp", pp),
            ("--dp", dp),
            ("--cp", cp),
            // Of several threads it would be chance which ones allocate scratch memory, and in which passes.
            ("--threads", tp * dp * cp),
        ];
        let program = example("bench_train").flag("--recompute", mode);
        let program = match more {
            "" => program,
            more => program.switch(more),
        };
        let program = program.flags(&sizes);
        let measured = measured(program.flag("--device", "cpu"));
        measured["memory"]["activations_peak_bytes"]
            .as_u64()
            .unwrap() as f64
    };
    let divided = |tp| 2 * h + (2 * h + 2 * kv + 2 * intermediate + heads) / tp;
    for (mode, layout, values) in [
        ("none", ([1, 1, 1, 1], ""), divided(1)),
        ("selective", ([1, 1, 1, 1], ""), divided(1)),
        ("full", ([1, 1, 1, 1], ""), h),
        ("none", ([2, 1, 1, 1], ""), divided(2)),
        (
            "none",
            ([2, 1, 1, 1], "--sequence-parallel"),
            divided(1) / 2,
        ),
        ("none", ([1, 2, 1, 1], ""), divided(1)),
        ("none", ([1, 1, 2, 1], ""), divided(1)),
        ("none", ([1, 1, 2, 1], "--zero=2"), divided(1)),
        ("none", ([1, 1, 2, 1], "--zero=3"), divided(1)),
        ("none", ([1, 1, 1, 2], "--cp-method=ring"), divided(1)),
        ("none", ([1, 1, 1, 3], "--cp-method=all-gather"), divided(1)),
        ("none", ([1, 1, 1, 2], "--cp-method=ulysses"), divided(1)),
    ] {
        let ([_, pp, dp, cp], _) = layout;
        let num_tokens = (TOKENS / dp / cp) as f64;
        let (few, many) = (peak(mode, layout, 2), peak(mode, layout, 4));
        let per_layer_and_token = (many - few) / (2 / pp) as f64 / num_tokens;
        let expected = 4.0 * values as f64;
        assert!(
            (per_layer_and_token - expected).abs() < 0.01 * expected,
            "{mode}, {layout:?}: {per_layer_and_token} bytes per layer and token, expected {expected}"
        );
    }
}

#[test]
fn replicas_divide_what_the_stage_of_zero_says() {
    let memory = |zero: u8| {
        let program = bench().flag("--device", "cpu").flag("--batch-size", 2);
        let line = measured(program.flag("--dp", 2).flag("--zero", zero));
        let memory = line["memory"].as_object().unwrap().clone();
        let bytes = move |field: &str| memory[field].as_u64().unwrap();
        (bytes, 4 * line["parameters"].as_u64().unwrap())
    };
    let held = |zero: u8| {
        let (bytes, _) = memory(zero);
        ["weights_bytes", "gradients_bytes", "optimizer_bytes"].map(bytes)
    };
    // Weights as they are; gradients, and all that is divided, in buckets that are padded to 128 values each.
    let (bytes, weights) = memory(0);
    assert_eq!(bytes("weights_bytes"), weights);
    assert_eq!(bytes("gathered_peak_bytes") + bytes("buffers_bytes"), 0);
    let gradients = bytes("gradients_bytes");
    assert_eq!(held(0), [weights, gradients, 2 * gradients]);
    assert_eq!(held(1), [weights, gradients, gradients]);
    assert_eq!(held(2), [weights, gradients / 2, gradients]);
    assert_eq!(held(3), [gradients / 2, gradients / 2, gradients]);
    let (bytes, _) = memory(3);
    assert_eq!(bytes("gathered_bytes"), 0);
    assert!((1..gradients).contains(&bytes("gathered_peak_bytes")));
}

#[test]
fn losses_do_not_depend_on_where_the_optimizer_state_is() {
    let losses = |offload: Option<&str>| {
        let program = bench().flag("--device", "cpu").flag("--dp", 2);
        let program = match offload {
            None => program,
            Some(place) => program.flag("--offload", place),
        };
        let measured = measured(program.flag("--batch-size", 2));
        measured["losses"].clone()
    };
    let file = format!("nvme:{}", std::env::temp_dir().display());
    let want = losses(None);
    assert!(want.is_array());
    assert_eq!(losses(Some("optimizer")), want);
    assert_eq!(losses(Some(&file)), want);
}

#[test]
fn a_pattern_must_leave_something_to_train_and_something_to_freeze() {
    let run = |pattern| bench().flag("--freeze", pattern).run();
    run("model.embed$").assert_error(&["freeze matches none of the 21 parameters", "hint: "]);
    run(".").assert_error(&["--freeze .", "all 21 parameters", "hint: "]);
}

#[test]
fn a_number_of_threads_that_no_machine_has_is_refused() {
    let run = |threads: &str| bench().flag("--threads", threads).run();
    run("1025").assert_error(&["--threads is 1025", "at most 1024"]);
    run("18446744073709551615").assert_error(&["--threads is 18446744073709551615"]);
}

/// What the rows of the profile of `program` say: operation, calls per step, milliseconds per step.
fn profile(program: Program) -> Vec<(String, f64, f64)> {
    let text = program.switch("--profile").succeeds().stderr;
    let rows = text
        .lines()
        .skip_while(|line| !line.starts_with("operation"));
    let row = |line: &str| {
        let cells: Vec<&str> = line.split("  ").filter(|cell| !cell.is_empty()).collect();
        let number = |i: usize| cells[i].trim().parse::<f64>().unwrap();
        match cells.len() {
            4 => (cells[0].to_string(), number(1), number(2)),
            _ => (cells[0].to_string(), 0.0, number(1)),
        }
    };
    rows.skip(1).map(row).collect()
}

#[test]
fn a_profile_on_the_cpu_counts_the_operations_of_the_first_rank() {
    let program = || bench().flag("--device", "cpu").flag("--batch-size", 3);
    for (program, is_halved) in [(program(), false), (program().flag("--tp", 2), true)] {
        let rows = profile(program);
        let calls = |name: &str| {
            let row = rows.iter().find(|row| row.0 == name);
            row.unwrap_or_else(|| panic!("no {name} in {rows:?}")).1
        };
        // 24 tokens; two layers with gate and up each, of width 24.
        let width = if is_halved { 12 } else { 24 };
        assert_eq!(calls(&format!("linear {width}x24x16 f32")), 4.0, "{rows:?}");
        assert_eq!(calls("attention_forward"), 2.0);
        assert_eq!(calls("attention_backward"), 2.0);
        assert!(calls("adamw") >= 1.0);
        let [parts @ .., rest, all] = &rows[..] else {
            panic!("{rows:?}")
        };
        assert_eq!([&*rest.0, &*all.0], ["everything else", "all"]);
        let sum = rest.2 + parts.iter().map(|row| row.2).sum::<f64>();
        // Each row is rounded to a thousandth.
        assert!(
            (sum - all.2).abs() <= 0.001 * rows.len() as f64,
            "{sum} {rows:?}"
        );
    }
}

#[test]
fn losses_and_norms_of_each_step_do_not_depend_on_micro_batches() {
    let run = |size: usize| {
        let program = bench().flag("--device", "cpu").flag("--batch-size", 4);
        measured(program.flag("--steps", 2).flag("--micro-batch-size", size))
    };
    let (whole, parts) = (run(4), run(1));
    assert_eq!(whole["micro_batch_size"], 4);
    assert_eq!(parts["micro_batch_size"], 1);
    for field in ["losses", "grad_norms"] {
        let values = |line: &Value| -> Vec<f64> {
            let values = line[field].as_array().unwrap();
            values.iter().map(|value| value.as_f64().unwrap()).collect()
        };
        let (whole, parts) = (values(&whole), values(&parts));
        // Two steps after two that warm up.
        assert_eq!(whole.len(), 4, "{field}");
        for (whole, parts) in whole.iter().zip(&parts) {
            assert!(
                (whole - parts).abs() <= 1e-5 * whole,
                "{field}: {whole} {parts}"
            );
        }
    }
    let losses = whole["losses"].as_array().unwrap();
    assert!(losses[3].as_f64() < losses[0].as_f64(), "{losses:?}");
}

#[test]
fn a_checkpoint_gives_weights_and_shape() {
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/assets/shakespeare-llama");
    let program = || {
        let program = crate::example("bench_train").flag("--model", model);
        program.flag("--device", "cpu").flag("--seq-len", 8)
    };
    let line = measured(program().flag("--batch-size", 1).flag("--steps", 1));
    assert!(line["parameters"].as_u64().unwrap() > 1_000_000);
    program()
        .flag("--layers", 3)
        .fails(&["--layers", "--model"]);
}

#[test]
fn ranks_of_a_pipeline_wait_as_long_as_the_simulation_says() {
    let (equal, unequal) = ("0.008,0.008,0.008", "0.008,0.010,0.006");
    for (p, m) in [(2, 4), (4, 8), (8, 16)] {
        for (schedule, v, secs, hop, slow) in [
            ("1f1b", 1, equal, 0.0, None),
            ("1f1b", 2, equal, 0.2, None),
            ("zb-h1", 1, unequal, 0.2, None),
            ("zb-h1", 2, equal, 0.0, None),
            ("zbv", 2, equal, 0.2, None),
            ("zb-2p", 1, unequal, 0.0, Some(p - 1)),
            ("dualpipev", 2, equal, 0.0, Some(0)),
            ("gpipe", 1, unequal, 0.2, Some(1)),
        ] {
            let mut program = example("bench_pipeline").flag("--pp", p);
            program = program
                .flag("--micro-batches", m)
                .flag("--schedule", schedule);
            program = program
                .flag("--virtual-stages", v)
                .flag("--hop", hop * 0.008);
            program = program.argument("--stage-secs");
            // A stage that takes 1.5 times as long.
            for stage in 0..p * v {
                program = program.argument(match slow == Some(stage) {
                    true => "0.012,0.012,0.010",
                    false => secs,
                });
            }
            let measured = measured(program);
            let shares = |name: &str| {
                let shares = measured[name].as_array().unwrap().iter();
                shares
                    .map(|share| share.as_f64().unwrap())
                    .collect::<Vec<_>>()
            };
            let (idle, expected) = (shares("idle_share"), shares("simulated_idle_share"));
            assert_eq!((idle.len(), expected.len()), (p, p));
            let mut pairs = idle.iter().zip(&expected);
            assert!(
                pairs.all(|(idle, expected)| (idle - expected).abs() < 0.03),
                "{schedule} with {v} stages on each of {p} ranks, hop {hop}, slow {slow:?}: {measured}"
            );
        }
    }
}

/// With zb-2p the second of two ranks has three micro-batches whose weight gradients wait, when 1f1b has one with its activations. Each keeps inputs and
/// gradients of outputs: at most 8 values of the hidden size and 3 of the MLP's a layer and token, and about as much as the forward pass keeps or more.
#[test]
fn the_meter_counts_what_waiting_weight_gradients_keep() {
    let (hidden, mlp, layers, tokens) = (64, 176, 2, 512);
    let peak = |schedule: &str| {
        let sizes = [
            ("--hidden-size", hidden),
            ("--intermediate-size", mlp),
            ("--layers", 2 * layers),
            ("--vocab-size", 64),
            ("--seq-len", tokens),
            ("--pp", 2),
            ("--batch-size", 6),
            ("--micro-batch-size", 1),
        ];
        let program = bench()
            .flag("--pipeline-layout", "2,2")
            .flag("--device", "cpu");
        let program = program.flag("--kv-heads", 2).flag("--schedule", schedule);
        let program = program.flags(&sizes);
        measured(program)["pipeline"][1]["peak_activations_bytes"]
            .as_u64()
            .unwrap() as f64
    };
    let of_layer = |values: usize| (4 * tokens * (layers * values + hidden)) as f64;
    let (forward, waiting) = (peak("1f1b"), peak("zb-2p"));
    for (measured, formula) in [
        (forward, of_layer(6 * hidden + 2 * mlp)),
        // What three micro-batches wait with.
        (waiting, 3.0 * of_layer(8 * hidden + 3 * mlp)),
    ] {
        let of_formula = measured / formula;
        assert!((0.98..1.05).contains(&of_formula), "{of_formula}");
    }
}

#[test]
fn the_operations_of_all_ranks_are_listed_in_their_order() {
    let name = format!("candle-train-operations-{}", std::process::id());
    let file = std::env::temp_dir().join(name);
    let program = bench().flag("--dp", 2).flag("--zero", 3);
    program
        .flag("--device", "cpu")
        .flag("--operations", file.display())
        .succeeds();
    let text = std::fs::read_to_string(&file).unwrap();
    std::fs::remove_file(&file).unwrap();
    let of = |rank: &str| -> Vec<&str> {
        let lines = text.lines();
        lines.filter_map(|line| line.strip_prefix(rank)).collect()
    };
    let (first, second) = (of("0 "), of("1 "));
    assert_eq!((first.len() % 3, &first), (0, &second), "three steps alike");
    for operation in ["all_gather dp 2 ", "reduce_scatter dp 2 "] {
        let mut all = first.iter();
        assert!(all.any(|line| line.starts_with(operation)), "{first:?}");
    }
}

#[test]
fn one_of_1024_ranks_of_80_layers_starts_within_a_second_and_50_mb() {
    let measured = measured(example("bench_start").flag("--simulated", 1024));
    assert_eq!(measured["ranks"], 1024);
    assert_eq!(measured["num_params"], 3 + 9 * 80);
    assert!(measured["start_secs"].as_f64().unwrap() < 1.0, "{measured}");
    assert!(measured["rank_mb"].as_f64().unwrap() < 50.0, "{measured}");
}

#[test]
fn ranks_as_threads_start_on_every_layout() {
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/assets/shakespeare-llama");
    for (pp, tp) in [(1, 1), (2, 2)] {
        let program = example("bench_start").flag("--model", model);
        let program = program.flag("--pp", pp).flag("--tp", tp).flag("--ranks", 4);
        let measured = measured(program);
        assert_eq!(measured["num_params"], 38);
        assert_eq!(measured["is_simulated"], false);
    }
}
