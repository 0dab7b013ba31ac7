//! The last file of a checkpoint, without which it does not exist: what it holds, and how to tell whether it is whole.

use std::hash::Hasher;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use candle_core::{Result, bail};
use serde::{Deserialize, Serialize};
use twox_hash::XxHash64;

use super::folder::CheckpointFolder;
use super::rank_file;
use crate::checkpoint::model_folder::is_sidecar;
use crate::checkpoint::save::write_small;
use crate::checkpoint::saved_model::{ParamRecord, SavedModel};
use crate::data_parallel::ZeroStage;
use crate::files::{open_file, read_text_file};
use crate::lora::LoraConfig;
use crate::optimizer::OptimizerCounters;
use crate::params::{Parameters, SaveSource};
use crate::view::View;

pub(super) const MANIFEST_FILE: &str = "manifest.json";
/// Folder of the files that a model has beside its weights.
const MODEL_FOLDER: &str = "model";
/// What the file says it is.
const FORMAT: &str = "candle-train training checkpoint";
/// Changes when an older program could not read what a newer one writes, or the other way round.
const VERSION: u32 = 2;

/// What a training checkpoint holds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct CheckpointManifest {
    /// The run that wrote it.
    pub run: String,
    /// Steps that were done.
    pub step: usize,
    /// Version of the program.
    pub program: String,
    /// When the save began, in seconds since 1970 UTC.
    pub saved_at_secs: u64,
    /// Loss of these weights on held-out data, if it was computed.
    pub eval_loss: Option<f64>,
    /// How it was written; any other layout can read it.
    pub layout: SavedLayout,
    /// Steps of the optimizer and its loss scale.
    pub(super) optimizer: OptimizerCounters,
    /// Folder of the checkpoint that the parameters came from, which has the values of frozen ones.
    pub source: Option<PathBuf>,
    /// The low-rank adapters of the model, which are all that is saved of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lora: Option<LoraConfig>,
    /// In name order.
    pub params: Vec<ParamRecord>,
    /// Tensors of the source that are no parameters: names, and which parameter each repeats.
    pub(super) extras: Vec<(String, Option<String>)>,
    /// In name order.
    pub files: Vec<FileRecord>,
    /// What the caller adds.
    pub record: serde_json::Value,
}

/// Of checkpoints from before there was a choice.
fn one() -> usize {
    1
}

/// How a checkpoint was divided over ranks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct SavedLayout {
    /// Pipeline stages.
    pub pp: usize,
    /// Replicas.
    pub dp: usize,
    /// Ranks that shared a sequence.
    #[serde(default = "one")]
    pub cp: usize,
    /// Tensor-parallel ranks.
    pub tp: usize,
    /// What the replicas divided.
    pub zero: ZeroStage,
    /// Replicas that divided it, if not all.
    pub zero_group: Option<usize>,
}

/// A file of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct FileRecord {
    /// Name, with `/` where it is in a folder.
    pub name: String,
    /// Size.
    pub num_bytes: u64,
    /// Checksum in hexadecimal digits, as xxhsum prints it.
    pub xxh64: String,
}

/// What the caller of a save adds to the checkpoint.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CheckpointNote {
    /// Anything.
    pub record: serde_json::Value,
    /// Loss of these weights on held-out data, if it was computed: the checkpoint with the least is kept.
    pub eval_loss: Option<f64>,
}

impl From<serde_json::Value> for CheckpointNote {
    fn from(record: serde_json::Value) -> Self {
        let eval_loss = None;
        Self { record, eval_loss }
    }
}

/// What is looked at before the rest, which another version may write differently.
#[derive(Serialize, Deserialize)]
struct Envelope<T> {
    format: String,
    version: u32,
    #[serde(flatten)]
    content: T,
}

/// The text before and after the part that the checksum is of.
const PARTS: [&str; 3] = ["{\"xxh64\":\"", "\",\"manifest\":", "}\n"];

