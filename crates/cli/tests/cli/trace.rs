//! `--trace`: what every rank does when.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde_json::Value;

use super::program::{AssertText, Program};
use super::workspace::Workspace;

/// An event with a duration; times are in microseconds.
struct Event {
    rank: usize,
    track: u64,
    category: String,
    start: f64,
    end: f64,
    step: u64,
    micro_batch: Option<u64>,
}

/// The events of a trace of so many ranks, in the order of their beginnings, and how far clocks may be apart.
#[track_caller]
fn events(path: &Path, num_ranks: usize) -> (Vec<Event>, f64) {
    let trace: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    let mut names = Vec::new();
    let mut events = Vec::new();
    for event in trace["traceEvents"].as_array().unwrap() {
        let number = |value: &Value| value.as_f64().unwrap();
        match event["ph"].as_str().unwrap() {
            "X" => events.push(Event {
                rank: event["pid"].as_u64().unwrap() as usize - 1,
                track: event["tid"].as_u64().unwrap(),
                category: event["cat"].as_str().unwrap().to_string(),
                start: number(&event["ts"]),
                end: number(&event["ts"]) + number(&event["dur"]),
                step: event["args"]["step"].as_u64().unwrap(),
                micro_batch: event["args"]["micro_batch"].as_u64(),
            }),
            _ => names.push(event["args"]["name"].as_str().unwrap().to_string()),
        }
    }
    for rank in 0..num_ranks {
        let begins = format!("rank {rank} (pp ");
        assert!(names.iter().any(|name| name.starts_with(&begins)));
    }
    events.sort_by(|a, b| a.start.total_cmp(&b.start).then(b.end.total_cmp(&a.end)));
    assert_nested(&events);
    (
        events,
        trace["otherData"]["clock_error_us"].as_f64().unwrap(),
    )
}

/// Events of a track lie within each other or apart, those of communication apart, and waits in what they are part of.
#[track_caller]
fn assert_nested(events: &[Event]) {
    let mut open: BTreeMap<(usize, u64), Vec<&Event>> = BTreeMap::new();
    for event in events {
        let open = open.entry((event.rank, event.track)).or_default();
        // Times are written in nanoseconds.
        while open
            .pop_if(|outer| outer.end < event.start + 1e-3)
            .is_some()
        {}
        if let Some(outer) = open.last() {
            assert!(event.end < outer.end + 1e-3, "{}", event.category);
            assert_ne!(event.category, "communication");
        }
        open.push(event);
    }
}

/// Ranks, steps and micro-batches of a category's events, in order.
fn passes(events: &[Event], category: &str) -> Vec<(usize, u64, u64)> {
    let of = events.iter().filter(|event| event.category == category);
    let of = of.map(|event| (event.rank, event.step, event.micro_batch.unwrap()));
    let mut of: Vec<_> = of.collect();
    of.sort();
    of
}

/// The passes of a rank's step in their order, such as `f0 f1 b0 b1`.
fn order(events: &[Event], rank: usize, step: u64) -> String {
    let of = events
        .iter()
        .filter(|it| (it.rank, it.step) == (rank, step));
    let of = of.filter_map(|it| Some(format!("{}{}", &it.category[..1], it.micro_batch?)));
    of.collect::<Vec<_>>().join(" ")
}

fn weights(workspace: &Workspace) -> Vec<u8> {
    fs::read(workspace.output().join("model.safetensors")).unwrap()
}

#[test]
fn every_pass_is_in_the_trace_in_the_order_of_the_schedule_and_no_bit_changes() {
    let alternating = "f0 b0 f1 b1 f2 b2 f3 b3";
    let warm = "f0 f1 b0 f2 b1 f3 b2 b3";
    let gpipe = "f0 f1 f2 f3 b0 b1 b2 b3";
    for (schedule, zero, orders) in [
        ("1f1b", 1, [warm, alternating]),
        ("gpipe", 2, [gpipe, gpipe]),
        ("1f1b", 3, [warm, alternating]),
    ] {
        let (plain, traced) = (Workspace::new(), Workspace::new());
        let program = |workspace: &Workspace| {
            let program = workspace.finetune().flag("--schedule", schedule);
            let program = program.flag("--zero", zero).flag("--global-batch-size", 8);
            let program = program.flag("--eval-data", workspace.short_text().display());
            program.flag("--eval-every", 1).flag("--steps", 3)
        };
        program(&plain).succeeds();
        let path = traced.path("trace.json");
        let outcome = program(&traced).flag("--trace", path.display()).succeeds();
        outcome.says(&[&format!("the trace of 3 steps is in {}\n", path.display())]);
        assert!(weights(&plain) == weights(&traced), "{schedule} {zero}");

        let (events, clock_error) = events(&path, 8);
        assert_eq!(clock_error, 0.0);
        let expected = (0..8).flat_map(|rank| {
            let steps = (0..3).flat_map(|step| (0..4).map(move |index| (step, index)));
            steps.map(move |(step, index)| (rank, step, index))
        });
        let expected: Vec<_> = expected.collect();
        assert_eq!(passes(&events, "forward"), expected);
        assert_eq!(passes(&events, "backward"), expected);
        for rank in 0..8 {
            for step in 0..3 {
                assert_eq!(order(&events, rank, step), orders[rank / 4], "rank {rank}");
            }
            let count = |category: &str| {
                let of = events.iter().filter(|it| it.rank == rank);
                of.filter(|it| it.category == category).count()
            };
            let counts = ["step", "optimizer", "data"].map(count);
            assert_eq!(counts, [3; 3]);
            // The one after the last step comes when the trace is written.
            assert_eq!(count("evaluation"), 3);
            assert!(count("idle") > 0 && count("idle") <= count("communication"));
        }
        assert_flows(&events, clock_error);
    }
}

