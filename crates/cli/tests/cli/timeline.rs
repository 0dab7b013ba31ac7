//! `candle-train timeline`.

use std::collections::BTreeSet;
use std::fs;
use std::process::{Command, Output};

use serde_json::{Value, json};
use tempfile::TempDir;

use super::program::AssertText;

/// A trace of two ranks and steps 4 to 7, the last of which rank 1 has not done; times are in milliseconds.
fn trace() -> Value {
    let mut events = Vec::new();
    for rank in 0..2 {
        let name = format!("rank {rank} (pp {rank}, dp 0, tp 0)");
        events.push(json!({"ph": "M", "pid": rank + 1, "tid": rank + 1, "name": "process_name", "args": {"name": name}}));
        for step in 4..8 - rank {
            let zero = 1000.0 * step as f64;
            let mut add = |cat: &str, start: f64, end: f64, args: Value| {
                let (ts, dur) = ((zero + start) * 1e3, (end - start) * 1e3);
                events.push(json!({"ph": "X", "pid": rank + 1, "tid": rank + 1, "cat": cat, "name": cat, "ts": ts, "dur": dur, "args": args}));
            };
            let of_step = json!({"step": step});
            add("step", 0.0, 90.0 + step as f64, of_step.clone());
            let pass = json!({"step": step, "micro_batch": 41});
            add("forward", 10.0, 30.0, pass.clone());
            add("idle", 25.0, 30.0, of_step.clone());
            add("backward", 30.0, 80.0, pass);
            add("optimizer", 80.0, 85.0, of_step.clone());
            add("communication", 20.0, 30.0, of_step);
        }
    }
    json!({"otherData": {"candle_train_trace": 1, "num_ranks": 2}, "traceEvents": events})
}

fn folder(trace: &Value) -> TempDir {
    let dir = TempDir::new().unwrap();
    fs::write(dir.path().join("trace.json"), trace.to_string()).unwrap();
    dir
}

fn timeline(dir: &TempDir, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_candle-train"));
    let command = command.arg("timeline").args(args).current_dir(dir.path());
    command.output().unwrap()
}

#[track_caller]
fn svg(dir: &TempDir, args: &[&str]) -> String {
    let args = [&["trace.json", "-o", "step.svg"], args].concat();
    let output = timeline(dir, &args);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && said.is_empty(), "{said}");
    assert_eq!(output.stdout, b"wrote step.svg\n");
    fs::read_to_string(dir.path().join("step.svg")).unwrap()
}

#[test]
fn ranks_categories_shares_and_micro_batches_have_their_text() {
    let dir = folder(&trace());
    // Of steps 5 and 6, which both ranks have done after the first one, the longer one.
    let picture = svg(&dir, &[]);
    for text in [
        "Step 6: 96 ms",
        "rank 0 (pp 0, dp 0, tp 0)",
        "rank 1 (pp 1, dp 0, tp 0)",
        "backward",
        "41",
        // 15, 50 and 5 of 96 ms; 10 in flight, 5 of them while the rank was not idle.
        "15.6%",
        "52.1%",
        "5.2%",
        "10.4%",
    ] {
        assert!(
            picture.contains(&format!("\n{text}\n")),
            "{text}: {picture}"
        );
    }
    assert!(!picture.contains("evaluation"), "{picture}");
    let picture = svg(&dir, &["--step", "5"]);
    picture.assert_has(&["\nStep 5: 95 ms\n"]);
    // One is replaced by the next one, and nothing is left beside it.
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
}

#[test]
fn a_png_has_the_colours_of_the_categories() {
    let dir = folder(&trace());
    let output = timeline(&dir, &["trace.json", "-o", "step.png"]);
    assert!(output.status.success());
    let file = fs::File::open(dir.path().join("step.png")).unwrap();
    let decoder = png::Decoder::new(std::io::BufReader::new(file));
    let mut reader = decoder.read_info().unwrap();
    let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
    reader.next_frame(&mut pixels).unwrap();
    let colors: BTreeSet<&[u8]> = pixels.chunks(3).collect();
    for color in [
        [0x3b, 0x76, 0xc4],
        [0x2a, 0x9d, 0x78],
        [0x8b, 0x5f, 0xbf],
        [0xd9, 0xdd, 0xe3],
        [0xe0, 0x7b, 0x1f],
    ] {
        assert!(colors.contains(&color[..]), "{color:?}");
    }
}

#[test]
fn what_cannot_be_drawn() {
    let dir = folder(&trace());
    let write = |name: &str, text: &str| fs::write(dir.path().join(name), text).unwrap();
    write("metrics.jsonl", "{\"step\":0,\"loss\":1.5}\n");
    write("other.json", "{\"traceEvents\":[]}");
    write("list.json", "[]");
    write("cut.json", &trace().to_string()[..500]);
    let mut changed = trace();
    changed["otherData"]["candle_train_trace"] = 2.into();
    write("new.json", &changed.to_string());
    changed = trace();
    changed["otherData"]["num_ranks"] = 3.into();
    write("part.json", &changed.to_string());
    changed = trace();
    changed["traceEvents"].as_array_mut().unwrap().truncate(1);
    changed["otherData"]["num_ranks"] = 1.into();
    write("empty.json", &changed.to_string());
    changed = trace();
    changed["traceEvents"][1]["dur"] = (-1).into();
    write("back.json", &changed.to_string());
    for (args, parts) in [
        (
            &["trace.json", "-o", "step.pdf"][..],
            &["step.pdf", ".png or .svg"][..],
        ),
        (&["nowhere", "-o", "step.png"], &["nowhere", "No such file"]),
        (
            &["trace.json", "-o", "step.png", "--step", "7"],
            &["trace.json has no step 7; it has steps 4 to 6"],
        ),
        (
            &["metrics.jsonl", "-o", "step.png"],
            &["metrics.jsonl is no trace that --trace has written"],
        ),
        (
            &["other.json", "-o", "step.png"],
            &["other.json is no trace", "otherData"],
        ),
        (&["list.json", "-o", "step.png"], &["list.json is no trace"]),
        (&["cut.json", "-o", "step.png"], &["cut.json is no trace"]),
        (&["new.json", "-o", "step.png"], &["version 2"]),
        (
            &["part.json", "-o", "step.png"],
            &["events of 2 ranks; expected those of 3"],
        ),
        (
            &["empty.json", "-o", "step.png"],
            &["no step that all ranks have done"],
        ),
        (
            &["back.json", "-o", "step.png"],
            &["back.json is no trace", "lasts -1"],
        ),
        (
            &["trace.json", "-o", "no/step.png"],
            &["cannot write no/step.png"],
        ),
    ] {
        let output = timeline(&dir, args);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.starts_with("error: "), "{said}");
        said.assert_has(parts);
        assert!(!dir.path().join("step.png").exists());
    }
}
