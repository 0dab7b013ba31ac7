//! Saved checkpoints: an untrained one is what was loaded, a trained one is what candle's own Llama computes with.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use candle_comm::Mesh;
use candle_core::{DType, Device, Result, Tensor};
use candle_nn::VarBuilder;
use candle_parallel::checkpoint::{Checkpoint, HfSave, save_hf, sidecar_files};
use candle_parallel::{ModelPart, Pass, Pipeline, Schedule};
use candle_train_models::{CausalLm, ModelConfig};
use candle_trainer::Trainer;
use candle_transformers::models::llama;
use safetensors::Dtype;
use tempfile::tempdir;

use crate::fixture::{ALL, Fixture, Run};
use crate::run::{Layout, batches, launch, load};

type Raw = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

/// Every tensor of a checkpoint folder, as it is stored.
fn raw_tensors(dir: &Path) -> Raw {
    let checkpoint = Checkpoint::open(dir).unwrap();
    let tensors = checkpoint.tensors().iter();
    tensors
        .map(|(name, entry)| {
            let bytes = checkpoint.bytes(name).unwrap().to_vec();
            (name.clone(), (entry.dtype, entry.shape.clone(), bytes))
        })
        .collect()
}

fn save(
    fixture: &Fixture,
    part: &ModelPart,
    mesh: &Mesh,
    to: &Path,
    max_bytes: usize,
) -> Result<()> {
    let to = HfSave {
        max_file_bytes: max_bytes,
        overwrite: true,
        ..HfSave::new(to, sidecar_files(&fixture.model_dir())?)
    };
    save_hf(part.params(), mesh, &to)
}

#[test]
fn an_untrained_checkpoint_is_saved_as_it_was_loaded() {
    let layouts = [
        (1, 1, 1),
        (2, 2, 2),
        (3, 1, 2),
        (1, 1, 3),
        (2, 1, 4),
        (1, 1, 8),
    ];
    for name in ALL {
        let fixture = Fixture::new(name);
        let config = fixture.config();
        let expected = raw_tensors(&fixture.model_dir());
        let layouts = layouts.map(|(pp, dp, tp)| Layout::new(pp, dp, tp));
        let fits = |layout: &Layout| CausalLm::check_degrees(&config, &layout.degrees()).is_ok();
        for layout in layouts.into_iter().filter(fits) {
            for max_file_bytes in [20_000, 5_000_000_000] {
                let output = tempdir().unwrap();
                launch(layout, |world| {
                    let mesh = Mesh::new(world, layout.degrees())?;
                    let part = load(&fixture, &mesh)?;
                    save(&fixture, &part, &mesh, output.path(), max_file_bytes)
                })
                .unwrap();
                let what = format!("{name} {layout:?}");
                assert!(raw_tensors(output.path()) == expected, "{what}");
                let sidecars = |dir: &Path| sidecar_files(dir).unwrap();
                assert!(
                    sidecars(output.path()) == sidecars(&fixture.model_dir()),
                    "{what}: the files beside the weights"
                );
            }
        }
    }
}

/// Logits of the last position of `ids`, by this library's model.
fn our_logits(part: &ModelPart, mesh: &Mesh, ids: &[u32]) -> Result<Vec<f32>> {
    let batch = Pass::infer(Tensor::new(ids, &Device::Cpu)?.unsqueeze(0)?);
    let pipeline = Pipeline::new(Schedule::GPipe, mesh);
    let logits = pipeline.logits(part, &batch, &[ids.len() - 1])?;
    logits.get(0)?.to_vec1()
}

