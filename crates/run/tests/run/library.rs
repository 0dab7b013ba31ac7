//! Runs that a program of one's own starts.

use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use candle_core::{Error, Result};
use candle_train_run::{Finetune, Observer, Observers, Pretrain, RunEvent};
use candle_trainer::TrainEvent;
use tempfile::tempdir;

pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/fixtures")
        .join(name)
}

/// Two steps of the fixture's model.
fn finetune(output: &Path) -> Finetune {
    let model = fixture("gqa/model").display().to_string();
    let run = Finetune::new(model)
        .data(fixture("text.txt"))
        .output(output);
    let run = run.seq_len(16).global_batch_size(4).lr(1e-2).steps(2);
    run.dp(1)
}

fn weights(dir: &Path) -> Vec<u8> {
    fs::read(dir.join("model.safetensors")).unwrap()
}

#[test]
fn a_run_of_a_few_words_trains_and_tells_its_observers() {
    let dir = tempdir().unwrap();
    let output = dir.path().join("out");
    let mut told = Vec::new();
    let observe = |event: &RunEvent| {
        told.push(match event {
            RunEvent::Begin { num_steps } => format!("begin {num_steps}"),
            RunEvent::Train(TrainEvent::Step(step)) => format!("step {}", step.global_step),
            RunEvent::Train(TrainEvent::Evaluation(_)) => "evaluation".to_string(),
            RunEvent::Sample { title, text } => {
                assert!(text.starts_with("The"), "{text}");
                format!("sample {title}")
            }
            RunEvent::End => "end".to_string(),
            RunEvent::Note(_) | RunEvent::Warning(_) | RunEvent::Train(TrainEvent::Begin(_)) => {
                return ControlFlow::Continue(());
            }
            other => format!("{other:?}"),
        });
        ControlFlow::Continue(())
    };
    let mut run = finetune(&output).prompt("The");
    run.samples.sample_tokens = 3;
    run.training.evaluation.eval_fraction = Some(0.2);
    let trained = run.train_with(Observers::none().and(observe)).unwrap();
    assert_eq!(
        told,
        [
            "sample before",
            "begin 2",
            "step 1",
            "step 2",
            "evaluation",
            "end",
            "sample after"
        ]
    );
    assert_eq!((trained.steps, trained.is_stopped), (2, false));
    assert_eq!(trained.output, output);
    assert!(trained.loss.is_some_and(f64::is_finite) && trained.eval_loss.is_some());
    // As the file in it says, the same again.
    let mut again = Finetune::from_toml(output.join("candle_train.toml")).unwrap();
    let second = dir.path().join("second");
    again = again.output(&second);
    again.train_with(Observers::none()).unwrap();
    assert!(weights(&output) == weights(&second));
}

#[test]
fn an_observer_stops_the_run_and_another_one_goes_on() {
    let dir = tempdir().unwrap();
    let stop = |event: &RunEvent| match event {
        RunEvent::Train(TrainEvent::Step(step)) if step.global_step == 3 => ControlFlow::Break(()),
        _ => ControlFlow::Continue(()),
    };
    let run = |output: &str| {
        let mut run = finetune(&dir.path().join(output)).steps(6);
        run.training.checkpoints.save_dir = Some(dir.path().join("saves"));
        run.training.checkpoints.resume = Some("latest".into());
        run
    };
    let trained = run("stopped")
        .train_with(Observers::none().and(stop))
        .unwrap();
    assert!(trained.is_stopped && trained.steps < 6, "{trained:?}");
    assert!(!dir.path().join("stopped").exists());
    let trained = run("whole").train_with(Observers::none()).unwrap();
    assert_eq!((trained.is_stopped, trained.steps), (false, 6));
    finetune(&dir.path().join("at-once"))
        .steps(6)
        .train_with(Observers::none())
        .unwrap();
    assert!(weights(&dir.path().join("whole")) == weights(&dir.path().join("at-once")));
}

/// An observer that fails is told no more, and the run goes on.
#[test]
fn an_observer_that_fails_ends_nothing() {
    struct Fails(Arc<Mutex<usize>>);
    impl Observer for Fails {
        fn observe(&mut self, _: &RunEvent) -> Result<ControlFlow<()>> {
            *self.0.lock().unwrap() += 1;
            Err(Error::msg("the disk is full"))
        }
    }
    let (dir, count) = (tempdir().unwrap(), Arc::default());
    let mut warnings = Vec::new();
    let observe = |event: &RunEvent| {
        if let RunEvent::Warning(warning) = event {
            warnings.push(warning.to_string());
        }
        ControlFlow::Continue(())
    };
    let observers = Observers::none()
        .and(Fails(Arc::clone(&count)))
        .and(observe);
    finetune(&dir.path().join("out"))
        .train_with(observers)
        .unwrap();
    assert_eq!(*count.lock().unwrap(), 1);
    assert!(
        warnings.iter().any(|warning| warning == "the disk is full"),
        "{warnings:?}"
    );
}

#[test]
fn what_keeps_a_run_from_starting_is_an_error_and_ends_no_process() {
    let dir = tempdir().unwrap();
    let good = finetune(&dir.path().join("out"));
    let with = |edit: &dyn Fn(&mut Finetune)| {
        let mut run = good.clone();
        edit(&mut run);
        run.train_with(Observers::none()).unwrap_err().to_string()
    };
    for (said, part) in [
        (
            with(&|run| run.start.model = "no/where/at/all".into()),
            "no/where/at/all",
        ),
        (with(&|run| run.start.model = String::new()), "model"),
        (with(&|run| run.data.data = vec![]), "no data"),
        (with(&|run| run.training.layout.tp = 64), "tp"),
        (with(&|run| run.training.layout.tp = 0), "'0' for '--tp"),
        (
            with(&|run| run.training.batches.micro_batch_size = 0),
            "micro",
        ),
        (
            with(&|run| run.samples.temperature = 0.7),
            "nothing is sampled",
        ),
        (
            with(&|run| run.training.optimizer.lr = Some(f64::NAN)),
            "lr",
        ),
    ] {
        assert!(said.contains(part), "{part:?} is not in {said:?}");
    }
    assert!(!dir.path().join("out").exists());
}

