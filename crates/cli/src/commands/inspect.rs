//! `candle-train inspect`

use std::path::{Path, PathBuf};

use candle_comm::message_of;
use candle_core::{Result, bail};
use candle_parallel::checkpoint::{
    CheckpointManifest, FileRecord, ParamRecord, checkpoints_in, set_aside_in, size_in_words,
};
use candle_train_run::print_line;
use candle_trainer::{Activity, EvalHistory, TrainingRecord, counted};
use clap::Args;
use jiff::Timestamp;

use crate::commands::inspect_model::{Wanted, inspect_gguf, inspect_model, lora_in_words};

/// How often a folder is looked at before it has nothing.
const LOOKS: usize = 3;

/// Print what a model is and what training it takes, what an adapter is, what a checkpoint of a run holds, or which checkpoints a folder has
#[derive(Args, Debug)]
pub(crate) struct Inspect {
    /// Folder of a model or an adapter; checkpoint, such as runs/a/step-000015, or a folder of checkpoints (--save-dir); a GGUF file
    #[arg(value_name = "CHECKPOINT|DIR|FILE")]
    checkpoint: PathBuf,
    /// Read everything: a checkpoint's checksums must be right, a model's tensors those that config.json describes, and no value NaN or infinite
    #[arg(long)]
    verify: bool,
    /// List the tensors with their shapes and types
    #[arg(long)]
    tensors: bool,
}

impl Inspect {
    /// Prints it; an error if something is damaged.
    pub fn run(&self) -> Result<()> {
        let _reading = self.verify.then(|| Activity::start("reading"));
        let dir = &self.checkpoint;
        let wanted = Wanted {
            tensors: self.tensors,
            verify: self.verify,
        };
        if dir.is_file() {
            return inspect_gguf(dir, wanted);
        }
        if !dir.is_dir() {
            bail!("the folder {} does not exist", dir.display());
        }
        let manifest = CheckpointManifest::read(dir);
        let (mut inside, mut aside) = (Vec::new(), Vec::new());
        // While a run puts a new one in the place of its last, a list may have neither.
        for _ in 0..LOOKS {
            if manifest.is_err() && inside.is_empty() && aside.is_empty() {
                (inside, aside) = (checkpoints_in(dir)?, set_aside_in(dir)?);
            }
        }
        let is_empty = inside.is_empty() && aside.is_empty();
        let is_checkpoint = CheckpointManifest::is_in(dir) || is_named_as_checkpoint(dir);
        match (manifest, is_empty) {
            (Ok(manifest), _) => self.checkpoint(&manifest),
            (Err(err), true) if is_checkpoint => Err(err),
            (Err(_), true) => inspect_model(dir, wanted),
            (Err(_), false) if self.tensors => bail!(
                "--tensors is given, and {} has {}\nhint: name one of them",
                dir.display(),
                counted(inside.len() + aside.len(), "checkpoint")
            ),
            (Err(_), false) => self.list(&inside, &aside),
        }
    }

    fn checkpoint(&self, manifest: &CheckpointManifest) -> Result<()> {
        print_line(&format!(
            "{}: {}",
            self.checkpoint.display(),
            summary(manifest)
        ));
        print_origin(manifest);
        self.print_params(&manifest.params);
        let num_bytes = num_bytes(&manifest.files);
        let num_files = counted(manifest.files.len(), "file");
        print_line(&format!("{num_files}, {}:", size_in_words(num_bytes)));
        let damages: Vec<Option<String>> = manifest
            .files
            .iter()
            .map(|file| {
                let damage = self.damage(&self.checkpoint, file);
                let word = match (&damage, self.verify) {
                    (Some(_), _) => "DAMAGED",
                    (None, true) => "verified",
                    (None, false) => "",
                };
                let (size, sum) = (size_in_words(file.num_bytes), &file.xxh64);
                let line = format!("  {} {size} xxh64 {sum} {word}", file.name);
                print_line(line.trim_end());
                damage
            })
            .collect();
        let damages: Vec<String> = damages.into_iter().flatten().collect();
        if !damages.is_empty() {
            bail!("{}", damages.join("\n  "));
        }
        self.print_verified(&num_files, num_bytes);
        Ok(())
    }

    fn print_params(&self, params: &[ParamRecord]) {
        let num_values = |trainable| {
            let params = params.iter().filter(|param| param.trainable == trainable);
            params
                .map(|param| param.shape.iter().product::<usize>())
                .sum::<usize>()
        };
        print_line(&format!(
            "{}, {} values trained, {} frozen{}",
            counted(params.len(), "parameter"),
            num_values(true),
            num_values(false),
            if self.tensors { ":" } else { "" }
        ));
        for param in params.iter().filter(|_| self.tensors) {
            let trained = if param.trainable { "" } else { " frozen" };
            print_line(&format!(
                "  {} {:?} {}{trained}",
                param.name, param.shape, param.dtype
            ));
        }
    }

    /// Says of how much it is known that nothing is wrong, if that was asked.
    fn print_verified(&self, what: &str, num_bytes: u64) {
        if self.verify {
            print_line(&format!(
                "verified: {what}, {}: all files have their checksums, and all values are finite",
                size_in_words(num_bytes)
            ));
        }
    }