/// The same by candle's own Llama.
fn candle_logits(dir: &Path, ids: &[u32]) -> Result<Vec<f32>> {
    let text = std::fs::read_to_string(dir.join("config.json")).unwrap();
    let config: llama::LlamaConfig = serde_json::from_str(&text).unwrap();
    let config = config.into_config(false);
    let mut tensors = HashMap::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|e| e == "safetensors") {
            tensors.extend(candle_core::safetensors::load(path, &Device::Cpu)?);
        }
    }
    let vb = VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu);
    let model = llama::Llama::load(vb, &config)?;
    let mut cache = llama::Cache::new(false, DType::F32, &config, &Device::Cpu)?;
    let ids = Tensor::new(ids, &Device::Cpu)?.unsqueeze(0)?;
    model.forward(&ids, 0, &mut cache)?.squeeze(0)?.to_vec1()
}

/// Trains three steps on two stages of two ranks and saves what comes out; the logits for `ids` on each rank before it.
fn train_and_save(
    fixture: &Fixture,
    ids: &[u32],
    to: &Path,
    max_file_bytes: usize,
) -> Vec<Vec<f32>> {
    let layout = Layout::new(2, 1, 2);
    let run = Run {
        steps: 3,
        ..fixture.run.clone()
    };
    let logits = Mutex::new(Vec::new());
    launch(layout, |world| {
        let mesh = Mesh::new(world, layout.degrees())?;
        let config = run.train_config(layout);
        let mut trainer = Trainer::new(config, &mesh, load(fixture, &mesh)?)?;
        trainer.train(&batches(fixture, &run, &mesh)?, |_| Ok(()))?;
        let ours = our_logits(trainer.part(), &mesh, ids)?;
        logits.lock().unwrap().push(ours);
        save(fixture, trainer.part(), &mesh, to, max_file_bytes)
    })
    .unwrap();
    logits.into_inner().unwrap()
}

/// In the folder CANDLE_TRAIN_SAVED, if set, stays what `scripts/reference/load_check.py` compares with transformers: `NAME/model` as it is
/// saved after training, with the files of the original beside the weights; in `NAME/written` the same with a `config.json` that this
/// library wrote; `NAME/logits.safetensors` is what this library computes.
#[test]
fn trained_checkpoints_are_saved_with_the_config_they_had_or_one_that_says_the_same() {
    let temporary = tempdir().unwrap();
    let to = std::env::var_os("CANDLE_TRAIN_SAVED");
    let to = to.map_or(temporary.path().to_path_buf(), PathBuf::from);
    let ids: Vec<u32> = (0..24).map(|i| (i * 29 + 3) % 80).collect();
    for name in ALL {
        let fixture = Fixture::new(name).moved_to(&to.join(name));
        let (model, written) = (fixture.model_dir(), to.join(name).join("written"));
        train_and_save(&Fixture::new(name), &ids, &model, 60_000);
        std::fs::create_dir_all(&written).unwrap();
        for entry in std::fs::read_dir(&model).unwrap() {
            let path = entry.unwrap().path();
            std::fs::copy(&path, written.join(path.file_name().unwrap())).unwrap();
        }
        let config = fixture.config().to_json().unwrap();
        std::fs::write(written.join("config.json"), config).unwrap();
        let read = |dir: &Path| ModelConfig::from_file(dir.join("config.json")).unwrap();
        assert_eq!(read(&model), fixture.config(), "{name}");
        assert_eq!(read(&written), fixture.config(), "{name}");
        assert!(raw_tensors(&model) != raw_tensors(&Fixture::new(name).model_dir()));
        let layout = Layout::new(1, 1, 1);
        launch(layout, |world| {
            let mesh = Mesh::new(world, layout.degrees())?;
            let part = load(&fixture, &mesh)?;
            let logits = our_logits(&part, &mesh, &ids)?;
            let tensors = [
                (
                    "ids",
                    Tensor::new(ids.as_slice(), &Device::Cpu)?.to_dtype(DType::I64)?,
                ),
                ("logits", Tensor::new(logits, &Device::Cpu)?),
            ];
            let tensors: HashMap<_, _> = tensors.into_iter().collect();
            candle_core::safetensors::save(&tensors, to.join(name).join("logits.safetensors"))
        })
        .unwrap();
    }
}

