//! `candle-train inspect`

use std::path::{Path, PathBuf};

use candle_comm::message_of;
use candle_core::{Result, bail};
use candle_parallel::checkpoint::{
    CheckpointManifest, FileRecord, checkpoints_in, set_aside_in, size_in_words,
};
use candle_train::{Activity, EvalHistory, TrainingRecord, counted};
use clap::Args;
use jiff::Timestamp;

use crate::inspect_model::{inspect_model, lora_in_words};
use crate::output::print_line;

/// Print what a checkpoint of a run holds, or which checkpoints a folder has; of a model or an adapter what that is
#[derive(Args, Debug)]
pub(crate) struct Inspect {
    /// Checkpoint, such as runs/a/step-000015, or a folder of checkpoints (--save-dir)
    #[arg(value_name = "CHECKPOINT|DIR")]
    checkpoint: PathBuf,
    /// Read all files, compare their checksums and look for values that are NaN or infinite
    #[arg(long)]
    verify: bool,
}

impl Inspect {
    /// Prints it; an error if something is damaged.
    pub fn run(&self) -> Result<()> {
        let _reading = self.verify.then(|| Activity::start("reading"));
        let dir = &self.checkpoint;
        if !dir.is_dir() {
            bail!("the folder {} does not exist", dir.display());
        }
        let manifest = CheckpointManifest::read(dir);
        let (mut inside, mut aside) = (Vec::new(), Vec::new());
        if manifest.is_err() {
            (inside, aside) = (checkpoints_in(dir)?, set_aside_in(dir)?);
        }
        let is_empty = inside.is_empty() && aside.is_empty();
        let is_checkpoint = CheckpointManifest::is_in(dir) || is_named_as_checkpoint(dir);
        match (manifest, is_empty) {
            (Ok(manifest), _) => self.checkpoint(&manifest),
            (Err(err), true) if is_checkpoint => Err(err),
            (Err(_), true) => inspect_model(dir),
            (Err(_), false) => self.list(&inside, &aside),
        }
    }

    fn checkpoint(&self, manifest: &CheckpointManifest) -> Result<()> {
        print_line(&format!(
            "{}: {}",
            self.checkpoint.display(),
            summary(manifest)
        ));
        let CheckpointManifest {
            layout,
            program,
            run,
            source,
            lora,
            params,
            files,
            ..
        } = manifest;
        let mut zero = format!("ZeRO-{}", layout.zero as u8);
        if let Some(group) = layout.zero_group {
            zero += &format!(" in groups of {group}");
        }
        let (pp, dp, tp) = (layout.pp, layout.dp, layout.tp);
        print_line(&format!(
            "run {run}, candle-train {program}, pp {pp} x dp {dp} x tp {tp}, {zero}"
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
        let num_values = |trainable| {
            let params = params.iter().filter(|param| param.trainable == trainable);
            params
                .map(|param| param.shape.iter().product::<usize>())
                .sum::<usize>()
        };
        print_line(&format!(
            "{}, {} values trained, {} frozen:",
            counted(params.len(), "parameter"),
            num_values(true),
            num_values(false)
        ));
        for param in params {
            let trained = if param.trainable { "" } else { " frozen" };
            print_line(&format!(
                "  {} {:?} {}{trained}",
                param.name, param.shape, param.dtype
            ));
        }
        let num_bytes = files.iter().map(|file| file.num_bytes).sum();
        print_line(&format!(
            "{}, {}:",
            counted(files.len(), "file"),
            size_in_words(num_bytes)
        ));
        let damages: Vec<Option<String>> = files
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
        match damages.is_empty() {
            true => Ok(()),
            false => bail!("{}", damages.join("\n  ")),
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

    /// What a checkpoint is, or what is wrong with it.
    fn state(&self, dir: &Path) -> Result<String> {
        let manifest = CheckpointManifest::read(dir)?;
        let files = manifest.files.iter();
        match files.filter_map(|file| self.damage(dir, file)).next() {
            Some(damage) => bail!("{damage}"),
            None => Ok(summary(&manifest)),
        }
    }

    fn list(&self, checkpoints: &[PathBuf], aside: &[PathBuf]) -> Result<()> {
        let mut num_damaged = 0;
        for dir in checkpoints {
            let name = dir.file_name().unwrap_or_default().to_string_lossy();
            print_line(&match self.state(dir) {
                Ok(summary) => format!("{name}: {summary}"),
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
            let state = self.state(dir);
            let state = state.unwrap_or_else(|err| format!("NOT VALID: {}", message_of(&err)));
            print_line(&format!("{name}: set aside: {state}"));
        }
        match num_damaged {
            0 => Ok(()),
            _ => bail!(
                "{num_damaged} of {} in {} {} not valid",
                counted(checkpoints.len(), "checkpoint"),
                self.checkpoint.display(),
                if num_damaged == 1 { "is" } else { "are" }
            ),
        }
    }
}

/// Whether a folder has the name of a checkpoint, which may be damaged then.
fn is_named_as_checkpoint(dir: &Path) -> bool {
    let name = dir.file_name().unwrap_or_default().to_string_lossy();
    let step = name.strip_prefix("step-");
    step.is_some_and(|step| step.bytes().all(|byte| byte.is_ascii_digit()))
}

fn summary(manifest: &CheckpointManifest) -> String {
    let num_bytes = manifest.files.iter().map(|file| file.num_bytes).sum();
    let saved_at = i64::try_from(manifest.saved_at_secs).unwrap_or_default();
    let saved_at = Timestamp::from_second(saved_at).unwrap_or_default();
    let saved_at = saved_at.strftime("%F %T UTC");
    let mut summary = format!(
        "after step {}, {}, {}",
        manifest.step,
        saved_at,
        size_in_words(num_bytes)
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
