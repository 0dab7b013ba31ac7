//! What of a run decides its weights: noted in checkpoints, compared when one is resumed.

use std::collections::BTreeMap;
use std::hash::Hasher;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use candle_comm::Degrees;
use candle_core::{DType, Error, Result};
use candle_ops::MatmulPrecision;
use candle_parallel::checkpoint::open_file;
use candle_trainer::{Samples, TrainConfig, TrainingRecord};
use serde_json::{Map, Value};
use twox_hash::XxHash64;

use crate::args::data::DATE;
use crate::args::training::TrainingArgs;
use crate::reading::TrainingData;

/// Bytes of a weights file that are read at a time, and how often, evenly spread.
const BLOCK: u64 = 64 << 10;
const NUM_BLOCKS: u64 = 256;

/// Name of the digest of the weights with which a run begins.
pub const WEIGHTS: &str = "the weights of --model";

/// Name of how f32 are multiplied.
const MATMUL_PRECISION: &str = "--matmul-precision";

/// Names of the settings that follow from the number of ranks where no flag says.
pub(crate) const GLOBAL_BATCH_SIZE: &str = "--global-batch-size";
pub(crate) const NUM_STEPS: &str = "the number of steps";

/// What is said of a model's files and not of the model.
const NOT_THE_MODEL: [&str; 4] = [
    "_name_or_path",
    "transformers_version",
    "torch_dtype",
    "dtype",
];

impl TrainingArgs {
    /// The record of a run on `data` that begins with the weights in folder `weights`, if there is one, of a model with this
    /// `config.json`.
    pub(crate) fn record(
        &self,
        train: &TrainConfig,
        data: &TrainingData,
        config: Option<&[u8]>,
        weights: Option<&Path>,
    ) -> Result<TrainingRecord> {
        let config = config.map_or(Ok(Map::new()), serde_json::from_slice);
        let mut model: Map<String, Value> = config.map_err(Error::wrap)?;
        model.retain(|name, _| !NOT_THE_MODEL.contains(&name.as_str()));
        if let Some(weights) = weights {
            let digest = digest_of_weights(weights)?;
            model.insert(WEIGHTS.into(), digest.into());
        }
        let mut settings = self.settings(train, &data.samples);
        // Without it the record is that of runs before there was a choice.
        let precision = self.ranks.matmul_precision();
        let is_high = precision != MatmulPrecision::Highest;
        settings.extend(is_high.then(|| (MATMUL_PRECISION.to_string(), precision.to_string())));
        let strategy = self.strategy.setting();
        settings.extend(strategy.map(|strategy| ("--strategy".to_string(), strategy)));
        let mask_history = self.batches.sequences.mask_history;
        settings.extend(mask_history.then(|| ("--mask-history".to_string(), "true".to_string())));
        let ramp = self.batches.batch_ramp;
        settings.extend(ramp.map(|ramp| ("--batch-ramp".to_string(), ramp.to_string())));
        settings.extend(data.date.map(|date| (DATE.to_string(), date.to_string())));
        Ok(TrainingRecord {
            settings,
            sum_order: self.sum_order(),
            model,
            ..TrainingRecord::default()
        })
    }

    /// What decides the order in which the same numbers are added.
    fn sum_order(&self) -> BTreeMap<String, String> {
        let (Degrees { pp, dp, tp, .. }, replicas) = (self.layout.degrees(), self.data_parallel());
        let numbers = [
            ("--micro-batch-size", self.batches.micro_batch_size),
            ("--pp", pp),
            ("--dp", dp),
            ("--tp", tp),
            ("--tile-linears", replicas.tile_linears),
        ];
        let order = numbers.map(|(name, number)| (name.to_string(), number.to_string()));
        let mut order = BTreeMap::from(order);
        if dp > 1 {
            let zero = format!("{:?}", replicas.zero).to_lowercase();
            order.insert("the ZeRO stage".into(), zero);
            let group = replicas.zero_group;
            order.extend(group.map(|group| ("--zero-group".to_string(), group.to_string())));
        }
        order.extend(self.layout.context.sum_order());
        order
    }

    /// A digest of what decides the bits of the saved weights: the record of the run, its layout and the type of the files.
    pub(crate) fn run_digest(
        &self,
        record: &TrainingRecord,
        save_dtype: Option<DType>,
        eval_samples: Option<&Samples>,
    ) -> Result<String> {
        let (degrees, replicas) = (self.layout.degrees(), self.data_parallel());
        let micro_batch_size = self.batches.micro_batch_size;
        // The order of sums is in what follows.
        let record = TrainingRecord {
            sum_order: BTreeMap::new(),
            ..record.clone()
        };
        let record = serde_json::to_string(&record).map_err(Error::wrap)?;
        let mut all =
            format!("{record} {degrees:?} {replicas:?} {micro_batch_size} {save_dtype:?}");
        let context = self.layout.context.sum_order();
        if !context.is_empty() {
            all += &format!(" {context:?}");
        }
        // Otherwise evaluations change nothing.
        if let Some(patience) = self.evaluation.patience {
            let tokens = eval_samples.map(|samples| samples.tokens().digest());
            all += &format!(" {patience} {:?} {tokens:?}", self.evaluation.eval_every);
        }
        Ok(format!("{:016x}", XxHash64::oneshot(0, all.as_bytes())))
    }

