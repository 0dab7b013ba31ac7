//! Token ids of records, and which of them have loss.

use std::borrow::Cow;
use std::path::Path;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock};

use candle_core::Result;
use jiff::civil::Date;

use super::token_index::RecordKind;
use crate::chat::{Chat, ChatTemplate, TemplateKwargs};
use crate::record_error::RecordError;
use crate::records::record::Record;
use crate::records::report::RecordNotes;
use crate::vocabulary::Tokenizer;

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

/// What of records has loss, and how conversations are rendered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EncoderConfig {
    /// All tokens have loss, not only those of the assistant or of a completion; but those of the assistant's messages that are not
    /// learned by what their record says.
    pub train_on_prompt: bool,
    /// Of a conversation only the assistant's last message has loss.
    pub mask_history: bool,
    /// Leave arguments of tool calls that are JSON in a text as they are, as transformers does, instead of reading
    /// the JSON for templates that expect objects.
    pub keep_argument_strings: bool,
}

/// Makes token ids of records.
#[derive(Debug)]
pub struct RecordEncoder<'a> {
    tokenizer: &'a Tokenizer,
    template: Option<ChatTemplate>,
    special_tokens: Vec<String>,
    config: EncoderConfig,
    /// Name of a template for a checkpoint that has none.
    suggested: OnceLock<&'static str>,
}

impl<'a> RecordEncoder<'a> {
    /// With the chat template of the checkpoint in `model`, if there are both.
    ///
    /// # Errors
    /// A template that cannot be read.
    pub fn new(
        tokenizer: &'a Tokenizer,
        model: Option<&Path>,
        config: EncoderConfig,
    ) -> Result<Self> {
        let named = tokenizer.named_special_tokens();
        let template = model.map(|model| ChatTemplate::from_dir(model, named.clone()));
        Ok(Self {
            tokenizer,
            template: template.transpose()?.flatten(),
            special_tokens: tokenizer.special_tokens(),
            config,
            suggested: OnceLock::new(),
        })
    }

    /// With this chat template in place of the checkpoint's.
    pub fn with_template(self, template: ChatTemplate) -> Self {
        Self {
            template: Some(template),
            ..self
        }
    }

    /// With the chat template [on this date](ChatTemplate::with_date).
    pub fn with_date(mut self, date: Date) -> Self {
        self.template = self.template.map(|template| template.with_date(date));
        self
    }

    /// With these variables for the chat template, if there is one.
    ///
    /// # Errors
    /// As [`ChatTemplate::with_kwargs`].
    pub fn with_template_kwargs(mut self, kwargs: &TemplateKwargs) -> Result<Self> {
        let template = self.template.map(|it| it.with_kwargs(kwargs.clone()));
        self.template = template.transpose()?;
        Ok(self)
    }

    /// The ids of a record: of a text or completion those that the tokenizer gives with its own special tokens, and at the end that of the
    /// end of a sequence; of a conversation those of its rendered text.
    ///
    /// # Errors
    /// Why there are none.
    pub fn encode(&self, record: &Record) -> std::result::Result<EncodedRecord, RecordError> {
        self.encode_noting(record, &mut RecordNotes::default())
    }

