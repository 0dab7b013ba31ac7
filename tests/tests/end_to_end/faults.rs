//! Ranks that fail end the run within seconds with their own error.

use std::path::Path;
use std::time::{Duration, Instant};

use candle_comm::Mesh;
use candle_core::{DType, Device, Module, Result, Tensor};
use candle_nn::Linear;
use candle_parallel::{
    Loss, ModelPart, ParamStore, Pass, PlainBlock, PlainHead, ZeroStage, plain_block, plain_head,
};
use candle_trainer::Trainer;
use safetensors::SafeTensors;
use tempfile::{TempDir, tempdir};

use crate::fixture::{Fixture, Run};
use crate::run::{Layout, batches, launch, load, train};

/// The message of something that must fail within seconds.
fn failure<T>(run: impl FnOnce() -> Result<T>) -> String {
    let started = Instant::now();
    let said = match run() {
        Ok(_) => panic!("this must fail"),
        Err(err) => err.to_string(),
    };
    let elapsed = started.elapsed();
    assert!(
        elapsed < Duration::from_secs(10),
        "took {elapsed:?}: {said}"
    );
    said
}

fn assert_says(said: &str, words: &[&str]) {
    for word in words {
        assert!(said.contains(word), "{word:?} is not in: {said}");
    }
}

fn short(fixture: &Fixture) -> Run {
    Run {
        steps: 3,
        seq_len: 8,
        micro_batch_size: 1,
        global_batch_size: 4,
        ..fixture.run.clone()
    }
}

/// The message of a run in which one token or target of replica 1 is `id`, in step 1.
fn foreign_id(id: u32, in_targets: bool) -> String {
    let (fixture, layout) = (Fixture::new("gqa"), Layout::new(2, 2, 2));
    let run = short(&fixture);
    failure(|| {
        launch(layout, |world| {
            let mesh = Mesh::new(world, layout.degrees())?;
            let config = run.train_config(layout);
            let mut trainer = Trainer::new(config, &mesh, load(&fixture, &mesh)?)?;
            let batches = batches(&fixture, &run, &mesh)?;
            for step in 0..run.steps {
                let mut micro_batches = batches.batch(step)?;
                if step == 1 && mesh.dp.rank() == 1 {
                    let batch = &mut micro_batches[1];
                    let mut ids = vec![5u32; 8];
                    ids[3] = id;
                    let ids = Tensor::from_vec(ids, (1, 8), &Device::Cpu)?;
                    *batch = match in_targets {
                        true => Pass::train(batch.inputs().clone(), ids),
                        false => Pass::train(ids, batch.targets()?.clone()),
                    };
                }
                trainer.train_step(&micro_batches)?;
            }
            Ok(())
        })
    })
}

#[test]
fn a_foreign_token_in_one_replica() {
    let said = foreign_id(307, false);
    let words = [
        "rank ",
        "failed",
        "step 2",
        "block 0",
        "token id 307",
        "307 tokens",
        "hint",
    ];
    assert_says(&said, &words);
    let said = foreign_id(4000, true);
    assert_says(
        &said,
        &["step 2", "block 5", "target id 4000", "position 3"],
    );
}

/// A block that multiplies, and panics when told to.
struct Panicking {
    linear: Linear,
    is_first: bool,
    panics: bool,
}

impl PlainBlock for Panicking {
    fn forward(&self, xs: &Tensor, _pass: &Pass) -> Result<Tensor> {
        assert!(!self.panics, "a block of rank 3 is broken");
        let xs = match self.is_first {
            true => {
                let tokens = xs.to_device(self.linear.weight().device())?;
                tokens
                    .to_dtype(DType::F32)?
                    .unsqueeze(2)?
                    .repeat((1, 1, 4))?
            }
            false => xs.clone(),
        };
        self.linear.forward(&xs)
    }
}

impl PlainHead for Panicking {
    fn loss(&self, xs: &Tensor, pass: &Pass) -> Result<Loss> {
        let sum = PlainBlock::forward(self, xs, pass)?.sqr()?.sum_all()?;
        Ok(Loss::new(sum, pass.num_targets()? as f64))
    }
}

