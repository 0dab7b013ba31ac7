//! Training on a GPU: what it tells, where its time goes, and what it says when memory runs out. The GPU is the emulated one
//! (`scripts/emulated-gpu.sh`), whose memory can be made small; without it the tests say so and pass.

use serde_json::Value;

use crate::example;
use crate::program::Program;

fn bench() -> Program {
    let sizes = [
        ("--hidden-size", 16),
        ("--intermediate-size", 24),
        ("--layers", 2),
        ("--heads", 2),
        ("--kv-heads", 1),
        ("--vocab-size", 50),
        ("--seq-len", 8),
    ];
    let program = example("bench_train").flag("--device", "cuda");
    program.flags(&sizes)
}

/// What a run on the emulated GPU measures; `None` if there is no such GPU.
fn measured(program: &Program) -> Option<Value> {
    let outcome = program.run();
    let line: Option<Value> = serde_json::from_str(&outcome.stdout).ok();
    let is_emulated = |line: &Value| line["device"] == "Emulated GPU";
    let line = line.filter(is_emulated);
    if line.is_none() {
        let is_required = std::env::var("CANDLE_TRAIN_REQUIRE_CUDA").is_ok_and(|v| v == "1");
        assert!(!is_required, "{}", outcome.stderr);
        eprintln!("not tested: there is no emulated GPU");
    }
    line
}

#[test]
fn a_step_tells_the_gpu_its_peak_memory_and_the_share_of_its_speed() {
    let program = bench().flag("--steps", 1).flag("--dtype", "bf16");
    let program = program.flag("--peak-tflops", 1);
    let Some(line) = measured(&program) else {
        return;
    };
    assert_eq!(line["attention"], "own");
    let libraries = line["libraries"].as_str().unwrap();
    assert!(libraries.starts_with("CUDA 13."), "{libraries}");
    assert!(libraries.contains("cuBLAS 13."), "{libraries}");
    // Products: all weights but the norms' and the embedding, 6 operations each; attention 6 · layers · width · tokens.
    let weights = 2 * (2 * 16 * 16 + 2 * 8 * 16 + 3 * 16 * 24) + 50 * 16;
    let flops = f64::from(6 * weights + 6 * 2 * 16 * 8);
    assert_eq!(line["flops_per_token"], flops);
    let expected = line["tokens_per_sec"].as_f64().unwrap() * flops / 1e12;
    assert!((line["mfu"].as_f64().unwrap() - expected).abs() < 1e-6 * expected);
    // Weights and what completes their masters of 2 bytes each, gradients and two moments of 4.
    let parameters = line["parameters"].as_u64().unwrap();
    assert!(line["peak_device_bytes"].as_u64().unwrap() > 16 * parameters);
    // Between steps nothing else is left there but what operations keep to use again, and the GPU has no more in use.
    let bytes = |field: &str| line[field].as_u64().unwrap();
    let meter = ["weights_bytes", "gradients_bytes", "optimizer_bytes"];
    let meter: u64 = meter
        .map(|field| line["memory"][field].as_u64().unwrap())
        .iter()
        .sum();
    let device = bytes("device_bytes");
    assert!(
        device >= meter && device < bytes("peak_device_bytes"),
        "{line}"
    );
    assert!(bytes("device_in_use_bytes") >= device, "{line}");
    // By the GPU's clock: parts of a step, which takes no less.
    let parts = ["forward_secs", "backward_secs", "optimizer_secs"];
    let parts = parts.map(|part| line[part].as_f64().unwrap());
    assert!(parts.iter().all(|secs| *secs > 0.0), "{parts:?}");
}

#[test]
fn a_profile_of_a_gpu_names_the_operations_of_a_step() {
    let program = bench().flag("--steps", 3).switch("--profile");
    if measured(&program).is_none() {
        return;
    }
    let table = program.run().stderr;
    // Two layers of seven weights each, and the head; products of different shapes have rows of their own. The backward pass
    // computes SwiGLU's output again.
    for (op, calls) in [("linear_weight_grad_into", 15.0), ("swiglu_forward", 4.0)] {
        let rows = table.lines().filter(|line| line.starts_with(op));
        let of_row = |row: &str| -> f64 {
            // The name, calls, milliseconds and percent of a step.
            let calls = row.split_whitespace().rev().nth(2);
            calls.unwrap().parse().unwrap()
        };
        assert_eq!(rows.map(of_row).sum::<f64>(), calls, "{op} in {table}");
    }
    assert!(table.contains("everything else"), "{table}");
}

