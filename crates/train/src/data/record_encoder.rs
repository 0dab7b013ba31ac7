//! Token ids of records, and which of them have loss.

use std::path::Path;

use candle_core::Result;
use jiff::civil::Date;

use super::record::Record;
use super::token_index::RecordKind;
use crate::Tokenizer;
use crate::chat::{Chat, ChatTemplate};

/// A record as token ids.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EncodedRecord {
    /// Whether it may be cut into several sequences.
    pub kind: RecordKind,
    /// The ids.
    pub ids: Vec<u32>,
    /// Of each id, whether the model learns to write it.
    pub has_loss: Vec<bool>,
}

/// Makes token ids of records.
#[derive(Debug)]
pub struct RecordEncoder<'a> {
    tokenizer: &'a Tokenizer,
    template: Option<ChatTemplate>,
    special_tokens: Vec<String>,
    train_on_prompt: bool,
}

impl<'a> RecordEncoder<'a> {
    /// With the chat template of the checkpoint in `model`, if there are both. `train_on_prompt`: all tokens have loss, not only those
    /// of the assistant or of a completion.
    ///
    /// # Errors
    /// A template that cannot be read.
    pub fn new(
        tokenizer: &'a Tokenizer,
        model: Option<&Path>,
        train_on_prompt: bool,
    ) -> Result<Self> {
        let named = tokenizer.named_special_tokens();
        let template = model.map(|model| ChatTemplate::from_dir(model, named.clone()));
        Ok(Self {
            tokenizer,
            template: template.transpose()?.flatten(),
            special_tokens: tokenizer.special_tokens(),
            train_on_prompt,
        })
    }

    /// With the chat template [on this date](ChatTemplate::with_date).
    pub fn with_date(mut self, date: Date) -> Self {
        self.template = self.template.map(|template| template.with_date(date));
        self
    }

    /// The ids of a record: of a text or completion those that the tokenizer gives with its own special tokens, and at the end that of the
    /// end of a sequence; of a conversation those of its rendered text.
    ///
    /// # Errors
    /// Why there are none, as a part of a sentence.
    pub fn encode(&self, record: &Record) -> std::result::Result<EncodedRecord, String> {
        match (record, &self.template) {
            (Record::Text(text), _) => self.text(text),
            (Record::Completion { prompt, completion }, _) => self.completion(prompt, completion),
            (Record::Chat(chat), Some(template))
            | (Record::Instruction { chat, .. }, Some(template)) => self.chat(template, chat),
            (Record::Instruction { prompt, output, .. }, None) => self.completion(prompt, output),
            (Record::Chat(_), None) => {
                Err("it is a conversation, and the checkpoint has no chat template".to_string())
            }
        }
    }

    fn text(&self, text: &str) -> std::result::Result<EncodedRecord, String> {
        let ids = self.tokenizer.encode_with_special_tokens(text);
        let ids = ids.map_err(|err| err.to_string())?;
        let has_loss = vec![true; ids.len()];
        Ok(self.ended(RecordKind::Text, (ids, has_loss)))
    }

    fn completion(
        &self,
        prompt: &str,
        completion: &str,
    ) -> std::result::Result<EncodedRecord, String> {
        if completion.is_empty() {
            return Err("its completion is empty".to_string());
        }
        let text = format!("{prompt}{completion}");
        let learned = prompt.len()..text.len();
        let spans = std::slice::from_ref(&learned);
        let encoded = self.tokenizer.encode_spans(&text, true, spans);
        let (ids, mut has_loss) = encoded.map_err(|err| err.to_string())?;
        if let (Some(last), true) = (
            has_loss.last_mut(),
            ids.last() == Some(&self.tokenizer.eos_id()),
        ) {
            *last = true;
        }
        Ok(self.ended(RecordKind::Whole, (ids, has_loss)))
    }

    fn chat(
        &self,
        template: &ChatTemplate,
        chat: &Chat,
    ) -> std::result::Result<EncodedRecord, String> {
        let rendered = template.render(chat, &self.special_tokens)?;
        let encoded = self
            .tokenizer
            .encode_spans(&rendered.text, false, &rendered.assistant);
        let (ids, has_loss) = encoded.map_err(|err| err.to_string())?;
        Ok(self.with_losses(RecordKind::Whole, ids, has_loss))
    }

    /// With the end of the sequence, if the tokenizer has not added it.
    fn ended(
        &self,
        kind: RecordKind,
        (mut ids, mut has_loss): (Vec<u32>, Vec<bool>),
    ) -> EncodedRecord {
        let eos = self.tokenizer.eos_id();
        if ids.last() != Some(&eos) {
            ids.push(eos);
            has_loss.push(true);
        }
        self.with_losses(kind, ids, has_loss)
    }

    /// The first token of a record follows nothing from which it could be foretold.
    fn with_losses(
        &self,
        kind: RecordKind,
        ids: Vec<u32>,
        mut has_loss: Vec<bool>,
    ) -> EncodedRecord {
        if self.train_on_prompt {
            has_loss.fill(true);
        }
        if let Some(first) = has_loss.first_mut() {
            *first = false;
        }
        EncodedRecord {
            kind,
            ids,
            has_loss,
        }
    }

    /// What decides what [`Self::encode`] gives.
    pub(crate) fn identity(&self) -> Result<String> {
        let template = self.template.as_ref().map(ChatTemplate::identity);
        let (tokenizer, on_prompt) = (self.tokenizer.identity()?, self.train_on_prompt);
        Ok(format!("{tokenizer} {template:?} {on_prompt}"))
    }

    /// The checkpoint's chat template.
    pub fn template(&self) -> Option<&ChatTemplate> {
        self.template.as_ref()
    }
}
