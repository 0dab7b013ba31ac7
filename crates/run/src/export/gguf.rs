//! A model as a GGUF file, for llama.cpp and Ollama: from a folder, from a checkpoint of a run, or with an adapter folded in.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use candle_comm::{message_of, start_threads};
use candle_core::{DType, Error, Result, bail};
use candle_parallel::Adapter;
use candle_parallel::checkpoint::{
    HfSave, Leftover, SpaceNeed, TrainingCheckpoint, check_free_space, size_in_words,
};
use candle_parallel::gguf::{
    CheckpointWeights, GgmlDType, GgufContent, GgufFile, GgufMetadata, GgufReader, GgufTensor,
    GgufValue, MergedModel, RowChange, Weights,
};
use candle_train_models::{CausalLm, GgufType, ModelConfig, gguf_layer};
use candle_trainer::{Activity, ChatTemplate, Tokenizer, WholeFile, gguf_vocab};
use tempfile::TempDir;

use crate::export::generation_config::GenerationFile;

/// A GGUF file to be written.
pub struct GgufExport {
    /// What is written.
    pub source: GgufSource,
    /// The file.
    pub output: PathBuf,
    /// The type of most tensors; `None`: that of the model's embedding, of an adapter alone f32.
    pub dtype: Option<GgufType>,
    /// Whether the adapter is written alone, for llama.cpp's `--lora`.
    pub adapter_only: bool,
    /// Whether Ollama's Modelfile is written beside it.
    pub modelfile: bool,
    /// Whether files that are there are replaced.
    pub overwrite: bool,
    /// What decides the file's content, of a file that a run writes. It is noted in the file, and one that has the same is replaced without
    /// [`Self::overwrite`].
    pub run: Option<String>,
}

/// The key of [`GgufExport::run`].
const RUN_KEY: &str = "candle_train.run";

/// The model of a file.
pub enum GgufSource {
    /// A folder.
    Model(PathBuf),
    /// An adapter, in a folder, and the folder of its base.
    Adapter {
        /// The base.
        model: PathBuf,
        /// The adapter.
        adapter: PathBuf,
    },
    /// A run's checkpoint, and the folder of the model with which the run began, for what was not trained.
    Checkpoint {
        /// The checkpoint, which has been read whole once for its checksums.
        checkpoint: Box<TrainingCheckpoint>,
        /// The model.
        model: Option<PathBuf>,
    },
}

/// What is not a weight.
pub(crate) struct Parts {
    config: ModelConfig,
    pub tokenizer: Tokenizer,
    /// If it is a model for conversations.
    pub template: Option<ChatTemplate>,
    pub generation: GenerationFile,
}

impl Parts {
    /// Those in a folder, where an adapter has its own template and settings with these.
    fn read(dir: &Path, adapter: Option<&Path>) -> Result<Self> {
        let config = ModelConfig::from_file(dir.join("config.json"))?;
        let tokenizer = Tokenizer::from_dir(dir)?;
        let template = match ChatTemplate::in_place_of_own(Some(dir), None, adapter, &tokenizer)? {
            Some(template) => Some(template),
            None => ChatTemplate::from_dir(dir, tokenizer.named_special_tokens().clone())?,
        };
        Ok(Self {
            generation: GenerationFile::read(dir, adapter)?,
            config,
            tokenizer,
            template,
        })
    }
}

impl GgufExport {
    /// An error if the file could not be written, or not of this model; nothing is made. Lines that say what llama.cpp will do otherwise.
    ///
    /// # Errors
    /// What llama.cpp does not know; files that are there.
    pub fn check(&self, config: &ModelConfig, tokenizer: &Tokenizer) -> Result<Vec<String>> {
        self.check_output()?;
        config.check_gguf()?;
        let vocab = gguf_vocab(tokenizer, config.vocab_size, None, &[])?;
        let mut lines = config.gguf_differences();
        lines.extend(vocab.differences);
        Ok(lines)
    }

    /// What the file of this model takes, but for its tokens: for [`check_free_space`].
    ///
    /// # Errors
    /// As for [`Self::check`].
    pub fn space_need(&self, config: &ModelConfig) -> Result<SpaceNeed> {
        let (tensors, _) = config.gguf_tensors(self.dtype.unwrap_or(GgufType::F32))?;
        Ok(SpaceNeed {
            num_bytes: tensors.iter().map(GgufTensor::num_bytes).sum(),
            ..self.space_of(0)
        })
    }

