use std::fs;

use candle_parallel::MemoryReport;
use candle_trainer::{EvalMetrics, Metrics, MetricsLine, StepMetrics};

use crate::assert_error;

pub fn step(step: usize) -> StepMetrics {
    StepMetrics {
        step,
        global_step: step + 1,
        epoch: Some(0.5),
        loss: 2.5,
        grad_norm: 0.75,
        learning_rate: 1e-3,
        loss_scale: 1.0,
        skipped_steps: 0,
        padding: 0.25,
        num_tokens: 512,
        tokens_per_sec: 2048.0,
        num_positions: 1024,
        positions_per_sec: 4096.0,
        step_secs: 0.25,
        gflops_per_sec: Some(1.5),
        mfu: None,
        pipeline: Vec::new(),
        context: Vec::new(),
        staleness: None,
        reported: Default::default(),
        memory: MemoryReport::default(),
    }
}

#[test]
fn one_json_object_per_step_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("metrics.jsonl");
    let mut metrics = Metrics::create(&path, "a").unwrap();
    for num_lines in 1..4 {
        metrics.log(&step(num_lines - 1)).unwrap();
        let text = fs::read_to_string(&path).unwrap();
        assert_eq!(text.lines().count(), num_lines);
        assert!(text.ends_with('\n'));
        let last = text.lines().last().unwrap();
        assert_eq!(
            serde_json::from_str::<StepMetrics>(last).unwrap(),
            step(num_lines - 1)
        );
    }
    let text = fs::read_to_string(&path).unwrap();
    let begins = r#"{"step":0,"global_step":1,"epoch":0.5,"loss":2.5,"grad_norm":0.75,"learning_rate":0.001,"loss_scale":1.0,"skipped_steps":0,"padding":0.25,"num_tokens":512,"tokens_per_sec":2048.0,"num_positions":1024,"positions_per_sec":4096.0,"step_secs":0.25,"gflops_per_sec":1.5,"memory":{"activations_bytes":0,"#;
    assert!(text.starts_with(begins), "{text}");
    assert!(
        text.lines().all(|line| line.ends_with(r#","run":"a"}"#)),
        "{text}"
    );
}

#[test]
fn the_numbers_of_a_skipped_step_are_null() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("metrics.jsonl");
    let skipped = StepMetrics {
        loss: f64::NAN,
        grad_norm: f64::INFINITY,
        ..step(0)
    };
    Metrics::create(&path, "a").unwrap().log(&skipped).unwrap();
    let text = fs::read_to_string(&path).unwrap();
    assert!(text.contains(r#""loss":null,"grad_norm":null"#), "{text}");
    let read: StepMetrics = serde_json::from_str(&text).unwrap();
    assert!(read.loss.is_nan() && read.grad_norm.is_nan());
}

#[test]
fn an_old_file_lasts_until_the_first_step() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("metrics.jsonl");
    // Of an earlier version, which had other fields.
    let line = "{\"step\":0,\"loss\":1.5,\"learning_rate\":0.1,\"of_old\":[1,2,3]}\n";
    let old = line.repeat(40);
    fs::write(&path, &old).unwrap();
    let words = [
        "metrics.jsonl",
        "is of another run, and is not overwritten",
        "hint:",
    ];
    assert_error(Metrics::create(&path, "a"), &words);
    let mut metrics = Metrics::replace(&path, "a").unwrap();
    assert_eq!(fs::read_to_string(&path).unwrap(), old);
    metrics.log(&step(0)).unwrap();
    let text = fs::read_to_string(&path).unwrap();
    assert_eq!(serde_json::from_str::<StepMetrics>(&text).unwrap(), step(0));
}

#[test]
fn a_file_that_holds_something_else_is_never_touched() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("precious");
    let contents: [&[u8]; 5] = [
        b"Alice was beginning to get very tired\n",
        b"{\"step\": 1}\n",
        b"[1]\n",
        &[0x90, 1, 0, 0, 0, 0, 0, 0, b'{', 0xff],
        b"\n",
    ];
    for content in contents {
        fs::write(&path, content).unwrap();
        let words = ["precious", "is no metrics file", "hint:"];
        assert_error(Metrics::create(&path, "a"), &words);
        assert_eq!(fs::read(&path).unwrap(), content);
    }
}

