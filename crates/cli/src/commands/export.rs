//! `candle-train export`

use std::path::{Path, PathBuf};

use candle_comm::ProcessGroup;
use candle_core::{DType, Device, Error, Result, bail};
use candle_parallel::checkpoint::{
    Checkpoint, CheckpointManifest, HfSave, TrainingCheckpoint, with_config_dtype,
};
use candle_train_models::{CausalLm, GgufType, ModelConfig};
use candle_train_run::{
    GgufExport, GgufSource, WEIGHTS, digest_of_weights, float_type, is_adapter, num_bytes,
    print_line, refuse_adapter, resolve_base,
};
use candle_trainer::hub::{is_gguf, resolve_model};
use candle_trainer::{Activity, TrainingRecord};
use clap::Args;

/// Write a model as a GGUF file for llama.cpp and Ollama, or that of a run's checkpoint as a Hugging Face folder, in little memory
#[derive(Args, Debug)]
pub(crate) struct Export {
    /// Checkpoint, such as runs/a/step-000015; for a GGUF file also a model's folder, org/name[@revision] on the hub, or an adapter's folder,
    /// which is folded into its base
    #[arg(value_name = "MODEL|CHECKPOINT|ADAPTER")]
    source: String,
    /// Folder for the model, or a GGUF file, whose name ends in .gguf
    #[arg(value_name = "OUT")]
    output: PathBuf,
    /// Type of most tensors of a GGUF file [default: that of the model's weights]
    #[arg(long = "type", value_name = "TYPE", ignore_case = true)]
    gguf_type: Option<GgufType>,
    /// Write the adapter alone, as llama.cpp takes it beside its base (--lora)
    #[arg(long)]
    adapter_only: bool,
    /// Write Ollama's Modelfile beside the GGUF file
    #[arg(long)]
    modelfile: bool,
    /// Type of the weights in a folder [default: that of the run's own --output]
    #[arg(long, value_parser = float_type())]
    dtype: Option<DType>,
    /// Size of the largest file of weights in a folder [default: 5GB]
    #[arg(long, value_name = "SIZE", value_parser = num_bytes)]
    max_shard_size: Option<usize>,
    /// Replace a model in the output folder, or the GGUF file and Modelfile that are there
    #[arg(long)]
    overwrite: bool,
    /// Where the checkpoint folder with which the run began is now, or org/name[@revision] on the hub; it has the weights that were not
    /// trained. Of an adapter: its base. Only where these are needed [default: where it was]
    #[arg(long, value_name = "DIR|REPO")]
    model: Option<String>,
}

const NOW_HINT: &str =
    "hint: --model names the folder where the model with which the run began is now";

/// The checkpoint in a folder, all of which is read and compared with its checksums.
fn open(dir: &Path) -> Result<TrainingCheckpoint> {
    let _reading = Activity::start("reading the checkpoint");
    TrainingCheckpoint::open(&ProcessGroup::single(Device::Cpu), dir)
}

impl Export {
    /// Writes the folder, or the file.
    pub fn run(&self) -> Result<()> {
        if is_gguf(&self.output) {
            return self.gguf();
        }
        let of_files = [
            ("--type", self.gguf_type.is_some()),
            ("--adapter-only", self.adapter_only),
            ("--modelfile", self.modelfile),
        ];
        if let Some((flag, _)) = of_files.iter().find(|(_, is_given)| *is_given) {
            bail!(
                "{flag} is given, and {} is no GGUF file by its name\nhint: such a file's name ends in .gguf: {}.gguf",
                self.output.display(),
                self.output.display()
            );
        }
        self.folder(Path::new(&self.source))
    }

    /// Writes a GGUF file.
    fn gguf(&self) -> Result<()> {
        let of_folders = [
            ("--dtype", self.dtype.is_some()),
            ("--max-shard-size", self.max_shard_size.is_some()),
        ];
        if let Some((flag, _)) = of_folders.iter().find(|(_, is_given)| *is_given) {
            bail!(
                "{flag} is given, and is about a folder of weights; the type of a GGUF file is that of --type"
            );
        }
        let export = GgufExport {
            source: self.gguf_source()?,
            output: self.output.clone(),
            dtype: self.gguf_type,
            adapter_only: self.adapter_only,
            modelfile: self.modelfile,
            overwrite: self.overwrite,
            run: None,
        };
        export.run()?.iter().for_each(|line| print_line(line));
        print_line(&export.in_words());
        Ok(())
    }