    fn space_of(&self, num_bytes: u64) -> SpaceNeed {
        let folder = self.output.parent();
        let folder = folder.filter(|dir| !dir.as_os_str().is_empty());
        SpaceNeed {
            folder: folder.unwrap_or(Path::new(".")).to_path_buf(),
            num_bytes,
            what: "the GGUF file",
        }
    }

    fn check_output(&self) -> Result<()> {
        let modelfile = self.modelfile.then(|| self.place_of_modelfile());
        for path in [self.output.clone()].into_iter().chain(modelfile) {
            if path.is_dir() {
                bail!(
                    "{} is a folder; expected the name of a file",
                    path.display()
                );
            }
            // Of a link the file at its end would be replaced.
            let end = path.canonicalize().unwrap_or_else(|_| path.clone());
            if end.extension() != path.extension() {
                bail!(
                    "{} is a link to {}, which is another kind of file",
                    path.display(),
                    end.display()
                );
            }
            if path.symlink_metadata().is_ok() && !self.overwrite && !self.is_own(&path) {
                bail!(
                    "{} exists already\nhint: --overwrite replaces it",
                    path.display()
                );
            }
        }
        Ok(())
    }

    /// Whether an earlier run of the same command has written the file at `path`.
    fn is_own(&self, path: &Path) -> bool {
        let Some(run) = &self.run else { return false };
        let file = GgufReader::open(path).map(|file| file.metadata());
        file.is_ok_and(
            |metadata| matches!(metadata.get(RUN_KEY), Some(GgufValue::String(own)) if own == run),
        )
    }

    fn place_of_modelfile(&self) -> PathBuf {
        self.output.with_file_name("Modelfile")
    }

    /// Writes it; lines that say what was done, and what llama.cpp does otherwise.
    ///
    /// # Errors
    /// What llama.cpp does not know; files that are there, or cannot be read or written. What was there is as it was then.
    pub fn run(&self) -> Result<Vec<String>> {
        self.check_output()?;
        match &self.source {
            GgufSource::Model(dir) => {
                let parts = Parts::read(dir, None)?;
                self.write(&parts, &CausalLm::open_weights(&parts.config, dir)?)
            }
            GgufSource::Adapter { model, adapter } => self.write_adapter(model, adapter),
            GgufSource::Checkpoint { checkpoint, model } => {
                self.write_checkpoint(checkpoint, model.as_deref())
            }
        }
    }

    fn write_adapter(&self, model: &Path, adapter: &Path) -> Result<Vec<String>> {
        let parts = Parts::read(model, Some(adapter))?;
        let folded = Adapter::open(adapter)?;
        if self.adapter_only {
            return self.write_alone(&parts, model, &folded);
        }
        if parts.config.tie_word_embeddings && folded.modules()?.contains("lm_head") {
            bail!(
                "the adapter in {} changes lm_head, which is the embedding in {}: a file has one weight for both",
                adapter.display(),
                model.display()
            );
        }
        let base = CausalLm::open_weights(&parts.config, model)?;
        self.write(&parts, &MergedModel::new(&base, &folded)?)
    }

    fn write_checkpoint(
        &self,
        checkpoint: &TrainingCheckpoint,
        model: Option<&Path>,
    ) -> Result<Vec<String>> {
        let make = || {
            let files = TempDir::new()?;
            let path = files.path().to_path_buf();
            Ok((files, path))
        };
        let (files, _leftover) = Leftover::with_content(make).map_err(Error::wrap)?;
        if checkpoint.manifest().lora.is_some() {
            let Some(model) = model else {
                bail!(
                    "the checkpoint {} is of an adapter, and the model that it was trained on is not known",
                    checkpoint.dir().display()
                );
            };
            let adapter = files.path().join("adapter");
            let save = HfSave::new(&adapter, checkpoint.sidecars()?);
            checkpoint.export_hf(&save, None)?;
            return self.write_adapter(model, &adapter);
        }
        for (name, content) in checkpoint.sidecars()? {
            let path = files.path().join(name);
            if let Some(folder) = path.parent() {
                fs::create_dir_all(folder)?;
            }
            fs::write(path, content)?;
        }
        let parts = Parts::read(files.path(), None)?;
        let source = model.map(|dir| CausalLm::open_weights(&parts.config, dir));
        let source = source.transpose()?;
        let weights = CheckpointWeights {
            checkpoint,
            source: source.as_ref(),
        };
        self.write(&parts, &weights)
    }

