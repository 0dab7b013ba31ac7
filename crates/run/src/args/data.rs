//! The flag `--data`, and what is read from what it names.

use std::fmt;

use candle_core::{Result, bail};
use candle_trainer::hub::DataUse;
use candle_trainer::{Columns, Data, DataSpec, TemplateKwargs};
use clap::Args;
use jiff::civil::Date;
use serde::Serialize;

use crate::args::evaluation::EvalArgs;
use crate::args::text::{some_text, texts};

/// Name of the date in the conversations.
pub(crate) const DATE: &str = "--date";

/// What a run learns from.
#[derive(Args, Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct DataArgs {
    /// What to learn from: files (.txt, .jsonl, .json, .csv, .tsv, .parquet), folders, globs in quotes, or hub://datasets/org/name
    ///
    /// Records are {"text"}, {"prompt", "completion"}, {"messages": [{"role", "content"}]}, Alpaca's or ShareGPT's. A number after a colon is
    /// how often an epoch has the samples of it: 0.3 takes three in ten, 2 all of them twice. Of hub://datasets/org/name[@revision][/path] come
    /// the files of the split train, or those that the path names. Pipes are not read, as data is read twice.
    #[arg(long, num_args = 1.., value_name = "PATH[:WEIGHT]")]
    #[serde(serialize_with = "texts")]
    pub data: Vec<DataSpec>,
    /// Columns of the data under other names than the fields of records, as prompt=question,completion=answer [default: none]
    ///
    /// They hold for --eval-data, too.
    #[arg(long, value_name = "FIELD=COLUMN,..")]
    #[serde(serialize_with = "some_text")]
    pub columns: Option<Columns>,
    /// Chat template: chatml, llama3, qwen, mistral, gemma, zephyr, or a file of Jinja [default: the model's own]
    ///
    /// It renders conversations, and goes into the output, where what ends its turns becomes an end of generated texts.
    #[arg(long, value_name = "FILE|NAME")]
    pub chat_template: Option<String>,
    /// Variables for the chat template, a JSON object such as '{"enable_thinking": false}' [default: none]
    ///
    /// They are the named arguments of apply_chat_template. A record's own chat_template_kwargs come before them.
    #[arg(long, value_name = "JSON")]
    #[serde(serialize_with = "some_text")]
    pub chat_template_kwargs: Option<TemplateKwargs>,
    /// What a chat template that asks for the date takes for today [default: today, and of a run that is resumed the date of its checkpoint]
    #[arg(long, value_name = "YYYY-MM-DD")]
    #[serde(serialize_with = "some_text")]
    pub date: Option<Date>,
}

impl DataArgs {
    /// Without what may differ between ranks: where a host has its files.
    pub fn shared(&self) -> Self {
        Self {
            data: Vec::new(),
            chat_template: None,
            ..self.clone()
        }
    }

    /// The files.
    pub(crate) fn find(&self) -> Result<Data> {
        let data = Data::find(&self.data, DataUse::Training)?;
        Ok(data.with_columns(&self.columns()))
    }

    pub(crate) fn columns(&self) -> Columns {
        self.columns.clone().unwrap_or_default()
    }

    /// An error if what is held out would be trained on, too.
    pub(crate) fn validate(&self, evaluation: &EvalArgs) -> Result<()> {
        if self.data.is_empty() {
            bail!("no data is named, expected the files or folders to learn from (--data)");
        }
        let repeated = self.data.iter().find(|spec| spec.weight > 1.0);
        match (evaluation.eval_fraction, repeated) {
            (Some(_), Some(spec)) => bail!(
                "--eval-fraction and --data {spec}: what is held out of it would be trained on, as it is there more than once\nhint: name other files with --eval-data, or take a weight of at most 1"
            ),
            _ => Ok(()),
        }
    }
}

impl fmt::Display for DataArgs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&in_words(&self.data))
    }
}

/// Data as a command line names it.
pub(crate) fn in_words(specs: &[DataSpec]) -> String {
    let specs: Vec<String> = specs.iter().map(ToString::to_string).collect();
    specs.join(" ")
}