    fn gguf_source(&self) -> Result<GgufSource> {
        let dir = Path::new(&self.source);
        if is_adapter(dir) {
            let model = resolve_base(dir, self.model.as_deref())?;
            let adapter = dir.to_path_buf();
            return Ok(GgufSource::Adapter { model, adapter });
        }
        if !CheckpointManifest::is_in(dir) {
            if let Some(model) = &self.model {
                bail!(
                    "--model {model} is given, and {} is a model itself\nhint: leave it out",
                    self.source
                );
            }
            return resolve_model(&self.source).map(GgufSource::Model);
        }
        let checkpoint = open(dir)?;
        let model = match checkpoint.manifest().lora.is_some() {
            true => Some(self.source_folder(&checkpoint)?),
            false => {
                let record = TrainingRecord::of(&checkpoint)?;
                let source = self.source(&checkpoint, &record)?;
                source.map(|source| source.dir().to_path_buf())
            }
        };
        Ok(GgufSource::Checkpoint {
            checkpoint: Box::new(checkpoint),
            model,
        })
    }

    /// Writes a Hugging Face folder.
    fn folder(&self, dir: &Path) -> Result<()> {
        let output = self.output.display();
        if is_adapter(dir) {
            bail!(
                "{} is an adapter, and no checkpoint of a run\nhint: a model with it folded in is made by candle-train merge --adapter \
                 {} --output {output}",
                dir.display(),
                dir.display()
            );
        }
        if dir.join("config.json").is_file() && !CheckpointManifest::is_in(dir) {
            bail!(
                "{} is a model, and {output} is no GGUF file by its name: a folder is written of a checkpoint of a run\nhint: a GGUF file's name ends in \
                 .gguf: {output}.gguf",
                dir.display()
            );
        }
        let checkpoint = open(dir)?;
        let record = TrainingRecord::of(&checkpoint)?;
        let source = self.source(&checkpoint, &record)?;
        let sidecars = checkpoint.sidecars()?;
        if sidecars.is_empty() {
            bail!(
                "the checkpoint {} has no config.json: the program that wrote it did not give one",
                dir.display()
            );
        }
        let dtype = match (self.dtype, &record.save_dtype) {
            (Some(dtype), _) => Some(dtype),
            (None, Some(dtype)) => Some(dtype.parse::<DType>().map_err(Error::wrap)?),
            (None, None) => None,
        };
        let inputs = source.iter().map(|source| source.dir().to_path_buf());
        let save = HfSave::new(&self.output, with_config_dtype(sidecars, dtype)?);
        let save = HfSave {
            dtype,
            max_file_bytes: self.max_shard_size.unwrap_or(save.max_file_bytes),
            overwrite: self.overwrite,
            inputs: inputs.chain([dir.to_path_buf()]).collect(),
            ..save
        };
        save.check_output()?;
        let written = save.num_written_bytes.clone();
        let writing = Activity::of_bytes("writing the model", None, written);
        checkpoint.export_hf(&save, source.as_ref())?;
        drop(writing);
        let step = checkpoint.step();
        print_line(&format!("the model after step {step} is in {output}"));
        Ok(())
    }

    /// The checkpoint with which the run began, if it has anything that is to be saved.
    fn source(
        &self,
        checkpoint: &TrainingCheckpoint,
        record: &TrainingRecord,
    ) -> Result<Option<Checkpoint>> {
        match (&self.model, checkpoint.needs_source()) {
            (Some(model), false) => bail!(
                "--model {model} is given, and the checkpoint {} has all weights itself\nhint: leave it out",
                checkpoint.dir().display()
            ),
            (None, false) => return Ok(None),
            (_, true) => {}
        }
        let dir = self.source_folder(checkpoint)?;
        let noted = record.model.get(WEIGHTS).and_then(|value| value.as_str());
        if let (Some(noted), found) = (noted, digest_of_weights(&dir)?)
            && found != noted
        {
            bail!(
                "the weights in {} are not those with which the run began: they have the digest {found}; expected {noted}\n{NOW_HINT}",
                dir.display()
            );
        }
        let config = ModelConfig::from_file(dir.join("config.json"))?;
        CausalLm::open_weights(&config, &dir).map(Some)
    }

