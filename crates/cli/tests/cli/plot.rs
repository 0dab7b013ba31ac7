//! `candle-train plot`.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output};

use tempfile::TempDir;

use super::program::AssertText;

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
    let told = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(told, format!("wrote {picture}\n"));
    dir.path().join(picture)
}

#[test]
fn a_curve_for_each_run() {
    let dir = runs();
    let svg = fs::read_to_string(drawn(&dir, &["a.jsonl", "b.jsonl"], "loss.svg")).unwrap();
    for text in ["a.jsonl", "b.jsonl", "loss (nats per token)", "step"] {
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
    svg.assert_has(&["width=\"1200\" height=\"700\" viewBox"]);
}

/// The text of a picture of these arguments, line by line.
fn texts(dir: &TempDir, args: &[&str]) -> Vec<String> {
    let svg = fs::read_to_string(drawn(dir, args, "texts.svg")).unwrap();
    let lines = svg.lines().filter(|line| !line.starts_with('<'));
    lines.map(str::to_string).collect()
}

/// Vertical places of a picture's longest line.
fn heights(dir: &TempDir, args: &[&str]) -> Vec<i32> {
    let svg = fs::read_to_string(drawn(dir, args, "lines.svg")).unwrap();
    let lines = svg.lines().filter(|line| line.contains("<polyline"));
    let points = lines.filter_map(|line| line.split("points=\"").nth(1)?.split('"').next());
    // Of equally long ones the last, which is drawn before the others.
    let points = points.max_by_key(|points| points.split_whitespace().count());
    let points = points.unwrap().split_whitespace();
    let heights = points.map(|point| point.split(',').nth(1).unwrap().parse().unwrap());
    heights.collect()
}

#[test]
fn titles_units_and_legends_say_what_is_drawn() {
    let dir = runs();
    let mebibytes = r#"{"step":0,"loss":2,"memory":{"weights_bytes":5242880}}
{"step":1,"eval_loss":2.25}
{"step":1,"loss":1,"memory":{"weights_bytes":5242880}}
"#;
    fs::write(dir.path().join("c.jsonl"), mebibytes).unwrap();
    let has = |args: &[&str], expected: &[&str], absent: &[&str]| {
        let texts = texts(&dir, args);
        let is_there = |text: &&&str| texts.iter().any(|it| it == **text);
        for text in expected {
            assert!(is_there(&text), "{text:?} is not in {texts:?}");
        }
        for text in absent {
            assert!(!is_there(&text), "{text:?} is in {texts:?}");
        }
    };
    let title = ["c.jsonl", "--title", "Alice & the <Queen>"];
    has(
        &title,
        &[
            "Alice &amp; the &lt;Queen&gt;",
            "loss (nats per token)",
            "step",
        ],
        // One curve needs no legend.
        &["c.jsonl", "loss"],
    );
    has(
        &["c.jsonl", "--metric", "memory/weights_bytes"],
        &["memory/weights (MiB)", "5.0"],
        &[],
    );
    has(
        &["c.jsonl", "--metric", "loss, eval_loss"],
        &["loss, eval_loss (nats per token)", "loss", "eval_loss"],
        &["c.jsonl: loss"],
    );
    fs::copy(dir.path().join("c.jsonl"), dir.path().join("d.jsonl")).unwrap();
    has(
        &[
            "c.jsonl",
            "d.jsonl",
            "--metric",
            "loss",
            "--metric",
            "eval_loss",
        ],
        &[
            "c.jsonl: loss",
            "c.jsonl: eval_loss",
            "d.jsonl: loss",
            "d.jsonl: eval_loss",
        ],
        &["loss", "c.jsonl"],
    );
}

#[test]
fn the_legend_is_where_no_curve_is() {
    let dir = runs();
    let side = |values: fn(i32) -> i32| {
        let line = |step: i32| format!("{{\"step\":{step},\"loss\":{}}}\n", values(step));
        for name in ["left", "right"] {
            let lines: String = (0..50).map(line).collect();
            fs::write(dir.path().join(name), lines).unwrap();
        }
        let svg = fs::read_to_string(drawn(&dir, &["left", "right"], "legend.svg")).unwrap();
        let (before, _) = svg.split_once("\nleft\n").unwrap();
        let element = before.lines().last().unwrap();
        let x = element.split("x=\"").nth(1).unwrap().split('"').next();
        let x: i32 = x.unwrap().parse().unwrap();
        x / 2400
    };
    assert_eq!(side(|step| 100 - step), 1);
    assert_eq!(side(|step| step), 0);
}

#[test]
fn a_logarithmic_axis_bends_curves_and_smoothing_flattens_them() {
    let dir = runs();
    let line = |step: i32, loss: f64| format!("{{\"step\":{step},\"loss\":{loss}}}\n");
    let halves: String = (0..30).map(|step| line(step, 0.5f64.powi(step))).collect();
    fs::write(dir.path().join("halves.jsonl"), halves).unwrap();
    // What is halved in each step falls by the same length.
    let heights_of = |args: &[&str]| heights(&dir, &[&["halves.jsonl"], args].concat());
    let steps = |heights: &[i32]| -> Vec<i32> {
        let pairs = heights.windows(2);
        pairs.map(|pair| pair[1] - pair[0]).collect()
    };
    let log = steps(&heights_of(&["--log"]));
    assert_eq!(log.len(), 29);
    assert!(
        log.iter().all(|it| (it - log[0]).abs() <= 1 && *it > 0),
        "{log:?}"
    );
    let linear = steps(&heights_of(&[]));
    assert!(linear[0] > 10 * linear[9], "{linear:?}");
    let zigzag: String = (0..60)
        .map(|step| line(step, f64::from(step % 2)))
        .collect();
    fs::write(dir.path().join("halves.jsonl"), zigzag).unwrap();
    let swing = |args: &[&str]| {
        let late = heights_of(args).split_off(40);
        late.iter().max().unwrap() - late.iter().min().unwrap()
    };
    let (raw, smooth) = (swing(&[]), swing(&["--smooth", "0.9"]));
    assert!(smooth * 10 < raw, "{smooth} of {raw}");
    assert_eq!(swing(&["--smooth", "19"]), smooth);
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
    // Borders of lines are between the colours of line and paper.
    let blue = |pixel: &&[u8]| pixel[0] < pixel[1] && pixel[1] < pixel[2];
    let blues: std::collections::BTreeSet<&[u8]> = pixels.chunks(3).filter(blue).collect();
    assert!(blues.contains(&[0, 114, 178][..]), "{blues:?}");
    assert!(blues.len() > 8, "{blues:?}");
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
            &["\"los\"", "hint: it has loss, memory/weights_bytes, step"],
        ),
        (
            &["a.jsonl", "--metric", "loss,", "-o", "loss.png"],
            &["--metric has a name that is empty"],
        ),
        (
            &[
                "a.jsonl",
                "--metric",
                "loss,memory/weights_bytes",
                "-o",
                "loss.png",
            ],
            &["loss is in nats per token", "one axis", "hint: "],
        ),
        (
            &["a.jsonl", "--metric", "step", "--log", "-o", "loss.png"],
            &["step of step 1 in a.jsonl is 0", "--log", "hint: "],
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
        said.assert_has(parts);
        assert!(!dir.path().join("loss.png").exists());
    }
    let output = plot(&dir, &["a.jsonl", "-o", "loss.png", "--smooth", "1"]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{said}");
    said.assert_has(&["such as 20"]);
}
