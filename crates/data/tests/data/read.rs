//! What becomes of a file of data: its records with what of them is learned, and what is told.

use std::fs;
use std::path::PathBuf;

use candle_data::hub::DataUse;
use candle_data::{
    Columns, Data, DataSpec, EncoderConfig, RecordEncoder, TemplateKwargs, TokenCache, Tokenizer,
    Tokens,
};

/// Shows roles, texts and calls of tools.
pub const TEMPLATE: &str = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for call in m.tool_calls %}[{{ call.function.name }} {{ call.function.arguments | tojson }}]{% endfor %}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";

/// A folder with data and a cache.
pub struct Reading {
    dir: tempfile::TempDir,
    tokenizer: Tokenizer,
}

/// What was read.
#[derive(Debug)]
pub struct Read {
    /// The text of each record, with `⟦` and `⟧` around what of it is learned; without ends of sequences.
    pub records: Vec<String>,
    /// What is told, without the folder.
    pub warnings: Vec<String>,
}

impl Reading {
    /// With a checkpoint that has this chat template.
    pub fn new(template: Option<&str>) -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("model")).unwrap();
        if let Some(template) = template {
            fs::write(dir.path().join("model/chat_template.jinja"), template).unwrap();
        }
        let tokenizer =
            Tokenizer::train_bpe(["the cat sat on the mat\n"].into_iter(), 280).unwrap();
        Self { dir, tokenizer }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn write(&self, name: &str, content: impl AsRef<[u8]>) -> &Self {
        fs::write(self.path(name), content).unwrap();
        self
    }

    /// The data of the file `name`, with fields of these columns.
    pub fn data(&self, name: &str, columns: &str) -> candle_core::Result<Data> {
        let columns: Columns = match columns {
            "" => Columns::default(),
            columns => columns.parse().map_err(candle_core::Error::msg)?,
        };
        let data = Data::find(&[DataSpec::new(self.path(name))], DataUse::Training)?;
        Ok(data.with_columns(&columns))
    }

    pub fn read(&self, name: &str, columns: &str) -> candle_core::Result<Read> {
        self.read_with(name, columns, EncoderConfig::default())
    }

    pub fn read_with(
        &self,
        name: &str,
        columns: &str,
        config: EncoderConfig,
    ) -> candle_core::Result<Read> {
        self.read_by(&self.encoder(config)?, name, columns)
    }

    pub fn read_with_kwargs(
        &self,
        name: &str,
        config: EncoderConfig,
        kwargs: &TemplateKwargs,
    ) -> candle_core::Result<Read> {
        let encoder = self.encoder(config)?.with_template_kwargs(kwargs)?;
        self.read_by(&encoder, name, "")
    }

    fn encoder(&self, config: EncoderConfig) -> candle_core::Result<RecordEncoder<'_>> {
        RecordEncoder::new(&self.tokenizer, Some(&self.path("model")), config)
    }

    fn read_by(
        &self,
        encoder: &RecordEncoder<'_>,
        name: &str,
        columns: &str,
    ) -> candle_core::Result<Read> {
        let data = self.data(name, columns)?;
        let cache = TokenCache::new(self.path("cache"));
        let tokens = Tokens::encode(&data, encoder, Some(&cache))?;
        let records = (0..tokens.num_records()).map(|index| self.marked(&tokens, index));
        let place = format!("{}/", self.dir.path().display());
        let warnings = tokens.report().warnings(&data).into_iter();
        Ok(Read {
            records: records.collect::<candle_core::Result<_>>()?,
            warnings: warnings.map(|line| line.replace(&place, "")).collect(),
        })
    }

    fn marked(&self, tokens: &Tokens, index: usize) -> candle_core::Result<String> {
        let record = tokens.record(index)?;
        let mut text = String::new();
        let mut start = 0;
        for run in record.has_loss.chunk_by(|a, b| a == b) {
            let ids = &record.ids[start..start + run.len()];
            start += run.len();
            let part = self.tokenizer.decode_with_special_tokens(ids)?;
            let part = part.replace("<|end_of_text|>", "");
            match run[0] {
                true => text += &format!("⟦{part}⟧"),
                false => text += &part,
            }
        }
        Ok(text)
    }
}

/// The records of a file of this name and content.
pub fn records(name: &str, content: impl AsRef<[u8]>) -> candle_core::Result<Vec<String>> {
    let reading = Reading::new(Some(TEMPLATE));
    Ok(reading.write(name, content).read(name, "")?.records)
}

/// The lines of these records.
pub fn lines(records: &[serde_json::Value]) -> String {
    let lines = records.iter().map(|record| format!("{record}\n"));
    lines.collect()
}
