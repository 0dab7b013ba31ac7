//! `candle-train preview`

use std::path::Path;

use candle_core::{Error, Result};
use candle_train_models::ModelConfig;
use candle_train_run::{
    DataArgs, DataModel, Idle, NamedModel, SequenceArgs, default_seq_len, print_line, print_note,
    whole,
};
use candle_trainer::hub::resolve_tokenizer;
use candle_trainer::{Sample, Tokenizer};
use clap::Parser;
use serde_json::json;

use crate::commands::preview_text::PreviewText;

/// Print the first sequences that a run would train on
#[derive(Parser, Debug)]
pub struct Preview {
    /// Checkpoint folder with tokenizer and chat template, or org/name[@revision] on the Hugging Face hub, of which no weights are fetched
    #[arg(long, value_name = "DIR|REPO")]
    model: String,
    #[command(flatten)]
    data: DataArgs,
    #[command(flatten)]
    sequences: SequenceArgs,
    /// Seed of the choice of samples from data with a weight
    #[arg(long, default_value_t = 0, value_parser = whole::<u64>(0..))]
    seed: u64,
    /// Sequences to print, in the order of the data
    #[arg(long, default_value_t = 3, value_name = "SEQUENCES", value_parser = whole::<usize>(1..))]
    num: usize,
    /// Print a JSON object for each sequence: input_ids; labels, the id itself of a token that has loss, else -100; position_ids;
    /// document_ids, which differ where tokens do not see each other
    #[arg(long)]
    json: bool,
}

impl Preview {
    /// Flags that would do nothing.
    pub fn idle(&self) -> Vec<Idle> {
        self.sequences.idle()
    }

    /// Prints the sequences.
    pub fn run(&self) -> Result<()> {
        // Beside an adapter there is a tokenizer, as a rule.
        let named = match Path::new(&self.model).join("tokenizer.json").is_file() {
            true => self.model.clone(),
            false => NamedModel::of_flags(&self.model, None)?.model,
        };
        let model = resolve_tokenizer(&named)?;
        let tokenizer = Tokenizer::from_dir(&model)?;
        let mut sequences = self.sequences.clone();
        if sequences.seq_len.is_none() {
            // A tokenizer may be looked at without a model.
            let config = ModelConfig::from_file(model.join("config.json"));
            sequences.seq_len = Some(default_seq_len(config.ok().as_ref()));
        }
        let of_model = DataModel {
            tokenizer: &tokenizer,
            dir: Some(&model),
            adapter: None,
        };
        let data = self.data.preview(of_model, (&sequences, self.seed))?;
        for warning in &data.warnings {
            print_note(&format!("warning: {warning}"));
        }
        let samples = &data.samples;
        let text = PreviewText::new(&tokenizer);
        if !self.json {
            print_line(&format!("{}; {}", samples.summary(), text.legend()));
        }
        for index in 0..self.num.min(samples.len()) {
            let sample = samples.get(index)?;
            print_line(&match self.json {
                true => json_of(&sample)?,
                false => text.describe(index, &sample)?,
            });
        }
        Ok(())
    }
}

fn json_of(sample: &Sample) -> Result<String> {
    let labels = sample.input_ids.iter().zip(&sample.has_loss);
    let labels: Vec<i64> = labels
        .map(|(&id, &has_loss)| if has_loss { id.into() } else { -100 })
        .collect();
    let mut document_ids = Vec::with_capacity(sample.input_ids.len());
    for (place, &start) in sample.document_starts.iter().enumerate() {
        let document = match document_ids.last() {
            Some(&last) if start as usize != place => last,
            last => last.map_or(0, |last| last + 1),
        };
        document_ids.push(document);
    }
    let starts = sample.document_starts.iter().zip(0u32..);
    let position_ids: Vec<u32> = starts.map(|(start, place)| place - start).collect();
    let json = json!({
        "input_ids": sample.input_ids,
        "labels": labels,
        "position_ids": position_ids,
        "document_ids": document_ids,
    });
    serde_json::to_string(&json).map_err(Error::wrap)
}
