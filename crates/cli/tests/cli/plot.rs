//! `candle-train plot`.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output};

use tempfile::TempDir;

/// A folder with metrics of two runs, the first of which goes on.
fn runs() -> TempDir {
    let dir = TempDir::new().unwrap();
    let line = |step: usize, loss: &str| {
        format!("{{\"step\":{step},\"loss\":{loss},\"memory\":{{\"weights_bytes\":{step}}}}}\n")
    };
    let first: String = (0..50)
        .map(|step| line(step, &format!("{}", 3.0 / (1 + step) as f64)))
        .collect();
    fs::write(dir.path().join("a.jsonl"), first + "{\"step\":50,\"lo").unwrap();
    fs::write(
        dir.path().join("b.jsonl"),
        line(7, "2.5") + &line(8, "null") + &line(9, "2"),
    )
    .unwrap();
    dir
}

fn plot(dir: &TempDir, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_candle-train"));
    let command = command.arg("plot").args(args).current_dir(dir.path());
    command.output().unwrap()
}

#[track_caller]
fn drawn(dir: &TempDir, args: &[&str], picture: &str) -> PathBuf {
    let output = plot(dir, &[args, &["-o", picture]].concat());
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && said.is_empty(), "{said}");
    dir.path().join(picture)
}

#[test]
fn a_curve_for_each_run() {
    let dir = runs();
    let svg = fs::read_to_string(drawn(&dir, &["a.jsonl", "b.jsonl"], "loss.svg")).unwrap();
    for text in ["a.jsonl", "b.jsonl", "loss", "step"] {
        assert!(svg.contains(&format!("\n{text}\n")), "{text}: {svg}");
    }
    // The curves: 50 points, and 2, as one has no value.
    let lines = svg.lines().filter(|line| line.contains("<polyline"));
    let points = lines.filter_map(|line| line.split("points=\"").nth(1)?.split('"').next());
    let lens: Vec<usize> = points
        .map(|points| points.split_whitespace().count())
        .collect();
    for len in [50, 2] {
        assert!(lens.contains(&len), "{lens:?}");
    }
    let args = ["a.jsonl", "--metric", "memory/weights_bytes"];
    let svg = fs::read_to_string(drawn(&dir, &args, "memory.svg")).unwrap();
    assert!(svg.contains("\nmemory/weights_bytes\n"), "{svg}");
}

#[test]
fn a_png_has_its_pixels() {
    let dir = runs();
    let file = fs::File::open(drawn(&dir, &["a.jsonl", "b.jsonl"], "loss.png")).unwrap();
    let decoder = png::Decoder::new(std::io::BufReader::new(file));
    let mut reader = decoder.read_info().unwrap();
    let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
    let info = reader.next_frame(&mut pixels).unwrap();
    assert_eq!((info.width, info.height), (1200, 700));
    let colors: std::collections::BTreeSet<&[u8]> = pixels.chunks(3).collect();
    // Paper, ink, and two curves.
    assert!(colors.len() > 10);
    let num_white = pixels.chunks(3).filter(|pixel| *pixel == [255; 3]).count();
    assert!((500_000..835_000).contains(&num_white), "{num_white}");
}

#[test]
fn what_cannot_be_drawn() {
    let dir = runs();
    fs::write(dir.path().join("text.txt"), "Alice was beginning\nto get\n").unwrap();
    fs::write(dir.path().join("empty"), "").unwrap();
    for (args, parts) in [
        (
            &["a.jsonl", "-o", "loss.pdf"][..],
            &["loss.pdf", ".png or .svg"][..],
        ),
        (&["nowhere", "-o", "loss.png"], &["nowhere", "No such file"]),
        (
            &["text.txt", "-o", "loss.png"],
            &["line 1 of text.txt is no step"],
        ),
        (
            &["empty", "-o", "loss.png"],
            &["no step with the number \"loss\""],
        ),
        (
            &["b.jsonl", "--metric", "los", "-o", "loss.png"],
            &[
                "\"los\"",
                "hint: its last step has loss, memory/weights_bytes, step",
            ],
        ),
        (
            &["a.jsonl", "-o", "no/loss.png"],
            &["cannot write no/loss.png"],
        ),
    ] {
        let output = plot(&dir, args);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.starts_with("error: "), "{said}");
        for part in parts {
            assert!(said.contains(part), "{part:?} is not in: {said}");
        }
        assert!(!dir.path().join("loss.png").exists());
    }
}
