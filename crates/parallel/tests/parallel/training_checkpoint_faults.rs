//! Training checkpoints that were damaged, saves that fail, and folders in which other things are.

use std::path::Path;

use candle_comm::{ProcessGroup, message_of};
use candle_core::{Device, Result, Tensor};
use candle_parallel::ZeroStage;
use candle_parallel::checkpoint::{CheckpointSaver, SaveOutcome, TrainingCheckpoint};
use serde_json::json;
use tempfile::tempdir;

use crate::chain::Chain;
use crate::check::{assert_says, message, on_mesh};
use crate::training_checkpoint::{Run, layout};

const TWO_REPLICAS: (usize, usize, usize) = (1, 2, 1);

fn alone() -> ProcessGroup {
    ProcessGroup::single(Device::Cpu)
}

/// Saves after each of `steps`, and returns how each save ended.
fn save(dir: &Path, steps: &[usize], keep: usize) -> Vec<SaveOutcome> {
    let outcomes = on_mesh(TWO_REPLICAS, |mesh| {
        let layout = layout(TWO_REPLICAS, ZeroStage::One);
        let mut run = Run::new(Chain::default(), layout, mesh, 5, dir)?;
        let mut saver = run.saver(dir, keep)?;
        let mut outcomes = Vec::new();
        for &step in steps {
            run.step(step as u64)?;
            outcomes.extend(saver.start(&run.optimizer, step, json!(step))?);
            outcomes.extend(saver.finish()?);
        }
        Ok(outcomes)
    });
    assert_eq!(outcomes[0], outcomes[1]);
    outcomes[0].clone()
}

/// The message alone of something that must fail.
#[track_caller]
fn said<T>(result: Result<T>) -> String {
    match result {
        Ok(_) => panic!("this must fail"),
        Err(err) => message_of(&err),
    }
}

fn names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.collect();
    names.sort();
    names
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

fn edit(path: &Path, edit: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = std::fs::read(path).unwrap();
    edit(&mut bytes);
    std::fs::write(path, bytes).unwrap();
}

/// A manifest with a change, and with the checksum that belongs to it.
fn edit_manifest(dir: &Path, from: &str, to: &str) {
    let path = dir.join("manifest.json");
    let text = std::fs::read_to_string(&path).unwrap();
    let (start, content) = text.split_once("\"manifest\":").unwrap();
    let content = content.strip_suffix("}\n").unwrap().replace(from, to);
    assert!(content.contains(to));
    let sum = &start[10..26];
    let start = start.replace(
        sum,
        &format!(
            "{:016x}",
            twox_hash::XxHash64::oneshot(0, content.as_bytes())
        ),
    );
    std::fs::write(path, format!("{start}\"manifest\":{content}}}\n")).unwrap();
}