/// A micro-batch's forward pass begins on the second of two stages when it has ended on the first one, its backward pass the other way
/// round.
#[track_caller]
fn assert_flows(events: &[Event], clock_error: f64) {
    let half = 1 + events.iter().map(|event| event.rank).max().unwrap();
    let half = half / 2;
    // Each is off from the clock of rank 0.
    let error = 2.0 * clock_error;
    let mut num_compared = 0;
    for category in ["forward", "backward"] {
        let of = events.iter().filter(|event| event.category == category);
        let (firsts, seconds): (Vec<_>, Vec<_>) = of.partition(|event| event.rank < half);
        for first in firsts {
            let pass = (first.rank + half, first.step, first.micro_batch);
            let same = |it: &&&Event| (it.rank, it.step, it.micro_batch) == pass;
            let Some(second) = seconds.iter().find(same) else {
                continue;
            };
            let flows = match category {
                "forward" => first.end <= second.start + error,
                _ => second.end <= first.start + error,
            };
            assert!(flows, "{category} {:?}", first.micro_batch);
            num_compared += 1;
        }
    }
    assert!(num_compared > 0);
}

#[test]
fn a_run_that_goes_on_after_the_steps_says_so_and_leaves_the_trace() {
    let workspace = Workspace::new();
    let path = workspace.path("trace.json");
    let program = workspace.finetune().flag("--trace", path.display());
    let program = program.flag("--save-every", 12);
    let program = program.flag("--save-dir", workspace.path("saves").display());
    program.clone().flag("--steps", 12).succeeds();
    let trace = std::fs::read(&path).unwrap();
    let on = program.flag("--steps", 13).flag("--resume", "latest");
    let outcome = on.switch("--resume-anyway").succeeds_with_warnings();
    outcome.says(&["warning: there will be no trace: the run goes on with step 12"]);
    assert!(std::fs::read(&path).unwrap() == trace);
}

#[test]
fn the_steps_that_are_asked_for_also_with_adapters_and_without_a_pipeline() {
    let workspace = Workspace::new();
    let path = workspace.path("trace.json");
    let program = workspace.finetune().flag("--pp", 1).flag("--dp", 1);
    let program = program.flag("--lora-rank", 2).flag("--steps", 5);
    let program = program.flag("--output", workspace.path("adapter").display());
    let program = program.flag("--trace", path.display());
    let steps = |program: &Program| {
        program.succeeds();
        let (events, _) = events(&path, 2);
        let of = events.iter().filter(|event| event.category == "step");
        let mut of: Vec<_> = of.map(|event| (event.rank, event.step)).collect();
        of.sort();
        of
    };
    let some = program.clone().flag("--trace-steps", "2..4");
    assert_eq!(steps(&some), [(0, 2), (0, 3), (1, 2), (1, 3)]);
    // What is left of them when the run ends; the earlier trace is replaced.
    let last = program.flag("--trace-steps", "4..1000");
    assert_eq!(steps(&last), [(0, 4), (1, 4)]);
    let left = super::folder::names(&workspace.path(""));
    let expected = ["adapter", "model", "output", "text.txt", "trace.json"];
    assert_eq!(left, expected);
}

#[test]
fn a_run_that_diverges_leaves_its_trace() {
    let workspace = Workspace::new();
    let path = workspace.path("trace.json");
    let program = workspace.finetune().flag("--steps", 6).flag("--lr", 1e30);
    let outcome = program.flag("--trace", path.display()).run().exited(2);
    outcome.says(&["the trace of 2 steps is in", "error: step 2 failed"]);
    let (events, _) = events(&path, 8);
    let of = events.iter().filter(|event| event.category == "step");
    assert_eq!(of.count(), 2 * 8);
}

#[test]
fn what_cannot_be_traced_is_an_error_before_any_step() {
    let workspace = Workspace::new();
    for file in ["model/config.json", "text.txt"] {
        let program = workspace.finetune();
        let program = program.flag("--trace", workspace.path(file).display());
        workspace.refuses(&program, &[file, "is no trace of an earlier run", "hint:"]);
    }
    for place in ["missing/trace.json", "model"] {
        let program = workspace.finetune();
        let program = program.flag("--trace", workspace.path(place).display());
        workspace.refuses(&program, &["cannot write the trace", place]);
    }
    let program = workspace.finetune();
    let program = program.flag("--trace", workspace.path("trace.json").display());
    let late = program.clone().flag("--trace-steps", "2..4");
    workspace.refuses(&late, &["--trace-steps 2..4", "the run's 2 steps"]);
    for steps in ["4", "4..4", "5..4", "a..b"] {
        let outcome = program.clone().flag("--trace-steps", steps).run();
        let said = outcome.stderr;
        assert_eq!(outcome.code, Some(2), "{said}");
        said.assert_has(&["two numbers such as 10..20"]);
    }
}

#[cfg(feature = "mpi")]
#[test]
fn processes_have_one_clock() {
    let workspace = Workspace::new();
    let path = workspace.path("trace.json");
    let program = workspace.finetune().flag("--global-batch-size", 8);
    let program = program.flag("--trace", path.display());
    let program = super::processes::under_mpi(program, (2, 2, 1));
    let Some(program) = program else { return };
    let outcome = program.succeeds();
    let said = outcome.stderr.matches("the trace of 2 steps is in").count();
    assert_eq!(said, 1, "{}", outcome.stderr);
    let (events, clock_error) = events(&path, 4);
    assert!(clock_error > 0.0 && clock_error < 1e5, "{clock_error}");
    let expected = 4 * 2 * 4;
    assert_eq!(passes(&events, "backward").len(), expected);
    assert_flows(&events, clock_error);
}