    /// The folder of the model with which the run began.
    fn source_folder(&self, checkpoint: &TrainingCheckpoint) -> Result<PathBuf> {
        match (&self.model, &checkpoint.manifest().source) {
            (Some(model), _) => {
                refuse_adapter(model)?;
                resolve_model(model)
            }
            (None, Some(dir)) if dir.is_dir() => Ok(dir.clone()),
            (None, dir) => bail!(
                "the run began with the model in {}, which has weights that were not trained, and it is not there\n{NOW_HINT}",
                dir.as_ref()
                    .map_or("no folder".into(), |dir| dir.display().to_string())
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use candle_comm::{Degrees, Mesh, ProcessGroup};
    use candle_core::{DType, Device, Result};
    use candle_parallel::checkpoint::CheckpointSaver;
    use candle_parallel::{AdamWConfig, DistributedOptimizer, ParamStore};
    use candle_train_models::{CausalLm, GgufType, ModelConfig};
    use candle_trainer::TrainingRecord;
    use serde_json::json;
    use tempfile::tempdir;

    use candle_train_run::{Allocator, peak_bytes_of};

    use super::Export;

    #[global_allocator]
    static ALLOCATOR: Allocator = candle_train_run::ALLOCATOR;

    /// A checkpoint of a model whose embedding and head have 16 MiB each in f32.
    fn save(dir: &Path) -> Result<()> {
        let mesh = Mesh::new(ProcessGroup::single(Device::Cpu), Degrees::default())?;
        let config = json!({
            "model_type": "llama", "vocab_size": 32768, "hidden_size": 128, "intermediate_size": 8,
            "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1,
            "rms_norm_eps": 1e-5, "max_position_embeddings": 8, "tie_word_embeddings": false,
            "bos_token_id": 0, "eos_token_id": 1,
        })
        .to_string();
        let vb = ParamStore::init(5).builder(DType::BF16, &Device::Cpu);
        let part = CausalLm::part(&ModelConfig::from_json(&config)?, &mesh, &vb)?;
        let params = part.params();
        let optimizer = DistributedOptimizer::adamw(params, &mesh, AdamWConfig::default())?;
        let mut sidecars = vec![("config.json".to_string(), config.into_bytes())];
        let files = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../../tests/fixtures/gqa/model"
        );
        let tokenizer = fs::read(Path::new(files).join("tokenizer.json")).unwrap();
        sidecars.push(("tokenizer.json".to_string(), tokenizer));
        let saver = CheckpointSaver::new(&mesh.world, dir, 1, None)?;
        let mut saver = saver.with_sidecars(sidecars);
        let record = serde_json::to_value(TrainingRecord::default()).unwrap();
        saver.start(&optimizer, 1, record)?;
        saver.finish()?.unwrap().saved.unwrap();
        Ok(())
    }

    /// Whole tensors are never in memory.
    #[test]
    fn it_takes_little_memory() {
        let dir = tempdir().unwrap();
        save(&dir.path().join("saves")).unwrap();
        let export = |output: &str, dtype, gguf_type| Export {
            source: dir.path().join("saves/step-000001").display().to_string(),
            output: dir.path().join(output),
            gguf_type,
            adapter_only: false,
            modelfile: false,
            dtype,
            max_shard_size: None,
            overwrite: true,
            model: None,
        };
        for dtype in [DType::F32, DType::BF16] {
            let export = export("exported", Some(dtype), None);
            let peak = peak_bytes_of(|| export.run().unwrap());
            assert!(peak < 14 << 20, "{dtype:?}: {peak} bytes");
        }
        // The tokens of 32768 rows are, and a few blocks of rows for each thread.
        for gguf_type in [GgufType::F32, GgufType::Q8_0, GgufType::Q4KM] {
            let export = export("exported.gguf", None, Some(gguf_type));
            let peak = peak_bytes_of(|| export.run().unwrap());
            assert!(peak < 28 << 20, "{gguf_type:?}: {peak} bytes");
        }
    }
}