impl CheckpointManifest {
    /// Of a save that is about to begin: `save_sources` tells of each parameter of the catalog where its values are from.
    pub(super) fn new(
        params: &Parameters,
        layout: SavedLayout,
        optimizer: OptimizerCounters,
        save_sources: &[SaveSource],
        run: &str,
        step: usize,
        note: CheckpointNote,
    ) -> Self {
        let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH);
        let SavedModel {
            params,
            extras,
            source,
            lora,
        } = SavedModel::of(params, save_sources);
        Self {
            run: run.to_string(),
            step,
            program: env!("CARGO_PKG_VERSION").to_string(),
            saved_at_secs: since_1970.map_or(0, |time| time.as_secs()),
            eval_loss: note.eval_loss,
            layout,
            optimizer,
            // Wherever the program that exports it runs; a name that is no text is of no use there.
            source: source
                .and_then(|source| std::fs::canonicalize(source.dir()).ok())
                .filter(|dir| dir.to_str().is_some()),
            lora,
            params,
            extras,
            files: Vec::new(),
            record: note.record,
        }
    }

    /// An error unless the files of `dir` that are named have names of ours, each once.
    pub(super) fn check_files(&self, dir: &Path) -> Result<()> {
        for (index, file) in self.files.iter().enumerate() {
            let is_ours = file.is_of_rank() || file.sidecar().is_some();
            let is_again = self.files[..index].iter().any(|it| it.name == file.name);
            if !is_ours || is_again {
                bail!(
                    "{MANIFEST_FILE} in {} names the file {:?}; expected files of ranks and of the model, each once",
                    dir.display(),
                    file.name
                );
            }
        }
        Ok(())
    }

    /// An error if a piece has another shape than its parameter.
    pub(super) fn check_piece(&self, dir: &Path, piece: &View) -> Result<()> {
        let mut params = self.params.iter();
        match params.find(|param| param.name == piece.name) {
            Some(param) if param.shape == piece.shape => Ok(()),
            _ => bail!(
                "a file in {} has values of {} with shape {:?}, which is not in {MANIFEST_FILE}",
                dir.display(),
                piece.name,
                piece.shape
            ),
        }
    }

    /// The text of the file: the manifest and its own checksum.
    pub(super) fn to_text(&self) -> Result<String> {
        let envelope = Envelope {
            format: FORMAT.to_string(),
            version: VERSION,
            content: self,
        };
        let content = serde_json::to_string_pretty(&envelope).map_err(candle_core::Error::wrap)?;
        let sum = XxHash64::oneshot(0, content.as_bytes());
        let [before, between, after] = PARTS;
        Ok(format!("{before}{sum:016x}{between}{content}{after}"))
    }

    /// Whether the folder `dir` has a file of the name of a manifest.
    pub fn is_in(dir: &Path) -> bool {
        dir.join(MANIFEST_FILE).exists()
    }

    /// The manifest of the folder `dir`.
    ///
    /// # Errors
    /// A file that is missing, was changed, is none of ours or has another version.
    pub fn read(dir: &Path) -> Result<Self> {
        let path = dir.join(MANIFEST_FILE);
        let name = path.display();
        if !dir.is_dir() {
            bail!("the checkpoint folder {} does not exist", dir.display());
        }
        let text = match read_text_file(&path) {
            Ok(text) => text,
            Err(err) if err.kind() == ErrorKind::NotFound => {
                let inner = CheckpointFolder::new(dir).steps().unwrap_or_default();
                let newest = inner
                    .first()
                    .map(|&step| CheckpointFolder::new(dir).path(step));
                let hint = newest.map_or(String::new(), |newest| {
                    format!("\nhint: a checkpoint in it is {}", newest.display())
                });
                bail!(
                    "{} has no {MANIFEST_FILE}: it is no checkpoint, or its save never ended{hint}",
                    dir.display()
                )
            }
            Err(err) => bail!("cannot read {name}: {err}"),
        };
        let Some((sum, content)) = parts(&text) else {
            bail!(
                "{name} ({} bytes) is not the manifest of a training checkpoint, or was truncated",
                text.len()
            );
        };
        let found = XxHash64::oneshot(0, content.as_bytes());
        if format!("{found:016x}") != sum {
            bail!("{name} was changed: it has the checksum {found:016x}; expected {sum}");
        }
        let fail =
            |err: serde_json::Error| candle_core::Error::msg(format!("{name} has no sense: {err}"));
        let envelope: Envelope<serde_json::Value> = serde_json::from_str(content).map_err(fail)?;
        if envelope.format != FORMAT || envelope.version != VERSION {
            bail!(
                "{name} is a {:?} of version {}; expected a {FORMAT:?} of version {VERSION}\nhint: another version of this \
                 program wrote it",
                envelope.format,
                envelope.version
            );
        }
        serde_json::from_value(envelope.content).map_err(fail)
    }
}