/// How often the host waits for a GPU, or may, in a run of this many steps after the two that warm up.
fn num_waits(program: &Program, steps: usize) -> usize {
    let program = program.clone().flag("--steps", steps);
    let outcome = program.variable("EMULATED_GPU_WAITS", 1).run();
    let lines = outcome.stderr.lines();
    let num_waits = lines.filter(|line| line.contains("the host waits")).count();
    assert!(num_waits > 0, "{}", outcome.stderr);
    num_waits
}

#[test]
fn a_step_waits_for_the_loss_and_for_what_ranks_must_have_alike() {
    // Each rank waits for the loss; where ranks share a replica, also for the comparison of what they are given; where they hold copies of
    // parameters, also for the gradients of these.
    for (layout, waits_of_rank) in [
        (vec![], 1),
        (vec![("--dp", 2)], 1),
        (vec![("--pp", 2)], 2),
        (vec![("--tp", 2)], 3),
    ] {
        let num_ranks = 1 + layout.len();
        for dtype in ["f32", "bf16"] {
            let program = bench().flag("--dtype", dtype).flag("--batch-size", 4);
            let program = program.flags(&layout);
            let Some(line) = measured(&program.clone().flag("--steps", 1)) else {
                return;
            };
            // Of the step before, by the GPUs' own clocks.
            let pipeline = line["pipeline"].as_array().unwrap();
            let idle = pipeline.iter().map(|rank| rank["idle_share"].as_f64());
            assert!(
                idle.flatten()
                    .filter(|idle| (0.0..1.0).contains(idle))
                    .count()
                    == pipeline.len(),
                "{line}"
            );
            let is_pipeline = layout.contains(&("--pp", 2));
            assert_eq!(pipeline.len(), if is_pipeline { 2 } else { 0 });
            let per_step = num_waits(&program, 2) - num_waits(&program, 1);
            assert_eq!(per_step, waits_of_rank * num_ranks, "{dtype}, {layout:?}");
        }
    }
}

#[test]
fn a_gpu_without_memory_says_what_holds_it() {
    let program = bench().flag("--steps", 1);
    let Some(line) = measured(&program) else {
        return;
    };
    // Weights, gradients and moments take 16 bytes a parameter: 20 leave too little for the activations.
    let parameters = line["parameters"].as_u64().unwrap();
    let in_step = program
        .clone()
        .variable("EMULATED_GPU_BYTES", 20 * parameters);
    in_step.fails(&[
        "step 1 failed",
        "CUDA_ERROR_OUT_OF_MEMORY",
        "Emulated GPU",
        "this rank: weights",
        "gradients",
        "optimizer",
        "--seq-len",
    ]);
    // Not enough for the moments.
    let in_optimizer = program
        .clone()
        .variable("EMULATED_GPU_BYTES", 10 * parameters);
    in_optimizer.fails(&[
        "the optimizer's state",
        "CUDA_ERROR_OUT_OF_MEMORY",
        "this rank: weights",
        "--dp with --zero 3",
    ]);
    // The first weight, the embedding, has 50 * 16 values of 4 bytes, twice while it becomes a parameter.
    for (bytes, size) in [(3000, "2.9 KiB"), (5000, "4.9 KiB")] {
        let in_weights = program.clone().variable("EMULATED_GPU_BYTES", bytes);
        in_weights.fails(&[
            "putting parameter model.",
            "bytes",
            "CUDA_ERROR_OUT_OF_MEMORY",
            &format!("Emulated GPU: {size} in all"),
            "this rank: nothing but weights so far",
            "hint: --dtype bf16, --dp with --zero 3, --offload params --offload-dir DIR, --tp and --pp",
        ]);
    }
}
