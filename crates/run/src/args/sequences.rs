//! Flags about sequences: how records become what passes through the model.

use candle_train_models::ModelConfig;
use candle_trainer::{DataSpec, EncoderConfig, Overlong, SampleConfig};
use clap::Args;
use serde::Serialize;

use crate::args::number::whole;
use crate::args::text::text;
use crate::flags::idle::Idle;

/// How records become sequences.
#[derive(Args, Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct SequenceArgs {
    /// Length of a sequence [default: 2048, or the longest that the model takes]
    #[arg(long, visible_alias = "max-seq-len", value_name = "TOKENS", value_parser = whole::<usize>(1..))]
    pub seq_len: Option<usize>,
    /// What becomes of a record that is longer than a sequence: truncate, its end is left out; drop, it is; error. Plain text is cut into
    /// several sequences
    #[arg(long, default_value_t = Overlong::default(), value_name = "truncate|drop|error")]
    #[serde(serialize_with = "text")]
    pub overlong: Overlong,
    /// Give each record a sequence of its own, with padding up to the longest one of a micro-batch, instead of putting several short ones
    /// into a sequence
    #[arg(long)]
    pub no_packing: bool,
    /// Let tokens see all that come before them in a sequence, those of other records too; not with --no-packing, where there are none
    #[arg(long, conflicts_with = "no_packing")]
    pub no_document_mask: bool,
    /// Learn to write prompts too, not only completions and what the assistant says
    #[arg(long)]
    pub train_on_prompt: bool,
    /// Learn of each conversation the assistant's last message only; not with --train-on-prompt
    #[arg(long)]
    pub mask_history: bool,
    /// Leave arguments of tool calls that are JSON in a text as texts, which a chat template may quote once more, as transformers does,
    /// instead of reading the JSON
    #[arg(long)]
    pub keep_argument_strings: bool,
}

/// Longest sequence that is taken by default: more need memory that not everybody has.
const MAX_SEQ_LEN: usize = 2048;

/// The longest sequence of a run where no flag says, of this model if it is known.
pub fn default_seq_len(config: Option<&ModelConfig>) -> usize {
    config.map_or(MAX_SEQ_LEN, |config| config.max_seq_len().min(MAX_SEQ_LEN))
}

impl SequenceArgs {
    /// Length of a sequence; where nothing was chosen yet, 2048.
    pub fn seq_len(&self) -> usize {
        self.seq_len.unwrap_or(MAX_SEQ_LEN)
    }

    /// Flags that would do nothing.
    pub fn idle(&self) -> Vec<Idle> {
        Idle::of([(
            self.mask_history && self.train_on_prompt,
            "mask-history",
            &["train-on-prompt"],
            "beside --train-on-prompt, which learns all messages",
        )])
    }

    /// How records become tokens.
    pub fn encoder_config(&self) -> EncoderConfig {
        EncoderConfig {
            train_on_prompt: self.train_on_prompt,
            mask_history: self.mask_history,
            keep_argument_strings: self.keep_argument_strings,
        }
    }

    /// How the records of `specs` become samples.
    pub fn config(&self, specs: &[DataSpec], seed: u64) -> SampleConfig {
        SampleConfig {
            seq_len: self.seq_len(),
            packing: !self.no_packing,
            document_mask: !self.no_document_mask,
            overlong: self.overlong,
            weights: specs.iter().map(|spec| spec.weight).collect(),
            seed,
        }
    }
}