    fn write(&self, parts: &Parts, weights: &dyn Weights) -> Result<Vec<String>> {
        if self.adapter_only {
            bail!("--adapter-only is given, and what is exported is no adapter");
        }
        let Parts {
            config, tokenizer, ..
        } = parts;
        let dtype = match self.dtype {
            Some(dtype) => dtype,
            None => match weights.dtype("model.embed_tokens.weight")? {
                DType::F16 => GgufType::F16,
                DType::BF16 => GgufType::Bf16,
                _ => GgufType::F32,
            },
        };
        let mut lines = config.gguf_differences();
        let (tensors, others) = config.gguf_tensors(dtype)?;
        lines.extend(others);
        check_all_written(config, &tensors, weights)?;
        let num_values: usize = tensors
            .iter()
            .map(|tensor| tensor.shape.iter().product::<usize>())
            .sum();
        let mut metadata = config.gguf_metadata(&self.name(), dtype, num_values as u64);
        let template = parts.template.as_ref();
        let eos_ids = parts.generation.eos_ids(config);
        let vocab = gguf_vocab(tokenizer, config.vocab_size, template, eos_ids)?;
        lines.extend(vocab.differences);
        let adds_bos = adds_bos(&vocab.metadata);
        metadata.extend(vocab.metadata);
        self.write_file(metadata, tensors, weights)?;
        let from = format!("FROM ./{}", self.file_name());
        lines.extend(self.write_modelfile(parts, &from, adds_bos)?);
        Ok(lines)
    }

    /// The adapter by itself.
    fn write_alone(&self, parts: &Parts, model: &Path, adapter: &Adapter) -> Result<Vec<String>> {
        let config = &parts.config;
        let dtype = match self.dtype {
            None | Some(GgufType::F32) => GgmlDType::F32,
            Some(GgufType::F16) => GgmlDType::F16,
            Some(GgufType::Bf16) => GgmlDType::BF16,
            Some(other) => bail!(
                "--type {} is given with --adapter-only; the matrices of an adapter are written as f32, f16 or bf16",
                other.name()
            ),
        };
        let (of_model, _) = config.gguf_tensors(GgufType::F32)?;
        let changes = of_model.iter().filter_map(|tensor| match &tensor.content {
            GgufContent::Weight { change, .. } => Some((tensor.name.as_str(), *change)),
            GgufContent::Values(_) => None,
        });
        let changes: Vec<_> = changes.collect();
        let mut tensors = Vec::new();
        for module in adapter.modules()? {
            let layer = gguf_layer(&module).map(|layer| format!("{layer}.weight"));
            let found = layer.and_then(|layer| changes.iter().find(|(name, _)| *name == layer));
            let Some((name, change)) = found else {
                bail!(
                    "the adapter in {} is of the layer {module}, which llama.cpp has no adapters for, or the model in {} does not have",
                    adapter.weights().dir().display(),
                    model.display()
                );
            };
            for matrix in ["A", "B"] {
                let stored = Adapter::name_in_file(&module, matrix);
                tensors.push(GgufTensor {
                    name: format!("{name}.lora_{}", matrix.to_lowercase()),
                    shape: adapter.weights().entry(&stored)?.shape.clone(),
                    dtype,
                    content: GgufContent::Weight {
                        name: stored,
                        // The rows of the product are those of B.
                        change: match matrix {
                            "B" => *change,
                            _ => RowChange::None,
                        },
                    },
                });
            }
        }
        let mut metadata = GgufMetadata::default();
        metadata.set_text("general.architecture", config.family.gguf_architecture);
        metadata.set_text("general.type", "adapter");
        metadata.set_text("general.name", self.name());
        metadata.set_text("adapter.type", "lora");
        // llama.cpp divides it by the rank.
        let lora = adapter.config();
        metadata.set_number("adapter.lora.alpha", lora.scale() * lora.rank as f64);
        self.write_file(metadata, tensors, adapter.weights())?;
        let base = model.canonicalize().unwrap_or_else(|_| model.to_path_buf());
        let from = format!("FROM {}\nADAPTER ./{}", base.display(), self.file_name());
        let (tokenizer, template) = (&parts.tokenizer, parts.template.as_ref());
        let eos_ids = parts.generation.eos_ids(config);
        let vocab = gguf_vocab(tokenizer, config.vocab_size, template, eos_ids)?;
        let missing = self.write_modelfile(parts, &from, adds_bos(&vocab.metadata))?;
        Ok(missing.into_iter().collect())
    }