/// What a run has left that was killed while it wrote its first line.
#[test]
fn a_first_line_that_was_cut_is_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("metrics.jsonl");
    fs::write(&path, "{\"step\":0,\"loss\":1.").unwrap();
    let mut metrics = Metrics::resume(&path, "a", 0).unwrap();
    metrics.log(&step(0)).unwrap();
    let text = fs::read_to_string(&path).unwrap();
    assert_eq!(serde_json::from_str::<StepMetrics>(&text).unwrap(), step(0));
}

#[test]
fn evaluations_stay_with_their_steps() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("metrics.jsonl");
    let evaluation = |step| EvalMetrics {
        step,
        global_step: step + 1,
        epoch: None,
        eval_loss: f64::NAN,
        eval_perplexity: 7.5,
        eval_accuracy: Some(0.25),
        eval_num_tokens: 9,
        eval_secs: 0.5,
    };
    let mut metrics = Metrics::create(&path, "a").unwrap();
    for index in 0..3 {
        metrics.log(&step(index)).unwrap();
        metrics.log(&evaluation(index)).unwrap();
    }
    drop(metrics);
    Metrics::resume(&path, "a", 2)
        .unwrap()
        .log(&step(2))
        .unwrap();
    let text = fs::read_to_string(&path).unwrap();
    let lines = text.lines().map(|line| serde_json::from_str(line).unwrap());
    let lines: Vec<MetricsLine> = lines.collect();
    let steps: Vec<(usize, bool)> = lines
        .iter()
        .map(|line| (line.step(), matches!(line, MetricsLine::Evaluation(_))))
        .collect();
    let want = [(0, false), (0, true), (1, false), (1, true), (2, false)];
    assert_eq!(steps, want);
    match &lines[1] {
        MetricsLine::Evaluation(line) => assert!(line.eval_loss.is_nan()),
        line => panic!("{line:?}"),
    }
}

#[test]
fn the_file_of_another_run_is_not_overwritten_unless_that_is_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("metrics.jsonl");
    assert_eq!(Metrics::run_of(&path).unwrap(), None);
    (Metrics::create(&path, "a").unwrap().log(&step(0))).unwrap();
    assert_eq!(Metrics::run_of(&path).unwrap().as_deref(), Some("a"));
    let before = fs::read(&path).unwrap();
    let words = [
        "metrics.jsonl",
        "is of another run, a, and is not overwritten",
        "hint:",
        "--overwrite",
    ];
    for step in [0, 1] {
        assert_error(Metrics::resume(&path, "b", step), &words);
    }
    let mut replacing = Metrics::replace(&path, "b").unwrap();
    assert!(fs::read(&path).unwrap() == before);
    replacing.log(&step(0)).unwrap();
    assert_eq!(Metrics::run_of(&path).unwrap().as_deref(), Some("b"));
    // An evaluation alone is metrics, too.
    let line = r#"{"step":0,"eval_loss":1.5,"run":"c"}"#.to_string() + "\n";
    fs::write(&path, line).unwrap();
    assert_eq!(Metrics::run_of(&path).unwrap().as_deref(), Some("c"));
}