    fn settings(&self, train: &TrainConfig, samples: &Samples) -> BTreeMap<String, String> {
        let (layout, batches, args) = (&self.layout, &self.batches, &self.optimizer);
        let (tokens, config) = (samples.tokens(), samples.config());
        let replicas = self.data_parallel();
        let freeze = args.freeze.freeze.as_ref();
        let settings = [
            (
                "the data",
                format!("{} tokens (xxh3 {})", tokens.len(), tokens.digest()),
            ),
            ("the weights of --data", format!("{:?}", config.weights)),
            (NUM_STEPS, train.lr_schedule.num_steps.to_string()),
            ("--seq-len", config.seq_len.to_string()),
            ("--no-packing", (!config.packing).to_string()),
            ("--no-document-mask", (!config.document_mask).to_string()),
            ("--overlong", config.overlong.to_string()),
            (GLOBAL_BATCH_SIZE, batches.global_batch_size().to_string()),
            (
                "--eval-fraction",
                self.evaluation
                    .eval_fraction
                    .map_or("not given".into(), |fraction| fraction.to_string()),
            ),
            ("--no-shuffle", batches.no_shuffle.to_string()),
            ("--seed", batches.seed.to_string()),
            ("--lr", args.lr().to_string()),
            ("--min-lr-ratio", args.min_lr_ratio.to_string()),
            ("--warmup-steps", train.lr_schedule.warmup_steps.to_string()),
            ("--lr-schedule", format!("{:?}", train.lr_schedule.decay)),
            ("--weight-decay", args.weight_decay.to_string()),
            ("--adam-beta1", args.adam_beta1.to_string()),
            ("--adam-beta2", args.adam_beta2.to_string()),
            ("--adam-eps", args.adam_eps.to_string()),
            ("--max-grad-norm", args.max_grad_norm.to_string()),
            (
                "--freeze",
                freeze.map_or("not given".into(), ToString::to_string),
            ),
            ("--loss-scale-init", train.loss_scaling.init.to_string()),
            ("--loss-scale-window", train.loss_scaling.window.to_string()),
            ("--dtype", format!("{:?}", layout.dtype()).to_lowercase()),
            (
                "the type in which gradients move",
                format!("{:?}", replicas.reduce),
            ),
            (
                "weights that move in 8 bits",
                replicas.quantize_weights.to_string(),
            ),
        ];
        settings
            .map(|(name, value)| (name.to_string(), value))
            .into()
    }
}

/// What a folder has with one of these extensions, in order.
pub(crate) fn files_with(dir: &Path, extensions: &[&str]) -> Result<Vec<PathBuf>> {
    let entries = std::fs::read_dir(dir)?.map(|entry| Ok(entry?.path()));
    let mut files = entries.collect::<Result<Vec<PathBuf>>>()?;
    files.retain(|path| {
        let own = path.extension();
        own.is_some_and(|own| extensions.iter().any(|extension| own == *extension))
    });
    files.sort();
    Ok(files)
}

/// A checksum of the sizes of a model's weights files and of parts of them.
///
/// # Errors
/// A file that cannot be read.
pub fn digest_of_weights(dir: &Path) -> Result<String> {
    let mut hash = XxHash64::default();
    let mut block = vec![0; BLOCK as usize];
    for path in files_with(dir, &["safetensors"])? {
        let opened = open_file(&path);
        let mut file =
            opened.map_err(|err| Error::msg(format!("cannot read {}: {err}", path.display())))?;
        let len = file.metadata()?.len();
        hash.write(&len.to_le_bytes());
        let last = len.saturating_sub(BLOCK);
        let num_blocks = len.div_ceil(BLOCK).min(NUM_BLOCKS);
        for index in 0..num_blocks {
            let start = u128::from(last) * u128::from(index) / u128::from((num_blocks - 1).max(1));
            file.seek(SeekFrom::Start(start as u64))?;
            let wanted = (len - start as u64).min(BLOCK) as usize;
            file.read_exact(&mut block[..wanted])?;
            hash.write(&block[..wanted]);
        }
    }
    Ok(format!("{:016x}", hash.finish()))
}
