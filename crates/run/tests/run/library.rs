//! Runs that a program of one's own starts.

use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use candle_core::{Error, Result};
use candle_parallel::WeightFormat;
use candle_train_run::{DryRun, Finetune, Observer, Observers, Pretrain, RunEvent};
use candle_trainer::{DataSpec, TrainEvent};
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
fn a_model_whose_last_evaluation_fails_is_saved() {
    let dir = tempdir().unwrap();
    let [whole, failed] = ["whole", "failed"].map(|name| dir.path().join(name));
    let run = |output: &Path, steps| {
        let mut run = finetune(output).steps(steps);
        run.training.evaluation.eval_fraction = Some(0.2);
        run.training.evaluation.eval_every = Some(2);
        run
    };
    let fail_at = |number: usize| {
        let mut num_evaluations = 0;
        move |event: &RunEvent| {
            if let RunEvent::Train(TrainEvent::Begin("evaluating")) = event {
                num_evaluations += 1;
                assert!(num_evaluations < number, "evaluation {number} fails");
            }
            ControlFlow::Continue(())
        }
    };
    run(&whole, 4).train_with(Observers::none()).unwrap();
    let failing = Observers::none().and(fail_at(2));
    let said = run(&failed, 4).train_with(failing).unwrap_err().to_string();
    assert!(said.contains("evaluation 2 fails"), "{said}");
    assert!(weights(&whole) == weights(&failed));
    // One before the last step ends a run that is not done.
    let early = dir.path().join("early");
    let failing = Observers::none().and(fail_at(1));
    run(&early, 4).train_with(failing).unwrap_err();
    assert!(!early.exists());
}