#[test]
fn a_file_of_an_earlier_version_belongs_to_a_run_that_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("metrics.jsonl");
    let mut metrics = Metrics::create(&path, "a").unwrap();
    (0..3).for_each(|index| metrics.log(&step(index)).unwrap());
    drop(metrics);
    let named = fs::read_to_string(&path).unwrap();
    let mut nameless = named.replace(r#","run":"a""#, "").into_bytes();
    // The beginning of a line that a run which was killed has left, of bytes that were never written.
    nameless.extend(b"{\"step\":3,\xff\xff");
    fs::write(&path, &nameless).unwrap();
    let words = ["is of another run, and is not overwritten"];
    assert_error(Metrics::create(&path, "b"), &words);
    assert!(fs::read(&path).unwrap() == nameless);
    let mut metrics = Metrics::resume(&path, "b", 3).unwrap();
    metrics.log(&step(3)).unwrap();
    let text = fs::read_to_string(&path).unwrap();
    assert_eq!(text.lines().count(), 4);
    assert!(text.ends_with("\"run\":\"b\"}\n"), "{text}");
}

#[test]
fn two_runs_need_two_files() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("metrics.jsonl");
    let first = Metrics::create(&path, "a").unwrap();
    assert_error(
        Metrics::create(&path, "a"),
        &["another run", "metrics.jsonl"],
    );
    drop(first);
    Metrics::create(&path, "a").unwrap();
    let null = Metrics::create("/dev/null", "a").unwrap();
    assert_eq!(null.next_step(), None);
    Metrics::create("/dev/null", "a").unwrap();
}

#[test]
fn an_unwritable_path_is_an_error_at_once() {
    let dir = tempfile::tempdir().unwrap();
    assert_error(
        Metrics::create(dir.path(), "a"),
        &["cannot write the metrics file", "hint:"],
    );
    let missing = dir.path().join("missing/metrics.jsonl");
    assert_error(
        Metrics::create(missing, "a"),
        &["missing/metrics.jsonl", "folder must exist"],
    );
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_an_error_and_devices_work() {
    assert_error(
        Metrics::create("/dev/full", "a").unwrap().log(&step(3)),
        &["step 4", "/dev/full"],
    );
    Metrics::create("/dev/null", "a")
        .unwrap()
        .log(&step(0))
        .unwrap();
}

#[test]
fn a_resumed_run_writes_no_step_twice() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("metrics.jsonl");
    let steps = || -> Vec<usize> {
        let text = fs::read_to_string(&path).unwrap();
        let steps = text.lines().map(serde_json::from_str::<StepMetrics>);
        steps.map(|step| step.unwrap().step).collect()
    };
    // Nothing is there yet.
    Metrics::resume(&path, "a", 3)
        .unwrap()
        .log(&step(3))
        .unwrap();
    assert_eq!(steps(), [3]);
    let mut metrics = Metrics::create(&path, "a").unwrap();
    (0..5).for_each(|index| metrics.log(&step(index)).unwrap());
    drop(metrics);
    let whole = fs::read_to_string(&path).unwrap();
    let cut = &whole[..whole.len() - 9];
    for (text, first, expected) in [
        (whole.as_str(), 5, vec![0, 1, 2, 3, 4, 5]),
        (&whole, 2, vec![0, 1, 2]),
        (&whole, 0, vec![0]),
        (cut, 4, vec![0, 1, 2, 3, 4]),
        (cut, 5, vec![0, 1, 2, 3, 5]),
    ] {
        fs::write(&path, text).unwrap();
        let mut metrics = Metrics::resume(&path, "a", first).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), text);
        let next = expected.len().checked_sub(2);
        assert_eq!(
            metrics.next_step(),
            Some(next.map_or(0, |at| expected[at] + 1))
        );
        metrics.log(&step(first)).unwrap();
        assert_eq!(steps(), expected, "{first}");
    }
    let spoiled = whole.lines().next().unwrap().to_string() + "\nsomething else\n";
    fs::write(&path, &spoiled).unwrap();
    let words = ["line 2 of ", "is no step of a metrics file", "hint:"];
    assert_error(Metrics::resume(&path, "a", 1), &words);
    assert_eq!(fs::read_to_string(&path).unwrap(), spoiled);
}
