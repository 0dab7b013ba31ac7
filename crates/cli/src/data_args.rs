//! The flag `--data`, and what is read from what it names.

use std::fmt;
use std::path::{Path, PathBuf};

use candle_core::{Result, bail};
use candle_train::{Data, DataSpec, Overlong, RecordEncoder, Samples, Tokenizer, Tokens};
use clap::Args;

use crate::sequence_args::SequenceArgs;
use crate::training_args::TrainingArgs;

/// What a run learns from.
#[derive(Args, Clone, Debug)]
pub(crate) struct DataArgs {
    /// Files (.txt, .jsonl, .json, .parquet), folders, globs in quotes, or hub://datasets/org/name[@revision][/path]. A number after a colon is how
    /// often an epoch has the samples of it: 0.3 takes three in ten, 2 all of them twice. Records are {"text"}, {"prompt", "completion"},
    /// {"messages": [{"role", "content"}]}, Alpaca's or ShareGPT's
    #[arg(long, required = true, num_args = 1.., value_name = "PATH[:WEIGHT]")]
    data: Vec<DataSpec>,
}

/// What was read.
pub(crate) struct TrainingData {
    pub samples: Samples,
    /// What is left out of it, a line each.
    pub warnings: Vec<String>,
    data: Data,
}

impl DataArgs {
    /// The files.
    pub fn find(&self) -> Result<Data> {
        Data::find(&self.data)
    }

    /// The samples of a run; `model` has the chat template.
    pub fn read(
        &self,
        tokenizer: &Tokenizer,
        model: Option<&Path>,
        training: &TrainingArgs,
    ) -> Result<TrainingData> {
        let batches = &training.batches;
        self.samples((tokenizer, model), &batches.sequences, batches.seed)
    }

    /// The samples that `sequences` ask for.
    pub fn samples(
        &self,
        (tokenizer, model): (&Tokenizer, Option<&Path>),
        sequences: &SequenceArgs,
        seed: u64,
    ) -> Result<TrainingData> {
        let data = self.find()?;
        let encoder = RecordEncoder::new(tokenizer, model, sequences.train_on_prompt)?;
        let tokens = Tokens::encode(&data, &encoder)?;
        let seq_len = sequences.seq_len;
        let overlong = tokens.first_longer_than(seq_len);
        if let (Overlong::Error, Some(record)) = (sequences.overlong, overlong) {
            bail!(
                "{} has {} tokens, more than a sequence of {seq_len}, and --overlong is error\nhint: choose a longer --seq-len, or --overlong truncate or drop",
                tokens.place_of(record, &data),
                tokens.record(record)?.ids.len()
            );
        }
        let samples = Samples::new(&tokens, sequences.config(&self.data, seed))
            .map_err(|err| err.context(format!("the data {self}")))?;
        let mut warnings = tokens.report().warnings(&data);
        if samples.num_overlong() > 0 {
            let became = match sequences.overlong {
                Overlong::Truncate => "were truncated",
                Overlong::Drop | Overlong::Error => "were dropped",
            };
            warnings.push(format!(
                "{} records are longer than {} tokens and {became}",
                samples.num_overlong(),
                seq_len
            ));
        }
        Ok(TrainingData {
            samples,
            warnings,
            data,
        })
    }
}

impl TrainingData {
    /// Files and folders that were read.
    pub fn inputs(&self) -> impl Iterator<Item = PathBuf> {
        let named = self.data.specs().iter().map(|spec| spec.path.clone());
        let files = self.data.files().map(Path::to_path_buf);
        let paths: Vec<PathBuf> = named.chain(files).filter(|path| path.exists()).collect();
        paths.into_iter()
    }
}

impl fmt::Display for DataArgs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let specs: Vec<String> = self.data.iter().map(ToString::to_string).collect();
        f.write_str(&specs.join(" "))
    }
}
