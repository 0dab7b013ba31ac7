//! Servers and workers against data-parallel replicas, delays and deaths of threads.

use std::cell::Cell;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use candle_comm::{Degrees, Mailbox, Mesh, RankEnv, RunConfig, launch, message_of};
use candle_core::{Device, Result};
use candle_parallel::checkpoint::{CheckpointManifest, CheckpointSaver, TrainingCheckpoint};
use candle_parallel::{Recompute, ZeroStage};
use candle_trainer::{
    Batches, Checkpoints, Consistency, DataPosition, ParameterServer, SampleConfig, Samples,
    StepMetrics, Trainer, TrainingRecord, Worker,
};

use crate::fixture::{Fixture, Run};
use crate::run::{Adapters, Layout, Variant, gather, load_variant, train_variant};
use crate::tensors::{Tensors, assert_close};

/// Servers, workers, and when these get weights.
type Servers = (usize, usize, Consistency);

/// What a worker does in a step, which may be its last: the worker's number, and how many steps it has computed.
type Habit = fn(usize, usize);

/// Trains the fixture's model by servers; what the first one saw, and the weights.
fn serve(
    fixture: &Fixture,
    run: &Run,
    servers: Servers,
    habits: (Variant, Habit),
) -> Result<(Vec<StepMetrics>, Tensors)> {
    serve_saving(fixture, run, servers, habits, None)
}

/// Checkpoints after every second step and at the end.
struct Saving<'a> {
    dir: &'a Path,
    /// In which the last worker asks to stop.
    stops_in_step: usize,
}

/// As [`serve`], with checkpoints.
fn serve_saving(
    fixture: &Fixture,
    run: &Run,
    (num_servers, num_workers, consistency): Servers,
    (variant, habit): (Variant, Habit),
    saving: Option<&Saving>,
) -> Result<(Vec<StepMetrics>, Tensors)> {
    let layout = Layout {
        zero: ZeroStage::Three,
        ..Layout::new(1, num_servers, 1)
    };
    let samples = Samples::new(&fixture.tokens(), SampleConfig::new(run.seq_len))?;
    let batches = |worker| {
        let config = run.batch_config();
        Batches::new(&samples, config, worker, num_workers, &Device::Cpu)
    };
    let seen = Mutex::new(None);
    let env = RankEnv::from_lookup("host", &|_| None).map_err(candle_core::Error::wrap)?;
    let config = RunConfig {
        deadline: Duration::from_secs(30),
        ..RunConfig::of_mailboxes(env, Degrees::default())
    };
    let ranks = (num_servers + num_workers, num_servers);
    let results = launch::mailboxes(&config, ranks, |mailbox| {
        let load = |mesh: &Mesh| load_variant(fixture, mesh, (layout, variant));
        if let Some(worker) = mailbox.rank().checked_sub(num_servers) {
            let num_steps = Cell::new(0);
            let stops_in = saving.map(|saving| saving.stops_in_step);
            let stops_in = stops_in.filter(|_| worker == num_workers - 1);
            let stop = move || {
                let step = num_steps.replace(num_steps.get() + 1);
                habit(worker, step);
                stops_in.is_some_and(|stops_in| step >= stops_in)
            };
            return match Worker::join(mailbox, num_servers, load)? {
                Some(joined) => joined.with_stop(stop).train(batches(worker)?),
                None => Ok(()),
            };
        }
        let servers: Vec<usize> = (0..num_servers).collect();
        let mesh = Mesh::new(mailbox.group(&servers)?, layout.degrees())?;
        let server = ParameterServer::new(mailbox, num_servers, consistency)?;
        let train = run.train_config(layout);
        let mut trainer = Trainer::of_server(train, &mesh, load(&mesh)?, server)?;
        if let Some(saving) = saving {
            let saver = CheckpointSaver::new(&mesh.world, saving.dir, run.steps, None)?;
            let is_first = mailbox.rank() == 0;
            let record = TrainingRecord::default();
            let checkpoints = Checkpoints::new(saver, Some(2), record, is_first);
            trainer = trainer.with_checkpoints(checkpoints);
        }
        let mut metrics = Vec::new();
        trainer.train(&batches(0)?, |step| {
            metrics.push(step.clone());
            Ok(())
        })?;
        if saving.is_some() {
            trainer.save_checkpoint(DataPosition::of(&batches(0)?, trainer.step())?)?;
        }
        let params = trainer.part().params();
        let weights = gather(trainer.part(), &mesh, |index| params.values(index))?;
        if mailbox.rank() == 0 {
            *seen.lock().unwrap() = Some((metrics, weights));
        }
        Ok(())
    })?;
    results
        .into_iter()
        .take(num_servers)
        .collect::<Result<()>>()?;
    Ok(seen.into_inner().unwrap().unwrap())
}

