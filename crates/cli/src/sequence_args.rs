//! Flags about sequences: how records become what passes through the model.

use candle_train::{DataSpec, EncoderConfig, Overlong, SampleConfig};
use clap::Args;

use crate::number::whole;

/// How records become sequences.
#[derive(Args, Clone, Debug)]
pub(crate) struct SequenceArgs {
    /// Length of a sequence [default: 2048, or the longest that the model takes]
    #[arg(long, visible_alias = "max-seq-len", default_value_t = 128, hide_default_value = true, value_name = "TOKENS", value_parser = whole::<usize>(1..))]
    pub seq_len: usize,
    /// What becomes of a record that is longer than a sequence: truncate, its end is left out; drop, it is; error. Plain text is cut into
    /// several sequences
    #[arg(long, default_value_t = Overlong::default(), value_name = "truncate|drop|error")]
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

impl SequenceArgs {
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
            seq_len: self.seq_len,
            packing: !self.no_packing,
            document_mask: !self.no_document_mask,
            overlong: self.overlong,
            weights: specs.iter().map(|spec| spec.weight).collect(),
            seed,
        }
    }
}
