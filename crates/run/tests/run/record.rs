//! What a checkpoint remembers of a run.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use candle_comm::ProcessGroup;
use candle_core::{Device, Error, Result};
use candle_parallel::checkpoint::TrainingCheckpoint;
use candle_train_run::{Finetune, Observers};
use candle_trainer::TrainingRecord;
use serde_json::{Value, json};
use tempfile::tempdir;
use toml::Table;

use super::config::of_finetune;
use super::library::fixture;

/// Flags that name files and folders; what is in those that are read is remembered.
const PLACES: [&str; 13] = [
    "model",
    "data",
    "eval-data",
    "adapter",
    "output",
    "save-dir",
    "resume",
    "metrics",
    "tensorboard",
    "trace",
    "trace-steps",
    "rescue-dir",
    "resume-anyway",
];

/// Flags of ranks that are processes.
const OF_PROCESSES: [&str; 2] = ["check-collectives", "half-sums"];

/// Flags of data that the fixture is not: conversations and tables. What they make of data is among its tokens.
const OF_OTHER_DATA: [&str; 7] = [
    "columns",
    "chat-template",
    "chat-template-kwargs",
    "date",
    "train-on-prompt",
    "mask-history",
    "keep-argument-strings",
];

/// Values that the fixture's model can be trained with, where these are others.
const VALUES: &[(&str, &str)] = &[
    ("global-batch-size", "8"),
    ("batch-ramp", "2,2,8"),
    ("save-every", "1"),
    ("freeze", "layers\\.[0-1]"),
    ("offload", "nvme:."),
    ("offload-dir", "."),
    ("pp", "2"),
    ("pipeline-layout", "3,1"),
    ("strategy", "parameter-server"),
    ("servers", "1"),
];

/// Flags without which others would be refused, or do nothing.
const COMPANIONS: &[(&str, &[(&str, &str)])] = &[
    ("lr-decay-ratio", &[("lr-schedule", "wsd")]),
    ("loss-scale-init", &[("dtype", "f16")]),
    ("loss-scale-window", &[("dtype", "f16")]),
    ("eval-every", &[("eval-fraction", "0.2")]),
    ("patience", &[("eval-fraction", "0.2"), ("eval-every", "1")]),
    ("zero-group", &[("dp", "4"), ("zero", "3")]),
    ("zero-secondary", &[("dp", "4"), ("zero", "3")]),
    ("zero", &[("dp", "2")]),
    ("offload-dir", &[("offload", "all")]),
    ("no-overlap", &[("dp", "2"), ("zero", "3")]),
    ("grad-reduce-dtype", &[("dp", "2")]),
    ("quantize-gradients", &[("dp", "2")]),
    ("quantize-weights", &[("dp", "2"), ("zero", "3")]),
    ("tile-linears", &[("dp", "2"), ("zero", "3")]),
    ("schedule", &[("pp", "2")]),
    ("virtual-stages", &[("pp", "2")]),
    ("pipeline-layout", &[("pp", "2")]),
    ("pipeline-prefetch", &[("pp", "2")]),
    ("sequence-parallel", &[("tp", "2")]),
    ("cp-method", &[("cp", "2")]),
    ("ulysses", &[("cp", "2")]),
    ("servers", &[("strategy", "parameter-server")]),
    (
        "async",
        &[("strategy", "parameter-server"), ("servers", "1")],
    ),
    (
        "max-staleness",
        &[
            ("strategy", "parameter-server"),
            ("servers", "1"),
            ("async", "true"),
        ],
    ),
    ("sample-tokens", &[("prompt", "a")]),
    ("temperature", &[("prompt", "a")]),
    ("top-p", &[("prompt", "a")]),
    ("lora-alpha", &[("lora-rank", "2")]),
    ("lora-dropout", &[("lora-rank", "2")]),
    ("lora-targets", &[("lora-rank", "2")]),
    ("rslora", &[("lora-rank", "2")]),
    ("base-dtype", &[("lora-rank", "2")]),
];

/// What tells one run from another, by name.
type Remembered = BTreeMap<String, Value>;

/// The weights that a run with these flags beside the usual ones makes, and what its checkpoint remembers of it.
fn trained(flags: &[(&str, &str)]) -> Result<(Vec<u8>, Remembered)> {
    let dir = tempdir().map_err(Error::wrap)?;
    let path = |name: &str| dir.path().join(name).display().to_string();
    let usual = [
        ("model", fixture("gqa/model").display().to_string()),
        ("data", fixture("text.txt").display().to_string()),
        ("seq-len", "16".to_string()),
        ("steps", "3".to_string()),
        ("micro-batch-size", "2".to_string()),
        ("lr", "0.01".to_string()),
        ("output", path("out")),
        ("save-dir", path("saves")),
        ("save-every", "2".to_string()),
    ];
    let mut table = Table::from_iter(usual.map(|(name, value)| (name.to_string(), value.into())));
    for (name, value) in flags {
        // Another way to say the same takes its place.
        match *name {
            "per-device-train-batch-size" => drop(table.remove("micro-batch-size")),
            "epochs" => drop(table.remove("steps")),
            _ => {}
        }
        table.insert(name.to_string(), super::config::value(value));
    }
    Finetune::from_table(&table)?.train_with(Observers::none())?;
    let weights = fs::read(dir.path().join("out/model.safetensors"))
        .or_else(|_| fs::read(dir.path().join("out/adapter_model.safetensors")))?;
    Ok((weights, remembered(&dir.path().join("saves"))?))
}

fn remembered(save_dir: &Path) -> Result<Remembered> {
    let world = ProcessGroup::single(Device::Cpu);
    let (checkpoint, _) = TrainingCheckpoint::latest(&world, save_dir)?;
    let checkpoint = checkpoint.ok_or_else(|| Error::msg("no checkpoint"))?;
    let record = TrainingRecord::of(&checkpoint)?;
    let words = |(name, value)| (name, Value::String(value));
    let settings = record.settings.into_iter().map(words);
    let sums = record.sum_order.into_iter().map(words);
    let save_dtype = ("--save-dtype".to_string(), json!(record.save_dtype));
    Ok(settings
        .chain(sums)
        .chain(record.model)
        .chain([save_dtype])
        .collect())
}

/// A run with another value of any flag has other weights only if its checkpoint tells it from the one with the usual value: resuming it with
/// another value would go on as a run that never was.
#[test]
fn what_changes_the_weights_is_remembered() {
    let left_out = [&PLACES[..], &OF_PROCESSES, &OF_OTHER_DATA].concat();
    let mut without = BTreeMap::new();
    let mut wrong = Vec::new();
    for (flag, value) in of_finetune() {
        if left_out.contains(&flag) {
            continue;
        }
        let other = VALUES.iter().find(|(name, _)| *name == flag);
        let value = other.map_or(value, |(_, value)| value);
        let companions = COMPANIONS.iter().find(|(name, _)| *name == flag);
        let companions = companions.map_or(&[][..], |(_, companions)| companions);
        let (weights, record) = without
            .entry(companions)
            .or_insert_with(|| trained(companions).unwrap());
        match trained(&[companions, &[(flag, value)]].concat()) {
            Err(err) => wrong.push(format!("--{flag} {value}: {err}")),
            Ok((others, of_others)) if others != *weights && of_others == *record => {
                wrong.push(format!("--{flag} {value} is not remembered"));
            }
            Ok(_) => {}
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