/// Two runs at a time are what each is alone.
#[test]
fn runs_beside_each_other_do_not_disturb_each_other() {
    let dir = tempdir().unwrap();
    type RunInto = Box<dyn Fn(&Path) + Send + Sync>;
    let runs: Vec<RunInto> = vec![
        Box::new(|output| {
            drop(
                finetune(output)
                    .tp(2)
                    .train_with(Observers::none())
                    .unwrap(),
            )
        }),
        Box::new(|output| {
            let mut run = finetune(output);
            run.training.ranks.matmul_precision = Some(candle_ops::MatmulPrecision::High);
            run.train_with(Observers::none()).unwrap();
        }),
        Box::new(|output| {
            let run = Pretrain::new()
                .data(fixture("text.txt"))
                .output(output)
                .dp(1);
            let mut run = run.steps(2).seq_len(16);
            run.samples.prompt = None;
            run.start.model.hidden_size = 24;
            run.train_with(Observers::none()).unwrap();
        }),
    ];
    let alone: Vec<_> = (0..runs.len())
        .map(|i| dir.path().join(format!("alone{i}")))
        .collect();
    let beside: Vec<_> = (0..runs.len())
        .map(|i| dir.path().join(format!("beside{i}")))
        .collect();
    for (run, output) in runs.iter().zip(&alone) {
        run(output);
    }
    std::thread::scope(|scope| {
        for (run, output) in runs.iter().zip(&beside) {
            scope.spawn(move || run(output));
        }
    });
    for (alone, beside) in alone.iter().zip(&beside) {
        assert!(weights(alone) == weights(beside), "{}", alone.display());
    }
}

/// What a run has written of its steps is its own: a later one neither gets it from the file of flags nor writes into it.
#[test]
fn curves_and_a_trace_of_another_run_are_left_alone() {
    let dir = tempdir().unwrap();
    let (curves, trace) = (dir.path().join("curves"), dir.path().join("trace.json"));
    let with_logs = |mut run: Finetune, output: &str| {
        run.training.logs.tensorboard = Some(curves.clone());
        run.training.logs.trace.trace = Some(trace.clone());
        run.output(dir.path().join(output))
    };
    let train = |run: &Finetune| run.train_with(Observers::none());
    let first = with_logs(finetune(&dir.path().join("first")), "first");
    train(&first).unwrap();
    let before = fs::read(&trace).unwrap();
    let num_files = || fs::read_dir(&curves).unwrap().count();
    assert_eq!(num_files(), 1);
    let again = Finetune::from_toml(dir.path().join("first/candle_train.toml")).unwrap();
    let again = again.output(dir.path().join("second"));
    assert!(again.training.logs.trace.trace.is_none() && again.training.logs.tensorboard.is_none());
    train(&again).unwrap();
    // The same flags, and others: told of the folder, and then of the file.
    for second in [again.clone(), again.clone().lr(0.5)] {
        let mut second = with_logs(second, "third");
        let said = train(&second).unwrap_err().to_string();
        assert!(
            said.contains("the TensorBoard folder") && said.contains("another run"),
            "{said}"
        );
        second.training.logs.tensorboard = None;
        let said = train(&second).unwrap_err().to_string();
        assert!(
            said.contains("the trace") && said.contains("another run"),
            "{said}"
        );
        assert!(said.contains("--overwrite"), "{said}");
    }
    assert!(fs::read(&trace).unwrap() == before && num_files() == 1);
    assert!(!dir.path().join("third").exists());
    let mut third = with_logs(again, "third");
    third.training.output.overwrite = true;
    train(&third).unwrap();
    assert!(fs::read(&trace).unwrap() != before && num_files() == 2);
}

/// As after a kill before the first checkpoint.
#[test]
fn a_run_that_begins_again_for_want_of_a_checkpoint_keeps_its_curves() {
    let dir = tempdir().unwrap();
    let mut run = finetune(&dir.path().join("out"));
    run.training.logs.tensorboard = Some(dir.path().join("curves"));
    run.training.checkpoints.save_dir = Some(dir.path().join("saves"));
    run.training.checkpoints.resume = Some("latest".into());
    run.train_with(Observers::none()).unwrap();
    run.train_with(Observers::none()).unwrap();
    let other = run.lr(0.5).output(dir.path().join("other"));
    let other = other.train_with(Observers::none()).unwrap_err();
    assert!(other.to_string().contains("another run"), "{other}");
}

/// This program's allocator counts nothing.
#[test]
fn activations_that_nobody_measures_are_absent() {
    let dir = tempdir().unwrap();
    let mut run = finetune(&dir.path().join("out")).pp(2);
    let file = dir.path().join("metrics.jsonl");
    run.training.logs.metrics = Some(file.clone());
    run.train_with(Observers::none()).unwrap();
    let lines = fs::read_to_string(file).unwrap();
    assert!(lines.contains("\"weights_peak_bytes\":"), "{lines}");
    assert!(
        lines.contains("\"idle_share\":") && !lines.contains("activations"),
        "{lines}"
    );
}