    /// As [`Self::encode`]; `notes` get what there is to tell of it.
    pub(crate) fn encode_noting(
        &self,
        record: &Record,
        notes: &mut RecordNotes,
    ) -> std::result::Result<EncodedRecord, RecordError> {
        match (record, &self.template) {
            (Record::Text(text), _) => Ok(self.text(text)?),
            (Record::Completion { prompt, completion }, _) => {
                Ok(self.completion(prompt, completion)?)
            }
            (Record::Chat(chat), Some(template))
            | (Record::Instruction { chat, .. }, Some(template)) => {
                self.chat(template, chat, notes)
            }
            (Record::Instruction { prompt, output, .. }, None) => {
                Ok(self.completion(prompt, output)?)
            }
            (Record::Chat(_), None) => Err(format!(
                "it is a conversation, and the checkpoint has no chat template\nhint: --chat-template {} (or another name, or a file) gives it one",
                self.suggested.get_or_init(|| ChatTemplate::suggested(self.tokenizer))
            )
            .into()),
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
        notes: &mut RecordNotes,
    ) -> std::result::Result<EncodedRecord, RecordError> {
        self.check_masks(chat)?;
        template.check_roles(chat)?;
        let read = template.with_contents_as_read(chat);
        (notes.keeps_parts, notes.joins_parts) = (read.keeps_parts, read.joins_parts);
        let mut chat = read.chat;
        if !self.config.keep_argument_strings
            && let Cow::Owned(parsed) = template.with_arguments_as_read(&chat)
        {
            notes.has_parsed_arguments = true;
            chat = Cow::Owned(parsed);
        }
        if chat.has_prompt() && !self.config.train_on_prompt {
            chat = Cow::Owned(chat.into_owned().without_loss_in_prompt());
        }
        if self.config.mask_history {
            chat = Cow::Owned(chat.into_owned().with_last_answer_only());
        }
        let rendered = template.render_as_read(&chat, &self.special_tokens)?;
        notes.unread.extend(template.unread(&chat, &rendered.text)?);
        let spans = match self.config.train_on_prompt {
            true => &rendered.masked,
            false => &rendered.assistant,
        };
        let encoded = self.tokenizer.encode_spans(&rendered.text, false, spans);
        let (ids, in_spans) = encoded.map_err(|err| err.to_string())?;
        let has_loss = in_spans
            .into_iter()
            .map(|is_in| is_in != self.config.train_on_prompt);
        Ok(with_losses(RecordKind::Whole, ids, has_loss.collect()))
    }

    /// An error if the record asks for loss, or for none, where there is no choice: on messages that are not the assistant's.
    fn check_masks(&self, chat: &Chat) -> std::result::Result<(), RecordError> {
        let on_prompt = self.config.train_on_prompt;
        let is_asked = |(index, mask): (usize, &Option<bool>)| {
            let is_prompt = chat.role(index) != "assistant";
            (is_prompt && *mask == Some(!on_prompt)).then_some(index)
        };
        let Some(index) = chat.masks.iter().enumerate().find_map(is_asked) else {
            return Ok(());
        };
        let message = format!("message {index}, of the role {:?}", chat.role(index));
        Err(RecordError::Unsupported(match on_prompt {
            true => format!(
                "{message}, is not to be learned by what the record says, and with --train-on-prompt only messages of the assistant can be left out"
            ),
            false => format!(
                "{message}, is to be learned by what the record says, and only messages of the assistant are\nhint: --train-on-prompt learns \
                 the others, too"
            ),
        }))
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
        if self.config.train_on_prompt {
            has_loss.fill(true);
        }
        with_losses(kind, ids, has_loss)
    }

    /// What decides what [`Self::encode`] gives.
    pub(crate) fn identity(&self) -> Result<String> {
        let template = self.template.as_ref().map(ChatTemplate::identity);
        let (tokenizer, config) = (self.tokenizer.identity()?, self.config);
        Ok(format!("{tokenizer} {template:?} {config:?}"))
    }

    /// As [`Tokenizer::num_encoded_bytes`].
    pub(crate) fn num_encoded_bytes(&self) -> Arc<AtomicU64> {
        self.tokenizer.num_encoded_bytes()
    }

    /// The checkpoint's chat template.
    pub fn template(&self) -> Option<&ChatTemplate> {
        self.template.as_ref()
    }
}

/// The first token of a record follows nothing from which it could be foretold.
pub(super) fn with_losses(
    kind: RecordKind,
    ids: Vec<u32>,
    mut has_loss: Vec<bool>,
) -> EncodedRecord {
    if let Some(first) = has_loss.first_mut() {
        *first = false;
    }
    EncodedRecord {
        kind,
        ids,
        has_loss,
    }
}