fn run_of(fixture: &Fixture, steps: usize) -> Run {
    Run {
        steps,
        seq_len: 8,
        micro_batch_size: 1,
        global_batch_size: 6,
        ..fixture.run.clone()
    }
}

/// Other delays in each step and of each worker.
fn delays(worker: usize, step: usize) {
    let millis = (worker * 7 + step * 5) % 11;
    std::thread::sleep(Duration::from_millis(millis as u64));
}

#[test]
fn servers_give_the_bits_of_replicas_whatever_the_delays() {
    let variants = [
        ("gqa", Variant::default()),
        (
            "tied_bias",
            Variant {
                recompute: Recompute::Full,
                ..Variant::default()
            },
        ),
        (
            "gqa",
            Variant {
                adapters: Adapters::New(0.2),
                ..Variant::default()
            },
        ),
        (
            "gqa",
            Variant {
                is_frozen: Some(|name| name.contains("mlp")),
                ..Variant::default()
            },
        ),
    ];
    for (name, variant) in variants {
        let fixture = Fixture::new(name);
        let run = run_of(&fixture, 4);
        let replicas = train_variant(&fixture, &run, Layout::new(1, 3, 1), variant).unwrap();
        for num_servers in [1, 2, 3] {
            let servers = (num_servers, 3, Consistency::Synchronous);
            let (metrics, weights) = serve(&fixture, &run, servers, (variant, delays)).unwrap();
            let losses = |metrics: &[StepMetrics]| -> Vec<u64> {
                metrics.iter().map(|step| step.loss.to_bits()).collect()
            };
            assert_eq!(
                losses(&metrics),
                losses(&replicas.metrics),
                "{name}, {num_servers}"
            );
            assert!(weights == replicas.final_weights, "{name}, {num_servers}");
        }
    }
}

/// With one worker both forms make the same updates; the norm, by which each step is clipped, is summed by the worker or by the servers.
#[test]
fn one_asynchronous_worker_is_a_synchronous_one() {
    let fixture = Fixture::new("gqa");
    let run = Run {
        max_grad_norm: 0.2,
        ..run_of(&fixture, 6)
    };
    for num_servers in [1, 2] {
        let one = |consistency| {
            let servers = (num_servers, 1, consistency);
            serve(&fixture, &run, servers, (Variant::default(), delays)).unwrap()
        };
        let (metrics, weights) = one(Consistency::Asynchronous { max_staleness: 0 });
        let (expected, expected_weights) = one(Consistency::Synchronous);
        for (step, expected) in metrics.iter().zip(&expected) {
            let close = |a: f64, b: f64| (a - b).abs() <= 1e-6 * b.abs();
            assert!(close(step.loss, expected.loss), "{step:?} {expected:?}");
            assert!(
                close(step.grad_norm, expected.grad_norm),
                "{step:?} {expected:?}"
            );
            assert!(step.grad_norm > 0.2, "it is clipped");
        }
        assert_close(&weights, &expected_weights, 1e-6, "weights");
    }
}

#[test]
fn no_worker_is_further_ahead_than_it_may_be_and_some_are_ahead() {
    let fixture = Fixture::new("gqa");
    let run = run_of(&fixture, 12);
    // The first worker is slow.
    let habit: Habit = |worker, _| {
        if worker == 0 {
            std::thread::sleep(Duration::from_millis(60));
        }
    };
    for max_staleness in [0, 1, 3] {
        let servers = (2, 3, Consistency::Asynchronous { max_staleness });
        let (metrics, _) = serve(&fixture, &run, servers, (Variant::default(), habit)).unwrap();
        let most = metrics.iter().filter_map(|step| step.staleness);
        assert_eq!(
            most.map(|staleness| staleness.max).max(),
            Some(max_staleness)
        );
        let num_tokens =
            |metrics: &[StepMetrics]| -> usize { metrics.iter().map(|step| step.num_tokens).sum() };
        let servers = (1, 3, Consistency::Synchronous);
        let (synchronous, _) =
            serve(&fixture, &run, servers, (Variant::default(), delays)).unwrap();
        // All gradients were applied once.
        assert_eq!(num_tokens(&metrics), num_tokens(&synchronous));
    }
}