    fn file_name(&self) -> String {
        let name = self.output.file_name().unwrap_or_default();
        name.to_string_lossy().into_owned()
    }

    /// What the model is called.
    fn name(&self) -> String {
        let name = self.output.file_stem().unwrap_or_default();
        name.to_string_lossy().into_owned()
    }

    fn write_file(
        &self,
        mut metadata: GgufMetadata,
        tensors: Vec<GgufTensor>,
        weights: &dyn Weights,
    ) -> Result<()> {
        if let Some(run) = &self.run {
            metadata.set_text(RUN_KEY, run);
        }
        let num_written_bytes: Arc<AtomicU64> = Arc::default();
        let file = GgufFile {
            metadata,
            tensors,
            num_written_bytes: num_written_bytes.clone(),
        };
        let shown = self.output.display();
        let num_bytes = file.num_bytes();
        let need = self.space_of(num_bytes);
        check_free_space(std::slice::from_ref(&need))?;
        let cannot =
            |err: &dyn std::fmt::Display| Error::msg(format!("cannot write {shown}: {err}"));
        fs::create_dir_all(&need.folder).map_err(|err| cannot(&err))?;
        let mut out = WholeFile::create(&self.output).map_err(|err| cannot(&err))?;
        let total = Some(num_bytes);
        let writing = Activity::of_bytes("writing the GGUF file", total, num_written_bytes);
        start_threads()?;
        let written = file.write(weights, &mut out);
        written.map_err(|err| cannot(&message_of(&err)))?;
        // What has been put there meanwhile must not be lost either.
        self.check_output()?;
        out.commit().map_err(|err| cannot(&err))?;
        drop(writing);
        Ok(())
    }

    /// Writes the Modelfile, if it is asked for: what is to be known of it.
    fn write_modelfile(&self, parts: &Parts, from: &str, adds_bos: bool) -> Result<Option<String>> {
        if !self.modelfile {
            return Ok(None);
        }
        let (text, missing) = parts.modelfile(from, adds_bos);
        let place = self.place_of_modelfile();
        let write = || -> std::io::Result<()> {
            let mut file = WholeFile::create(&place)?;
            file.write_all(text.as_bytes())?;
            file.commit()
        };
        match write() {
            Ok(()) => Ok(missing),
            Err(err) => bail!("cannot write {}: {err}", place.display()),
        }
    }

    /// What was written, for people.
    pub fn in_words(&self) -> String {
        let size = self.output.metadata().map_or(0, |file| file.len());
        let modelfile = match self.modelfile {
            true => format!(", and {}", self.place_of_modelfile().display()),
            false => String::new(),
        };
        format!(
            "wrote {} ({}){modelfile}",
            self.output.display(),
            size_in_words(size)
        )
    }
}

/// Whether llama.cpp puts the first token before a text by itself, as the file says of its tokenizer.
fn adds_bos(vocab: &GgufMetadata) -> bool {
    let adds_bos = vocab.get("tokenizer.ggml.add_bos_token");
    matches!(adds_bos, Some(GgufValue::Bool(true)))
}

/// An error if the model has a weight that the file would not.
fn check_all_written(
    config: &ModelConfig,
    tensors: &[GgufTensor],
    weights: &dyn Weights,
) -> Result<()> {
    let is_written = |name: &str| {
        tensors.iter().any(|tensor| match &tensor.content {
            GgufContent::Weight { name: own, .. } => own == name,
            GgufContent::Values(_) => false,
        })
    };
    let is_left_out = |name: &str| {
        let is_head_again = config.tie_word_embeddings && name == "lm_head.weight";
        is_head_again || name.ends_with(".rotary_emb.inv_freq")
    };
    let names = weights.names();
    match names
        .iter()
        .find(|name| !is_written(name) && !is_left_out(name))
    {
        None => Ok(()),
        Some(name) => bail!(
            "the model has the tensor {name}, which its config.json does not describe: it would be missing from the file"
        ),
    }
}