impl FileRecord {
    pub(super) fn new(name: String, num_bytes: u64, xxh64: u64) -> Self {
        Self {
            name,
            num_bytes,
            xxh64: format!("{xxh64:016x}"),
        }
    }

    /// Whether it has values.
    pub(super) fn is_of_rank(&self) -> bool {
        let number = self.name.strip_prefix("rank-");
        let number = number.and_then(|name| name.strip_suffix(".safetensors"));
        number.is_some_and(|number| number.bytes().all(|b| b.is_ascii_digit()))
    }

    /// Its name in a model's folder, if that is where it belongs.
    pub(super) fn sidecar(&self) -> Option<&str> {
        let name = self.name.strip_prefix(MODEL_FOLDER)?.strip_prefix('/')?;
        is_sidecar(name).then_some(name)
    }

    /// Writes a file that belongs to the model's folder into the checkpoint `dir`.
    pub(super) fn write_sidecar(dir: &Path, name: &str, content: &[u8]) -> Result<Self> {
        let name = format!("{MODEL_FOLDER}/{name}");
        if let Err(err) = write_small(dir, &name, content) {
            bail!("cannot write the checkpoint's file {name}: {err}");
        }
        let sum = XxHash64::oneshot(0, content);
        Ok(Self::new(name, content.len() as u64, sum))
    }

    /// An error unless the file in `dir` is there and of the right size.
    ///
    /// # Errors
    /// The file is missing or has another size.
    pub fn check_size(&self, dir: &Path) -> Result<()> {
        let path = dir.join(&self.name);
        let len = match std::fs::metadata(&path) {
            Ok(metadata) if metadata.is_file() => metadata.len(),
            Ok(_) => bail!("{} is not a file", path.display()),
            Err(err) if err.kind() == ErrorKind::NotFound => bail!(
                "{} is missing; expected a file of {} bytes, which {MANIFEST_FILE} names",
                path.display(),
                self.num_bytes
            ),
            Err(err) => bail!("cannot read {}: {err}", path.display()),
        };
        if len != self.num_bytes {
            bail!(
                "{} has {len} bytes; expected {} from {MANIFEST_FILE}",
                path.display(),
                self.num_bytes
            );
        }
        Ok(())
    }

    /// An error that names the first tensor of the file in `dir` with values that are NaN or infinite; reads all of it.
    ///
    /// # Errors
    /// The first tensor with such values, and a file that cannot be read.
    pub fn check_finite(&self, dir: &Path) -> Result<()> {
        match self.is_of_rank() {
            true => rank_file::check_finite(&dir.join(&self.name)),
            false => Ok(()),
        }
    }

    /// An error unless the file in `dir` has the right checksum; reads all of it.
    ///
    /// # Errors
    /// Another checksum, and a file that cannot be read.
    pub fn check_sum(&self, dir: &Path) -> Result<()> {
        let path = dir.join(&self.name);
        let found = match checksum_of(&path) {
            Ok(sum) => format!("{sum:016x}"),
            Err(err) => bail!("cannot read {}: {err}", path.display()),
        };
        if found != self.xxh64 {
            bail!(
                "{} was changed: it has the checksum {found}; expected {} from {MANIFEST_FILE}",
                path.display(),
                self.xxh64
            );
        }
        Ok(())
    }
}

/// The checksum and what it is of.
fn parts(text: &str) -> Option<(&str, &str)> {
    let [before, between, after] = PARTS;
    let (sum, rest) = text.strip_prefix(before)?.split_once(between)?;
    Some((sum, rest.strip_suffix(after)?))
}

fn checksum_of(path: &Path) -> std::io::Result<u64> {
    use std::io::Read;
    let mut file = open_file(path)?;
    let mut block = vec![0; 1 << 20];
    let mut hash = XxHash64::default();
    loop {
        match file.read(&mut block) {
            Ok(0) => return Ok(hash.finish()),
            Ok(len) => hash.write(&block[..len]),
            Err(err) if err.kind() == ErrorKind::Interrupted => {}
            Err(err) => return Err(err),
        }
    }
}