type Fault = (&'static str, fn(&Path, &Path), &'static [&'static str]);

const FAULTS: [Fault; 13] = [
    (
        "a file elsewhere",
        |dir, _| edit_manifest(dir, "rank-00001.safetensors", "../00001.safetensors"),
        &["names the file \"../00001.safetensors\"", "files of ranks"],
    ),
    (
        "one file twice",
        |dir, _| edit_manifest(dir, "rank-00001.safetensors", "rank-00000.safetensors"),
        &["rank-00000.safetensors", "each once"],
    ),
    (
        "a truncated file",
        |dir, _| {
            edit(&dir.join("rank-00001.safetensors"), |bytes| {
                bytes.truncate(999)
            })
        },
        &[
            "rank-00001.safetensors has 999 bytes; expected ",
            "manifest.json",
        ],
    ),
    (
        "a bit",
        |dir, _| {
            edit(&dir.join("rank-00001.safetensors"), |bytes| {
                let last = bytes.len() - 1;
                bytes[last] ^= 1;
            })
        },
        &[
            "rank-00001.safetensors was changed: it has the checksum",
            "expected",
        ],
    ),
    (
        "a missing file",
        |dir, _| std::fs::remove_file(dir.join("rank-00000.safetensors")).unwrap(),
        &["rank-00000.safetensors is missing; expected a file of"],
    ),
    (
        "a file of another run",
        |dir, other| {
            let file = "rank-00000.safetensors";
            std::fs::copy(other.join(file), dir.join(file)).unwrap();
        },
        &["rank-00000.safetensors was changed"],
    ),
    (
        "a manifest of another run",
        |dir, other| {
            std::fs::copy(other.join("manifest.json"), dir.join("manifest.json")).unwrap();
        },
        &["rank-0000", "expected", "manifest.json"],
    ),
    (
        "another run's file with its manifest's checksum",
        |dir, _| edit_manifest(dir, "\"run\": \"", "\"run\": \"x"),
        &[
            "rank-00000.safetensors belongs to step 2 of run ",
            "; expected step 2 of run x",
        ],
    ),
    (
        "no manifest",
        |dir, _| std::fs::remove_file(dir.join("manifest.json")).unwrap(),
        &["has no manifest.json: it is no checkpoint"],
    ),
    (
        "a truncated manifest",
        |dir, _| edit(&dir.join("manifest.json"), |bytes| bytes.truncate(200)),
        &["manifest.json (200 bytes) is not the manifest", "truncated"],
    ),
    (
        "a bit of the manifest",
        |dir, _| edit(&dir.join("manifest.json"), |bytes| bytes[300] ^= 1),
        &["manifest.json was changed: it has the checksum"],
    ),
    (
        "an unknown version",
        |dir, _| edit_manifest(dir, "\"version\": 2", "\"version\": 7"),
        &["of version 7; expected", "of version 2\nhint:"],
    ),
    (
        "something else",
        |dir, _| std::fs::write(dir.join("manifest.json"), "{}").unwrap(),
        &["manifest.json (2 bytes) is not the manifest of a training checkpoint"],
    ),
];

#[test]
fn damage_is_named_and_the_checkpoint_before_is_the_latest() {
    let (dir, other) = (tempdir().unwrap(), tempdir().unwrap());
    let dir = dir.path();
    save(dir, &[1, 2], 5);
    save(other.path(), &[1, 2, 3], 5);
    let good = tempdir().unwrap();
    copy(&dir.join("step-000002"), &good.path().join("step"));
    for (what, fault, words) in FAULTS {
        fault(&dir.join("step-000002"), &other.path().join("step-000003"));
        let said = on_mesh(TWO_REPLICAS, |mesh| {
            let opened = TrainingCheckpoint::open(&mesh.world, &dir.join("step-000002"));
            let (latest, skipped) = TrainingCheckpoint::latest(&mesh.world, dir)?;
            assert_eq!(latest.map(|found| found.step()), Some(1), "{what}");
            Ok((said(opened), skipped))
        });
        for (opened, skipped) in &said {
            assert_says(opened, words);
            assert_says(opened, &[&dir.join("step-000002").display().to_string()]);
            assert_eq!(skipped, std::slice::from_ref(opened), "{what}");
        }
        assert_eq!(said[0], said[1], "{what}");
        std::fs::remove_dir_all(dir.join("step-000002")).unwrap();
        copy(&good.path().join("step"), &dir.join("step-000002"));
    }
    let (latest, skipped) = TrainingCheckpoint::latest(&alone(), dir).unwrap();
    assert_eq!((latest.unwrap().step(), skipped.len()), (2, 0));
    for step in ["step-000001", "step-000002"] {
        std::fs::remove_file(dir.join(step).join("manifest.json")).unwrap();
    }
    let said = message(TrainingCheckpoint::latest(&alone(), dir));
    assert_says(
        &said,
        &[
            "none of the 2 checkpoints in",
            "step-000002 has no manifest",
        ],
    );
}

#[test]
fn nothing_to_resume() {
    let dir = tempdir().unwrap();
    for dir in [dir.path(), &dir.path().join("missing")] {
        let (latest, skipped) = TrainingCheckpoint::latest(&alone(), dir).unwrap();
        assert!(latest.is_none() && skipped.is_empty());
    }
    let said = message(TrainingCheckpoint::open(
        &alone(),
        &dir.path().join("missing"),
    ));
    assert_says(&said, &["missing does not exist"]);
}

/// Killed between the two renames that replace a checkpoint: both are complete, and neither has the name.
#[test]
fn the_latest_may_still_be_without_its_name() {
    let dir = tempdir().unwrap();
    let dir = dir.path();
    save(dir, &[1, 2], 5);
    let step = dir.join("step-000002");
    copy(&step, &dir.join(".step-000002.replaced"));
    std::fs::rename(&step, dir.join(".step-000002.saving")).unwrap();
    let (latest, skipped) = TrainingCheckpoint::latest(&alone(), dir).unwrap();
    let latest = latest.unwrap();
    assert_eq!((latest.step(), skipped.len()), (2, 0));
    // Nobody else writes there until this one does.
    let second = message(TrainingCheckpoint::latest(&alone(), dir));
    assert_says(&second, &["another run is writing to it"]);
    let saver = CheckpointSaver::new(&alone(), dir, 1, Some(&latest)).unwrap();
    drop(latest);
    let second = message(TrainingCheckpoint::latest(&alone(), dir));
    assert_says(&second, &["another run is writing to it"]);
    drop(saver);
    assert_eq!(names(dir), ["step-000001", "step-000002"]);
}

#[test]
fn the_name_of_the_folder_must_be_text() {
    use std::os::unix::ffi::OsStrExt;
    let dir = tempdir().unwrap();
    let name = std::ffi::OsStr::from_bytes(b"\xff");
    let saver = CheckpointSaver::new(&alone(), &dir.path().join(name), 1, None);
    assert_says(&message(saver), &["the checkpoint folder", "is not UTF-8"]);
    assert!(names(dir.path()).is_empty());
}

#[test]
fn the_newest_are_kept_and_other_folders_left_alone() {
    let dir = tempdir().unwrap();
    let dir = dir.path();
    for other in [
        "step-000002",
        "step-1",
        "notes",
        ".step-000007.saving",
        ".step-000008.removed",
    ] {
        std::fs::create_dir_all(dir.join(other).join("inside")).unwrap();
    }
    let outcomes = save(dir, &[1, 2, 3, 4], 2);
    assert_eq!(
        names(dir),
        [
            "notes",
            "step-000002.damaged",
            "step-000003",
            "step-000004",
            "step-1"
        ]
    );
    assert!(outcomes.iter().all(|outcome| outcome.saved.is_ok()));
    assert_eq!(names(&dir.join("step-000002.damaged")), ["inside"]);
}

#[test]
fn a_damaged_checkpoint_is_put_aside_when_its_step_is_saved_again() {
    let dir = tempdir().unwrap();
    let dir = dir.path();
    save(dir, &[1, 2], 3);
    for number in ["", "-2"] {
        std::fs::write(dir.join("step-000002/manifest.json"), "{").unwrap();
        let (latest, skipped) = TrainingCheckpoint::latest(&alone(), dir).unwrap();
        let latest = latest.unwrap();
        assert_eq!((latest.step(), skipped.len()), (1, 1));
        save_after(dir, &latest, 2);
        let aside = dir.join(format!("step-000002.damaged{number}"));
        assert_eq!(std::fs::read(aside.join("manifest.json")).unwrap(), b"{");
        drop(latest);
        let (latest, skipped) = TrainingCheckpoint::latest(&alone(), dir).unwrap();
        assert_eq!((latest.unwrap().step(), skipped.len()), (2, 0));
    }
}

/// Saves after `step` as the run of `resumed`, which it goes on from.
fn save_after(dir: &Path, resumed: &TrainingCheckpoint, step: usize) {
    let alone = (1, 1, 1);
    on_mesh(alone, |mesh| {
        let layout = layout(alone, ZeroStage::Zero);
        let mut run = Run::new(Chain::default(), layout, mesh.clone(), 5, dir)?;
        run.step(step as u64)?;
        let mut saver = CheckpointSaver::new(&mesh.world, dir, 3, Some(resumed))?;
        saver.start(&run.optimizer, step, json!(step))?;
        assert!(saver.finish()?.unwrap().saved.is_ok());
        Ok(())
    });
}

#[test]
fn old_checkpoints_are_removed_on_request_but_for_the_newest_before_a_step() {
    let dir = tempdir().unwrap();
    let dir = dir.path();
    on_mesh(TWO_REPLICAS, |mesh| {
        let layout = layout(TWO_REPLICAS, ZeroStage::One);
        let mut run = Run::new(Chain::default(), layout, mesh.clone(), 5, dir)?;
        let mut saver = run.saver(dir, 1)?.removing_on_request();
        for step in 1..=5 {
            run.step(step)?;
            saver.start(&run.optimizer, step as usize, json!(step))?;
            saver.finish()?;
        }
        mesh.world.barrier()?;
        if mesh.world.rank() == 0 {
            assert_eq!(names(dir).len(), 6, "with the lock");
            saver.remove_old(5, Some(3))?;
            // The next save waits for the removal, and this one.
            saver.remove_old(5, Some(3))?;
            assert_eq!(names(dir), [".lock", "step-000002", "step-000005"]);
        }
        let set_aside = saver.set_failed_aside(3..=5)?;
        assert_eq!(set_aside.failed, [dir.join("step-000005.failed")]);
        assert_eq!(set_aside.newest, Some(dir.join("step-000002")));
        // Saved once more, and once more of no use.
        saver.start(&run.optimizer, 5, json!("again"))?;
        saver.finish()?;
        let set_aside = saver.set_failed_aside(1..=5)?;
        assert_eq!(set_aside.failed.len(), 2);
        assert_eq!(set_aside.newest, None);
        Ok(())
    });
    assert_eq!(names(dir), ["step-000002.failed", "step-000005.failed"]);
    let (latest, skipped) = TrainingCheckpoint::latest(&alone(), dir).unwrap();
    assert!(latest.is_none() && skipped.is_empty());
    let failed = TrainingCheckpoint::open(&alone(), &dir.join("step-000005.failed")).unwrap();
    assert_eq!((failed.step(), failed.record()), (5, &json!("again")));
}

#[test]
fn two_runs_and_one_folder() {
    let dir = tempdir().unwrap();
    let dir = dir.path();
    let saver = |resumed| CheckpointSaver::new(&alone(), dir, 1, resumed);
    let first = saver(None).unwrap();
    assert_says(
        &message(saver(None)),
        &["another run is writing to it", "hint:"],
    );
    drop(first);
    save(dir, &[1], 1);
    assert_says(
        &message(saver(None)),
        &["step-000001 is a checkpoint already", "hint:"],
    );
    let checkpoint = TrainingCheckpoint::open(&alone(), &dir.join("step-000001")).unwrap();
    saver(Some(&checkpoint)).unwrap();
    copy(&dir.join("step-000001"), &dir.join("step-000002"));
    let words = [
        "step-000002 is newer than the checkpoint after step 1",
        "hint:",
    ];
    assert_says(&message(saver(Some(&checkpoint))), &words);
    edit(&dir.join("step-000002/rank-00000.safetensors"), Vec::clear);
    let (latest, _) = TrainingCheckpoint::latest(&alone(), dir).unwrap();
    saver(latest.as_ref()).unwrap();
    assert_says(
        &message(CheckpointSaver::new(&alone(), dir, 0, None)),
        &["at least 1"],
    );
}

#[test]
fn a_save_that_fails_leaves_the_older_one_and_training_goes_on() -> Result<()> {
    let dir = tempdir()?;
    let dir = dir.path();
    let outcomes = on_mesh((2, 1, 1), |mesh| {
        let layout = layout((2, 1, 1), ZeroStage::One);
        let mut run = Run::new(Chain::default(), layout, mesh, 5, dir)?;
        let mut saver = run.saver(dir, 1)?;
        run.step(0)?;
        saver.start(&run.optimizer, 1, json!(null))?;
        assert!(saver.finish()?.unwrap().saved.is_ok());
        // One of the two ranks cannot write.
        let name = "head.weight";
        if let Some(index) = run
            .part
            .params()
            .iter()
            .position(|param| param.name == name)
        {
            let param = run.part.params().get(index);
            let device = run.part.device();
            let values = Tensor::full(f32::NAN, param.local_shape(), device)?;
            run.part.params().refill(index, &values)?;
        }
        saver.start(&run.optimizer, 2, json!(null))?;
        let second = message(saver.start(&run.optimizer, 3, json!(null)));
        assert_says(&second, &["the save after step 2 is still under way"]);
        saver.finish()
    });
    for outcome in outcomes {
        let said = outcome.unwrap().saved.unwrap_err();
        assert_says(
            &said,
            &["rank 1: master:head.weight[0..78] has values that are NaN"],
        );
    }
    assert_eq!(names(dir), ["step-000001"]);
    Ok(())
}

#[test]
fn a_folder_that_cannot_be_written_to() {
    let dir = tempdir().unwrap();
    std::fs::write(dir.path().join("file"), "x").unwrap();
    for place in ["file", "file/below"] {
        let place = dir.path().join(place);
        let said = on_mesh(TWO_REPLICAS, |mesh| {
            Ok(said(CheckpointSaver::new(&mesh.world, &place, 1, None)))
        });
        assert_says(&said[0], &["cannot make the checkpoint folder", "file"]);
        assert_eq!(said[0], said[1]);
    }
    assert_eq!(std::fs::read(dir.path().join("file")).unwrap(), b"x");
}

#[test]
fn a_model_of_another_shape_is_refused_by_name() {
    let dir = tempdir().unwrap();
    save(dir.path(), &[1], 1);
    let refused = |chain: Chain, words: &[&str]| {
        let said = on_mesh((1, 1, 1), |mesh| {
            let layout = layout((1, 1, 1), ZeroStage::One);
            let mut run = Run::new(chain, layout, mesh, 5, dir.path())?;
            let checkpoint = run.open(&dir.path().join("step-000001"))?;
            Ok(message(checkpoint.load(&mut run.optimizer)))
        });
        assert_says(&said[0], words);
    };
    let chain = Chain::default();
    let shape = [
        "parameter embed.weight has shape [13, 6]",
        "expected the model's [14, 6]",
    ];
    refused(Chain { vocab: 14, ..chain }, &shape);
    let more = ["does not have the model's parameter layers.3."];
    refused(
        Chain {
            num_layers: 4,
            ..chain
        },
        &more,
    );
    let less = [
        "has the parameter layers.2.",
        "which the model does not have",
    ];
    refused(
        Chain {
            num_layers: 2,
            ..chain
        },
        &less,
    );
    refused(
        Chain {
            tied: true,
            ..chain
        },
        &["has the parameter head.weight"],
    );
}