    /// What is wrong with a file of the checkpoint `dir`.
    fn damage(&self, dir: &Path, file: &FileRecord) -> Option<String> {
        let checked = file.check_size(dir).and_then(|()| match self.verify {
            true => file.check_sum(dir).and_then(|()| file.check_finite(dir)),
            false => Ok(()),
        });
        let why = checked.err().map(|err| message_of(&err))?;
        Some(match dir.is_dir() {
            true => why,
            false => format!(
                "{} was removed while it was read: its run has newer ones",
                dir.display()
            ),
        })
    }

    /// What a checkpoint is, if nothing is wrong with it.
    fn state(&self, dir: &Path) -> Result<CheckpointManifest> {
        let manifest = CheckpointManifest::read(dir)?;
        let mut files = manifest.files.iter();
        match files.find_map(|file| self.damage(dir, file)) {
            Some(damage) => bail!("{damage}"),
            None => Ok(manifest),
        }
    }

    fn list(&self, checkpoints: &[PathBuf], aside: &[PathBuf]) -> Result<()> {
        let (mut num_damaged, mut num_files, mut bytes) = (0, 0, 0);
        for dir in checkpoints {
            let name = dir.file_name().unwrap_or_default().to_string_lossy();
            print_line(&match self.state(dir) {
                Ok(manifest) => {
                    num_files += manifest.files.len();
                    bytes += num_bytes(&manifest.files);
                    format!("{name}: {}", summary(&manifest))
                }
                // A run that saves here has newer ones.
                Err(_) if !dir.is_dir() => format!("{name}: removed meanwhile"),
                Err(err) => {
                    num_damaged += 1;
                    format!("{name}: NOT VALID: {}", message_of(&err))
                }
            });
        }
        for dir in aside {
            let name = dir.file_name().unwrap_or_default().to_string_lossy();
            let state = self.state(dir).map(|manifest| summary(&manifest));
            let state = state.unwrap_or_else(|err| format!("NOT VALID: {}", message_of(&err)));
            print_line(&format!("{name}: set aside: {state}"));
        }
        match num_damaged {
            0 if num_files == 0 => {
                if self.verify {
                    print_line(&format!(
                        "nothing was verified: {} has no checkpoint to go on from but those that were set aside",
                        self.checkpoint.display()
                    ));
                }
                Ok(())
            }
            0 => {
                self.print_verified(&counted(num_files, "file"), bytes);
                Ok(())
            }
            _ => bail!(
                "{num_damaged} of {} in {} {} not valid",
                counted(checkpoints.len(), "checkpoint"),
                self.checkpoint.display(),
                if num_damaged == 1 { "is" } else { "are" }
            ),
        }
    }
}

fn num_bytes(files: &[FileRecord]) -> u64 {
    files.iter().map(|file| file.num_bytes).sum()
}

/// Which run wrote a checkpoint, how, and from what.
fn print_origin(manifest: &CheckpointManifest) {
    let CheckpointManifest {
        layout,
        program,
        run,
        source,
        lora,
        ..
    } = manifest;
    let mut zero = format!("ZeRO-{}", layout.zero as u8);
    if let Some(group) = layout.zero_group {
        zero += &format!(" in groups of {group}");
    }
    let (pp, dp, tp) = (layout.pp, layout.dp, layout.tp);
    let cp = match layout.cp {
        1 => String::new(),
        cp => format!(" x cp {cp}"),
    };
    print_line(&format!(
        "run {run}, candle-train {program}, pp {pp} x dp {dp}{cp} x tp {tp}, {zero}"
    ));
    if let Some(lora) = lora {
        print_line(&format!("low-rank adapters: {}", lora_in_words(lora)));
    }
    if let Ok(record) = serde_json::from_value::<TrainingRecord>(manifest.record.clone()) {
        print_record(&record);
    }
    if let Some(source) = source {
        print_line(&format!("began with the weights of {}", source.display()));
    }
}

/// Whether a folder has the name of a checkpoint, which may be damaged then.
fn is_named_as_checkpoint(dir: &Path) -> bool {
    let name = dir.file_name().unwrap_or_default().to_string_lossy();
    let step = name.strip_prefix("step-");
    step.is_some_and(|step| step.bytes().all(|byte| byte.is_ascii_digit()))
}

fn summary(manifest: &CheckpointManifest) -> String {
    let saved_at = i64::try_from(manifest.saved_at_secs).unwrap_or_default();
    let saved_at = Timestamp::from_second(saved_at).unwrap_or_default();
    let saved_at = saved_at.strftime("%F %T UTC");
    let mut summary = format!(
        "after step {}, {}, {}",
        manifest.step,
        saved_at,
        size_in_words(num_bytes(&manifest.files))
    );
    if let Some(loss) = manifest.eval_loss {
        summary += &format!(", evaluation loss {loss:.4}");
    }
    summary
}

fn print_record(record: &TrainingRecord) {
    let position = &record.position;
    print_line(&format!(
        "next sample: {} of epoch {}, {} seen in all",
        position.sample + 1,
        position.epoch + 1,
        position.total
    ));
    let EvalHistory {
        best,
        num_without_improvement: num_worse,
    } = record.evaluation;
    if let Some((loss, step)) = best {
        print_line(&format!(
            "least evaluation loss so far: {loss:.4} after step {step}, {} since then",
            counted(num_worse, "evaluation")
        ));
    }
    let settings = record.settings.iter();
    let settings = settings.map(|(name, value)| format!("{name} {value}"));
    print_line(&format!(
        "settings: {}",
        settings.collect::<Vec<_>>().join(", ")
    ));
}