#[test]
fn a_panic_in_the_forward_pass_of_one_rank() {
    let (fixture, layout) = (Fixture::new("gqa"), Layout::new(2, 2, 1));
    let run = short(&fixture);
    let said = failure(|| {
        launch(layout, |world| {
            let mesh = Mesh::new(world, layout.degrees())?;
            let vb = ParamStore::init(1).builder(DType::F32, mesh.world.device());
            let part = ModelPart::build(&mesh, &vb, 4, 4, |index, vb| {
                let vb = vb.pp(index).var_builder();
                let block = Panicking {
                    linear: candle_nn::linear(4, 4, vb)?,
                    is_first: index == 0,
                    panics: mesh.world.rank() == 3,
                };
                Ok(match index {
                    3 => plain_head(block),
                    _ => plain_block(block),
                })
            })?;
            let config = run.train_config(layout);
            let mut trainer = Trainer::new(config, &mesh, part)?;
            trainer.train(&batches(&fixture, &run, &mesh)?, |_| Ok(()))
        })
    });
    assert_says(&said, &["rank 3 failed", "a block of rank 3 is broken"]);
}

/// A copy of a fixture, to be spoiled.
fn copy(fixture: &Fixture) -> (TempDir, Fixture) {
    let dir = tempdir().unwrap();
    let model = dir.path().join("model");
    std::fs::create_dir(&model).unwrap();
    for entry in std::fs::read_dir(fixture.model_dir()).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, model.join(path.file_name().unwrap())).unwrap();
    }
    let moved = fixture.moved_to(dir.path());
    (dir, moved)
}

/// Makes the first value of an f32 tensor NaN.
fn write_nan(path: &Path, name: &str) {
    let mut bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let view = file.tensor(name).unwrap();
    let start = view.data().as_ptr() as usize - bytes.as_ptr() as usize;
    bytes[start..start + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn a_nan_in_the_weights() {
    let (_dir, fixture) = copy(&Fixture::new("gqa"));
    let file = fixture.model_dir().join("model.safetensors");
    let name = "model.layers.2.mlp.down_proj.weight";
    write_nan(&file, name);
    for (pp, dp, tp) in [(1, 1, 1), (2, 2, 2)] {
        let layout = Layout::new(pp, dp, tp);
        let said = failure(|| train_all_steps(&fixture, layout));
        assert_says(&said, &[name, "NaN or infinite", "hint"]);
    }
}

fn train_all_steps(fixture: &Fixture, layout: Layout) -> Result<()> {
    let run = short(fixture);
    launch(layout, |world| {
        let mesh = Mesh::new(world, layout.degrees())?;
        let config = run.train_config(layout);
        let mut trainer = Trainer::new(config, &mesh, load(fixture, &mesh)?)?;
        trainer.train(&batches(fixture, &run, &mesh)?, |_| Ok(()))
    })
}

#[test]
fn a_run_that_diverges_names_its_step() {
    let fixture = Fixture::new("gqa");
    let run = Run {
        lr: 1e30,
        ..short(&fixture)
    };
    let layout = Layout {
        zero: ZeroStage::One,
        ..Layout::new(2, 2, 1)
    };
    let said = failure(|| train(&fixture, &run, layout));
    let words = [
        "step 2 failed",
        "first parameter with a NaN or infinite gradient is model.",
    ];
    assert_says(&said, &words);
}

#[test]
fn a_file_that_is_cut() {
    for (name, file) in [
        ("f16_tied", "model.safetensors"),
        ("bf16_sharded", "model-00004-of-00005.safetensors"),
    ] {
        let (_dir, fixture) = copy(&Fixture::new(name));
        let path = fixture.model_dir().join(file);
        let bytes = std::fs::read(&path).unwrap();
        std::fs::write(&path, &bytes[..bytes.len() - 100]).unwrap();
        let said = failure(|| train_all_steps(&fixture, Layout::new(2, 1, 2)));
        assert_says(&said, &[file, "not a complete safetensors file"]);
    }
}