#[test]
fn a_trained_checkpoint_gives_the_same_logits_in_candle_transformers() {
    let ids = [0u32, 17, 250, 33, 99, 4, 4, 180, 71];
    // candle's Llama has neither biases nor a head_dim of its own.
    for (name, vocab_size, max_file_bytes) in [("gqa", 307, 5_000_000_000), ("wide", 301, 60_000)] {
        let fixture = Fixture::new(name);
        let before = candle_logits(&fixture.model_dir(), &ids).unwrap();
        let output = tempdir().unwrap();
        let ours = train_and_save(&fixture, &ids, output.path(), max_file_bytes);
        assert_eq!(ours.len(), 4);
        let theirs = candle_logits(output.path(), &ids).unwrap();
        assert_eq!(theirs.len(), vocab_size);
        let largest = |a: &[f32], b: &[f32]| {
            let differences = a.iter().zip(b).map(|(a, b)| (a - b).abs());
            differences.fold(0f32, f32::max)
        };
        for logits in &ours {
            let difference = largest(logits, &theirs);
            assert!(difference < 1e-4, "{name}: logits off by {difference}");
        }
        assert!(largest(&before, &theirs) > 1e-2, "training changed nothing");
    }
}

/// A model whose embedding is its head, with the weight of both saved as `lm_head.weight`.
fn with_head_alone(fixture: &Fixture, to: &Path) -> Fixture {
    let fixture_of_head = fixture.moved_to(to);
    let model = fixture_of_head.model_dir();
    std::fs::create_dir_all(&model).unwrap();
    for entry in std::fs::read_dir(fixture.model_dir()).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, model.join(path.file_name().unwrap())).unwrap();
    }
    let mut tensors = raw_tensors(&fixture.model_dir());
    let embedding = tensors.remove("model.embed_tokens.weight").unwrap();
    tensors.insert("lm_head.weight".to_string(), embedding);
    let views = tensors.iter().map(|(name, (dtype, shape, bytes))| {
        let view = safetensors::tensor::TensorView::new(*dtype, shape.clone(), bytes);
        (name, view.unwrap())
    });
    let bytes = safetensors::serialize(views, None).unwrap();
    std::fs::write(model.join("model.safetensors"), bytes).unwrap();
    fixture_of_head
}

#[test]
fn a_tied_pair_that_is_there_as_the_head_alone_trains_as_the_embedding_does() {
    let ids = [0u32, 17, 33, 9, 4, 4, 71];
    for name in ["tied_bias", "f16_tied"] {
        let (fixture, dir) = (Fixture::new(name), tempdir().unwrap());
        let of_head = with_head_alone(&fixture, dir.path());
        let config = fixture.config();
        CausalLm::check_weights(&config, &of_head.model_dir()).unwrap();
        let [want, found] = [&fixture, &of_head].map(|fixture| {
            let output = tempdir().unwrap();
            let logits = train_and_save(fixture, &ids, output.path(), 5_000_000_000);
            (logits, raw_tensors(output.path()))
        });
        assert_eq!(found.0, want.0, "{name}");
        let embedding = &want.1["model.embed_tokens.weight"];
        assert!(*embedding != raw_tensors(&fixture.model_dir())["model.embed_tokens.weight"]);
        // Under the name that the model has for it, and that of the file.
        assert!(found.1["lm_head.weight"] == *embedding);
        assert!(want.1.iter().all(|(name, tensor)| found.1[name] == *tensor));
        // Of a model that is not tied the embedding is missing.
        let untied = ModelConfig {
            tie_word_embeddings: false,
            ..config
        };
        let err = CausalLm::check_weights(&untied, &of_head.model_dir()).unwrap_err();
        let missing = "tensor model.embed_tokens.weight is missing";
        assert!(err.to_string().contains(missing), "{err}");
    }
}
