//! A new tokenizer from text: byte-level BPE (arXiv:1508.07909 on bytes) with the special tokens of Llama 3.

use std::collections::HashSet;
use std::path::Path;

use candle_core::{Error, Result, bail};
use candle_parallel::checkpoint::WholeFile;
use serde_json::json;
use tokenizers::AddedToken;
use tokenizers::models::TrainerWrapper;
use tokenizers::models::bpe::{BPE, BpeTrainerBuilder};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;

use super::special_tokens::SpecialTokens;
use super::tokenizer::Tokenizer;

/// Ids 0 to 4 of every trained tokenizer; the first begins, the second ends a sequence.
const SPECIAL_TOKENS: [&str; 5] = [
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
];
const BOS_ID: u32 = 0;
const EOS_ID: u32 = 1;
/// Every byte is a token, so that any text can be encoded.
const NUM_BYTES: usize = 256;

impl Tokenizer {
    /// Learns a byte-level BPE vocabulary of at most `vocab_size` tokens from `texts`: 5 special tokens, the 256 bytes and
    /// the merges that shorten the texts most. Texts with few distinct words give fewer tokens: ask
    /// [`Tokenizer::vocab_size`].
    ///
    /// Merges are learned line by line, so none spans a line break.
    ///
    /// # Errors
    /// `vocab_size` has no room for the bytes and special tokens, or the trainer fails.
    pub fn train_bpe<'a>(
        texts: impl Iterator<Item = &'a str> + Send,
        vocab_size: usize,
    ) -> Result<Self> {
        let min_size = NUM_BYTES + SPECIAL_TOKENS.len();
        if vocab_size < min_size {
            bail!(
                "vocab_size({vocab_size}) < {NUM_BYTES} bytes + {} special tokens = {min_size}",
                SPECIAL_TOKENS.len()
            );
        }
        let mut tokenizer = tokenizers::Tokenizer::new(BPE::default());
        let bytes = ByteLevel::default().add_prefix_space(false);
        tokenizer.with_pre_tokenizer(Some(bytes));
        tokenizer.with_decoder(Some(ByteLevel::default()));
        let mut trainer = TrainerWrapper::from(
            BpeTrainerBuilder::new()
                .vocab_size(vocab_size)
                .special_tokens(
                    SPECIAL_TOKENS
                        .map(|token| AddedToken::from(token, true))
                        .to_vec(),
                )
                .initial_alphabet(HashSet::from_iter(ByteLevel::alphabet()))
                .show_progress(false)
                .build(),
        );
        if let Err(e) = tokenizer.train(
            &mut trainer,
            texts.flat_map(|text| text.split_inclusive('\n')),
        ) {
            bail!("cannot train a BPE tokenizer: {e}");
        }
        Self::new(
            tokenizer,
            SpecialTokens {
                eos_id: EOS_ID,
                bos_id: Some(BOS_ID),
            },
            "the trained tokenizer".into(),
        )
    }

    /// Writes `tokenizer.json` and `tokenizer_config.json` into `dir`, which must exist, for transformers'
    /// `PreTrainedTokenizerFast` and for [`Tokenizer::from_dir`]. To keep a downloaded tokenizer with its chat template,
    /// copy its files instead.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn save(&self, dir: impl AsRef<Path>) -> Result<()> {
        let mut files = self.files()?.into_iter();
        files.try_for_each(|(name, content)| {
            let path = dir.as_ref().join(name);
            let written = WholeFile::replace(&path, &content);
            written.map_err(|err| Error::msg(format!("cannot write {path:?}: {err}")))
        })
    }

    /// The files of [`Self::save`]: names and contents.
    ///
    /// # Errors
    /// A tokenizer that cannot be written as JSON.
    pub fn files(&self) -> Result<Vec<(String, Vec<u8>)>> {
        let tokenizer = match self.inner().to_string(true) {
            Ok(tokenizer) => tokenizer,
            Err(e) => bail!("cannot serialize the tokenizer: {e}"),
        };
        let config = json!({
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": self.bos_id().and_then(|id| self.token(id)),
            "eos_token": self.token(self.eos_id()),
            "clean_up_tokenization_spaces": false,
        });
        let files = [
            ("tokenizer.json", tokenizer),
            ("tokenizer_config.json", format!("{config:#}")),
        ];
        let files = files.map(|(name, text)| (name.to_string(), text.into_bytes()));
        Ok(files.into())
    }
}