#[test]
fn a_thread_that_dies_is_dropped_or_ends_the_run_by_name() {
    let fixture = Fixture::new("gqa");
    let run = run_of(&fixture, 8);
    let habit: Habit = |worker, step| {
        delays(worker, step);
        assert!((worker, step) != (1, 3), "worker 1 is tired");
    };
    let what = (Variant::default(), habit);
    let servers = (2, 3, Consistency::Asynchronous { max_staleness: 1 });
    let (metrics, _) = serve(&fixture, &run, servers, what).unwrap();
    assert_eq!(metrics.len(), 8);
    let first = metrics[0].num_tokens as f64;
    let last = metrics
        .iter()
        .rev()
        .take(3)
        .map(|step| step.num_tokens as f64);
    assert!(last.sum::<f64>() < 2.5 * first, "{metrics:?}");
    let servers = (2, 3, Consistency::Synchronous);
    let error = serve(&fixture, &run, servers, what).unwrap_err();
    let message = message_of(&error);
    assert!(
        message.contains("rank 3 is gone: panicked: worker 1 is tired"),
        "{message}"
    );
    let everyone: Habit = |_, step| assert!(step < 2, "nobody goes on");
    let servers = (1, 2, Consistency::Asynchronous { max_staleness: 1 });
    let error = serve(&fixture, &run, servers, (Variant::default(), everyone)).unwrap_err();
    let message = message_of(&error);
    assert!(message.contains("no worker is left"), "{message}");
}

/// Where workers are ahead of each other, a checkpoint has the gradients of its steps, each once, and of no later ones: whether it was due,
/// or the run was stopped.
#[test]
fn a_checkpoint_of_asynchronous_servers_has_each_gradient_once() {
    let fixture = Fixture::new("gqa");
    let run = run_of(&fixture, 9);
    let habit: Habit = |worker, _| {
        if worker == 0 {
            std::thread::sleep(Duration::from_millis(60));
        }
    };
    let dir = tempfile::tempdir().unwrap();
    let saving = Saving {
        dir: dir.path(),
        // The quickest worker asks for it in its step 6.
        stops_in_step: 6,
    };
    let servers = (2, 3, Consistency::Asynchronous { max_staleness: 3 });
    let habits = (Variant::default(), habit);
    let (metrics, _) = serve_saving(&fixture, &run, servers, habits, Some(&saving)).unwrap();
    let most = metrics.iter().filter_map(|step| step.staleness);
    assert!(most.map(|staleness| staleness.max).max() > Some(0));
    let num_done = metrics.len();
    assert!((6..9).contains(&num_done), "{num_done}");
    for step in [2, 4, num_done] {
        let path = TrainingCheckpoint::path(dir.path(), step);
        let manifest = CheckpointManifest::read(&path).unwrap();
        let manifest = serde_json::to_value(manifest).unwrap();
        assert_eq!(manifest["optimizer"]["num_updates"], 3 * step, "{manifest}");
        assert!(manifest["record"].get("repeats_gradients").is_none());
    }
}

/// Workers are told a place among samples, which an iterator does not have.
#[test]
fn an_iterator_is_no_data_of_servers() {
    let fixture = Fixture::new("gqa");
    let run = run_of(&fixture, 4);
    let mailbox = |mailbox: &Arc<Mailbox>| {
        if mailbox.rank() == 1 {
            let load = |mesh: &Mesh| {
                load_variant(&fixture, mesh, (Layout::new(1, 1, 1), Variant::default()))
            };
            return Worker::join(mailbox, 1, load).map(|_| ());
        }
        let layout = Layout::new(1, 1, 1);
        let mesh = Mesh::new(mailbox.group(&[0])?, layout.degrees())?;
        let server = ParameterServer::new(mailbox, 1, Consistency::Synchronous)?;
        let part = load_variant(&fixture, &mesh, (layout, Variant::default()))?;
        let mut trainer = Trainer::of_server(run.train_config(layout), &mesh, part, server)?;
        trainer.train(std::iter::repeat_with(|| Ok(Vec::new())), |_| Ok(()))
    };
    let env = RankEnv::from_lookup("host", &|_| None).unwrap();
    let config = RunConfig::of_mailboxes(env, Degrees::default());
    let results = launch::mailboxes(&config, (2, 1), mailbox);
    let said = results.map(|results| results.into_iter().collect::<Result<()>>());
    let said = message_of(&said.and_then(|result| result).unwrap_err());
    assert!(
        said.contains("the data of a parameter server are not Batches"),
        "{said}"
    );
}
