//! Folders written from training checkpoints equal those that the run itself would have written.

use std::path::Path;

use candle_comm::ProcessGroup;
use candle_core::{DType, Device, Result};
use candle_parallel::checkpoint::{Checkpoint, CheckpointSaver, HfSave, TrainingCheckpoint};
use candle_parallel::{ParamStore, ZeroStage};
use serde_json::json;
use tempfile::{TempDir, tempdir};

use crate::chain::Chain;
use crate::check::{assert_says, message, on_mesh};
use crate::folder::{edit_file, read_folder};
use crate::save_exact::{Layout, folder, layouts_and_stages, narrow, optimizer, part, step, to};

const FROZEN: [&str; 2] = ["layers.1", "bias"];
const DTYPES: [Option<DType>; 3] = [None, Some(DType::F16), Some(DType::F32)];

fn sidecars() -> Vec<(String, Vec<u8>)> {
    let file = |name: &str| (name.to_string(), name.repeat(9).into_bytes());
    ["additional_chat_templates/a.jinja", "config.json"]
        .map(file)
        .to_vec()
}

/// In several files.
fn save(dir: &Path, dtype: Option<DType>) -> HfSave {
    HfSave {
        max_file_bytes: 300,
        sidecars: sidecars(),
        ..to(dir, dtype)
    }
}

/// Two steps of a run from `input`, or from random weights; its checkpoint, and what it saves in each of [`DTYPES`].
fn run(chain: Chain, input: Option<&Path>, (layout, zero): (Layout, ZeroStage)) -> TempDir {
    let dir = tempdir().unwrap();
    on_mesh(layout, |mesh| {
        let store = match input {
            Some(input) => ParamStore::from_pretrained(input)?,
            None => ParamStore::init(5),
        };
        let store = store.with_data_parallel(zero);
        let store = store.freeze(|name| FROZEN.iter().any(|part| name.contains(part)));
        let stage = part(chain, &mesh, store)?;
        let mut optimizer = optimizer(&stage, &mesh)?;
        step(&stage, &mesh, &mut optimizer)?;
        step(&stage, &mesh, &mut optimizer)?;
        let saver = CheckpointSaver::new(&mesh.world, &dir.path().join("saves"), 1, None)?;
        let mut saver = saver.with_sidecars(sidecars());
        saver.start(&optimizer, 2, json!(null))?;
        saver.finish()?.unwrap().saved.unwrap();
        for (index, dtype) in DTYPES.into_iter().enumerate() {
            optimizer.save_hf(&save(&dir.path().join(format!("saved-{index}")), dtype))?;
        }
        Ok(())
    });
    dir
}

fn open(dir: &TempDir) -> TrainingCheckpoint {
    let world = ProcessGroup::single(Device::Cpu);
    TrainingCheckpoint::open(&world, &dir.path().join("saves/step-000002")).unwrap()
}

#[test]
fn it_equals_what_the_run_saves_from_every_layout() -> Result<()> {
    let inputs = [
        (true, Some(DType::F32)),
        (false, Some(DType::BF16)),
        (true, None),
    ];
    for (place, (tied, stored)) in inputs.into_iter().enumerate() {
        let input = stored.map(|dtype| folder(tied, dtype));
        let input = input.as_ref().map(TempDir::path);
        // Between them every layout and every stage.
        for case in layouts_and_stages().skip(place).step_by(5) {
            for chain in [
                narrow(tied),
                Chain {
                    tied,
                    ..Chain::default()
                },
            ] {
                let dir = run(chain, input, case);
                let checkpoint = open(&dir);
                assert_eq!(checkpoint.needs_source(), input.is_some());
                let source = input.map(Checkpoint::open).transpose()?;
                let sidecars = checkpoint.sidecars()?;
                for (index, dtype) in DTYPES.into_iter().enumerate() {
                    let output = dir.path().join("exported");
                    let save = HfSave {
                        sidecars: sidecars.clone(),
                        ..save(&output, dtype)
                    };
                    checkpoint.export_hf(&save, source.as_ref())?;
                    let want = read_folder(&dir.path().join(format!("saved-{index}")));
                    let what = format!(
                        "{case:?} tied {tied} {stored:?} {dtype:?} {:?}",
                        chain.dtype
                    );
                    assert!(want.len() > 4, "{what}");
                    assert!(read_folder(&output) == want, "{what}");
                }
            }
        }
    }
    Ok(())
}

#[test]
fn a_source_that_is_not_there_or_is_another_is_refused() -> Result<()> {
    let input = folder(false, DType::F32);
    let layout = ((1, 1, 1), ZeroStage::Zero);
    let dir = run(Chain::default(), Some(input.path()), layout);
    let checkpoint = open(&dir);
    let output = dir.path().join("exported");
    let save = save(&output, None);
    let parts = [
        "has no values of parameters that were not trained",
        input.path().to_str().unwrap(),
    ];
    assert_says(&message(checkpoint.export_hf(&save, None)), &parts);
    let narrow = folder(false, DType::BF16);
    let source = Checkpoint::open(narrow.path())?;
    let parts = ["is stored as BF16; expected F32"];
    assert_says(&message(checkpoint.export_hf(&save, Some(&source))), &parts);
    edit_file(&input.path().join("model.safetensors"), |tensors| {
        tensors.retain(|(name, ..)| name != "layers.1.up.weight");
    });
    let source = Checkpoint::open(input.path())?;
    let parts = ["layers.1.up.weight is missing"];
    assert_says(&message(checkpoint.export_hf(&save, Some(&source))), &parts);
    assert!(!output.exists());
    Ok(())
}