#[test]
fn a_model_that_cannot_be_saved_costs_no_checkpoint_or_evaluation() {
    let dir = tempdir().unwrap();
    let [output, saves] = ["out", "saves"].map(|name| dir.path().join(name));
    let foreign = output.join("notes.txt");
    let mut num_evaluations = 0;
    let observe = |event: &RunEvent| {
        match event {
            RunEvent::Train(TrainEvent::Step(step)) if step.global_step == 4 => {
                fs::create_dir(&output).unwrap();
                fs::write(&foreign, "mine").unwrap();
            }
            RunEvent::Train(TrainEvent::Evaluation(_)) => num_evaluations += 1,
            _ => {}
        }
        ControlFlow::Continue(())
    };
    let mut run = finetune(&output).steps(4);
    run.training.evaluation.eval_fraction = Some(0.2);
    run.training.checkpoints.save_dir = Some(saves.clone());
    run.training.checkpoints.save_every = Some(2);
    let said = run.train_with(Observers::none().and(observe)).unwrap_err();
    assert!(said.to_string().contains("notes.txt"), "{said}");
    assert_eq!(num_evaluations, 1);
    assert!(saves.join("step-000004").exists() && foreign.exists());
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

/// Six starts that are each stopped after their second step leave no more checkpoints than one long one.
#[test]
fn starts_that_are_all_stopped_keep_as_many_checkpoints_as_they_are_told() {
    for keep in [1, 2] {
        let dir = tempdir().unwrap();
        let saves = dir.path().join("saves");
        let num_checkpoints = || {
            fs::read_dir(&saves).map_or(0, |dir| {
                dir.flatten()
                    .filter(|it| it.file_name().to_string_lossy().starts_with("step-"))
                    .count()
            })
        };
        for start in 1..=6 {
            let mut num_steps = 0;
            let observe = |event: &RunEvent| {
                let RunEvent::Train(TrainEvent::Step(_)) = event else {
                    return ControlFlow::Continue(());
                };
                num_steps += 1;
                // After the first step there are as many as are kept, and one more may be left from the start before.
                let most = if num_steps > 1 { keep } else { keep + 1 };
                let there = num_checkpoints();
                assert!(there <= most, "start {start}, step {num_steps}: {there}");
                if num_steps < 2 {
                    return ControlFlow::Continue(());
                }
                ControlFlow::Break(())
            };
            let mut run = finetune(&dir.path().join("out")).steps(100);
            run.training.checkpoints.save_dir = Some(saves.clone());
            run.training.checkpoints.keep = keep;
            run.training.checkpoints.resume = Some("latest".into());
            let trained = run.train_with(Observers::none().and(observe)).unwrap();
            assert!(trained.is_stopped && num_steps >= 2, "{trained:?}");
            assert_eq!(num_checkpoints(), start.min(keep + 1), "start {start}");
        }
    }
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

/// What a dry run says: its lines and warnings.
fn said(run: &Finetune) -> (DryRun, String) {
    let lines: Arc<Mutex<Vec<String>>> = Arc::default();
    let noted = lines.clone();
    let observe = move |event: &RunEvent| {
        if let RunEvent::Note(line) | RunEvent::Warning(line) = event {
            noted.lock().unwrap().push(line.to_string());
        }
        ControlFlow::Continue(())
    };
    let told = run.dry_run_with(Observers::none().and(observe)).unwrap();
    let lines = lines.lock().unwrap().join("\n");
    (told, lines)
}

#[test]
fn what_is_held_out_and_trained_on_is_counted() {
    let dir = tempdir().unwrap();
    let data = dir.path().join("a.jsonl");
    let lines =
        (0..20).map(|index| format!("{{\"prompt\": \"{index}\", \"completion\": \"x\"}}\n"));
    let lines: String = lines.collect();
    fs::write(&data, &lines).unwrap();
    let run = |path: &Path| {
        let mut run = finetune(&dir.path().join("out"));
        run.data.data = vec![DataSpec::new(path)];
        run
    };
    let mut once = run(&data);
    once.training.evaluation.eval_fraction = Some(0.1);
    let (_, words) = said(&once);
    assert!(
        words.contains("evaluation on 2 records of prompt and completion, "),
        "{words}"
    );
    assert!(!words.contains("trained on and evaluated on"), "{words}");
    // A part that is less than one.
    once.training.evaluation.eval_fraction = Some(0.01);
    let (_, words) = said(&once);
    let want = "--eval-fraction 0.01 of 20 records is none: one is held out, 5.0% of them";
    assert!(words.contains(want), "{words}");
    // The file twice, each record twice, and the file that is trained on.
    let mut twice = run(&data);
    twice.data.data.push(DataSpec::new(&data));
    twice.training.evaluation.eval_fraction = Some(0.1);
    let both = dir.path().join("both.jsonl");
    fs::write(&both, lines.repeat(2)).unwrap();
    let mut repeated = run(&both);
    repeated.training.evaluation.eval_fraction = Some(0.1);
    let mut same = run(&data);
    same.training.evaluation.eval_data = vec![DataSpec::new(&data)];
    for (run, num_shared, num_evaluated) in [(twice, 4, 4), (repeated, 4, 4), (same, 20, 20)] {
        let (_, words) = said(&run);
        let want = format!(
            "trained on and evaluated on: {num_shared} records of the {num_evaluated} to evaluate on"
        );
        assert!(words.contains(&want), "{words}");
    }
}

#[test]
fn rows_that_are_no_whole_blocks_are_told_with_their_bits() {
    let dir = tempdir().unwrap();
    let mut run = finetune(&dir.path().join("out")).lora(4);
    let (told, words) = said(&run);
    assert_eq!(told.frozen_bits, Some(32.0));
    assert!(!words.contains("bits a value"), "{words}");
    run.start.adapters.base_dtype = Some(WeightFormat::Q4K);
    let (told, words) = said(&run);
    // Rows of 32 and 56 values: of the first come blocks of 32, of the others none.
    for line in [
        "q8_0 (8.5 bits a value) in place of q4k, as rows of 32 values are no whole blocks of 256: gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj",
        "bf16 (16 bits a value) in place of q4k, as rows of 56 values are no whole blocks of 256: down_proj",
    ] {
        assert!(words.lines().any(|said| said == line), "{line}\n{words}");
    }
    // Of 4 layers; embedding and head in 16 bits.
    let blocks = 4.0 * (32.0 * (32.0 + 16.0 + 16.0 + 32.0) + 2.0 * 56.0 * 32.0);
    let halves = 4.0 * 56.0 * 32.0 + 2.0 * 307.0 * 32.0;
    let want = (8.5 * blocks + 16.0 * halves) / (blocks + halves);
    assert!(
        (told.frozen_bits.unwrap() - want).abs() < 1e-9,
        "{told:?}, expected {want}"
    );
    let line = format!("--base-dtype q4k: {want:.1} bits a value");
    assert!(words.contains(&line), "{words}");
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
