//! One record of a data set, in the spellings in which people write them.

use std::fmt;

use minijinja::Value;
use minijinja::value::ValueKind;

use super::alpaca::alpaca;
use super::columns::{Columns, MappedColumns};
use super::conversation_record::{completion_of_messages, conversation};
use super::preferences::{PREFERENCES, refuse_preferences};
use super::record_fields::RecordFields;
use crate::chat::{Chat, MASKS_OF_RECORDS, NO_TEXT};
use crate::record_error::RecordError;

/// What a record says.
#[derive(Clone, Debug)]
pub enum Record {
    /// Plain text, which is learned as a whole.
    Text(String),
    /// A text of which the completion is learned.
    Completion {
        /// What comes before.
        prompt: String,
        /// What is learned.
        completion: String,
    },
    /// A conversation of which the assistant's turns are learned.
    Chat(Chat),
    /// An instruction with its answer: a conversation for a model with a chat template, else a completion.
    Instruction {
        /// What is asked, with the input it is about.
        chat: Chat,
        /// The same as text.
        prompt: String,
        /// The answer.
        output: String,
    },
}

/// How a record is spelled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum RecordFormat {
    /// A text file, or `{"text"}`.
    Text,
    /// `{"prompt", "completion"}`
    Completion,
    /// `{"messages": [{"role", "content"}]}`, which may have `"system"` and `"tools"`.
    Messages,
    /// `{"instruction", "input", "output"}`, which may have `"system"` and `"history"`.
    Alpaca,
    /// `{"conversations": [{"from", "value"}]}`, which may have `"system"` and `"tools"`.
    ShareGpt,
    /// `{"prompt", "completion"}` of messages.
    CompletionOfMessages,
}

impl RecordFormat {
    /// All of them.
    pub(crate) const ALL: [Self; 6] = [
        Self::Text,
        Self::Completion,
        Self::Messages,
        Self::Alpaca,
        Self::ShareGpt,
        Self::CompletionOfMessages,
    ];

    /// Whether such a record is a conversation for a model with a chat template.
    pub(crate) fn is_conversation(self) -> bool {
        !matches!(self, Self::Text | Self::Completion)
    }

    /// So many records, in words.
    pub(crate) fn counted(self, count: usize) -> String {
        match self {
            Self::Text => crate::words::counted(count, "text"),
            format => format!("{} of {format}", crate::words::counted(count, "record")),
        }
    }
}

impl fmt::Display for RecordFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Text => "text",
            Self::Completion => "prompt and completion",
            Self::Messages => "messages",
            Self::Alpaca => "Alpaca",
            Self::ShareGpt => "ShareGPT",
            Self::CompletionOfMessages => "prompt and completion of messages",
        })
    }
}

/// Fields without which a record says something else, and that are not understood. So are parts that are no text ([`NO_TEXT`]), and masks that
/// are no list with an entry for each message.
const UNSUPPORTED: [&str; 3] = ["history", "tool_calls", "functions"];

/// A record, and what of it is not read.
pub(crate) struct ParsedRecord {
    pub format: RecordFormat,
    pub record: Record,
    /// Names of fields that say something and are not read.
    pub unread: Vec<String>,
}

impl Record {
    /// Reads a record, whose fields tell how it is spelled.
    ///
    /// # Errors
    /// Why it is none, or that it has parts that are not supported.
    pub fn parse(fields: &Value) -> Result<(RecordFormat, Self), RecordError> {
        let columns = Columns::default();
        let ParsedRecord { format, record, .. } =
            ParsedRecord::of(fields, &MappedColumns::of(&columns))?;
        Ok((format, record))
    }
}

impl ParsedRecord {
    /// As [`Record::parse`], with fields read from these columns.
    pub fn of(fields: &Value, columns: &MappedColumns<'_>) -> Result<Self, RecordError> {
        if fields.kind() != ValueKind::Map {
            return Err(format!("it is {}, expected an object", fields.kind()).into());
        }
        let (object, replaced) = columns.rename(fields);
        let (mut fields, columns) = (RecordFields::of(&object), columns.columns);
        // Who names one of them has chosen what is learned.
        if !PREFERENCES.iter().any(|name| columns.has_column(name)) {
            refuse_preferences(&fields)?;
        }
        let (format, record) = parse(&mut fields, columns)?;
        let mut unread = fields.unread();
        let is_unsupported = |name: &&String| {
            let is_mask = MASKS_OF_RECORDS.contains(&name.as_str()) && !fields.is_one(name);
            let names = || NO_TEXT.iter().chain(&UNSUPPORTED);
            // 0 or false images are none.
            let has_more = names().any(|other| other == name) && fields.is_true(name);
            is_mask || has_more
        };
        if let Some(name) = unread.iter().find(is_unsupported) {
            return Err(RecordError::Unsupported(format!(
                "it has {name}, which is not supported and without which something else would be learned\nhint: \
                 leave such records out, or the field if it says nothing about what is to be learned"
            )));
        }
        unread.extend(replaced);
        Ok(Self {
            format,
            record,
            unread,
        })
    }
}

/// The fields by which spellings are known, in the order in which they are looked for.
const SPELLINGS: [(RecordFormat, &[&str]); 5] = [
    (RecordFormat::Messages, &["messages"]),
    (RecordFormat::ShareGpt, &["conversations"]),
    (RecordFormat::Completion, &["prompt", "completion"]),
    (RecordFormat::Alpaca, &["instruction", "output"]),
    (RecordFormat::Text, &["text"]),
];

/// Of a record that can be read in several spellings, one with a field for which a column is named comes first.
fn parse(
    fields: &mut RecordFields<'_>,
    columns: &Columns,
) -> Result<(RecordFormat, Record), RecordError> {
    let is_there = |(_, names): &&(_, &[&str])| names.iter().all(|name| fields.has(name));
    let mut there = SPELLINGS.iter().filter(is_there);
    let first = there.clone().next();
    let named = there.find(|(_, names)| names.iter().any(|name| columns.has_field(name)));
    let Some((format, names)) = named.or(first) else {
        return Err(format!(
            "its fields are {:?}, expected text; prompt and completion; messages; instruction and output; or conversations\nhint: --columns reads them from columns of \
             other names, as in --columns prompt=question,completion=answer, or with a chat template instruction=question,output=answer",
            fields.names()
        )
        .into());
    };
    let record = match format {
        RecordFormat::Messages | RecordFormat::ShareGpt => {
            Record::Chat(conversation(fields, names)?)
        }
        RecordFormat::Completion | RecordFormat::CompletionOfMessages => return completion(fields),
        RecordFormat::Alpaca => alpaca(fields)?,
        RecordFormat::Text => Record::Text(fields.text("text")?),
    };
    Ok((*format, record))
}

/// Of two texts, or of two lists of messages.
fn completion(fields: &mut RecordFields<'_>) -> Result<(RecordFormat, Record), RecordError> {
    let names = ["prompt", "completion"];
    let is_list = match names.map(|name| fields.has_messages_as_text(name)) {
        // Cells of a table.
        [true, true] => [true; 2],
        _ => names.map(|name| fields.peek(name).kind() == ValueKind::Seq),
    };
    match is_list {
        [false, false] => {
            let record = Record::Completion {
                prompt: fields.text("prompt")?,
                completion: fields.text("completion")?,
            };
            Ok((RecordFormat::Completion, record))
        }
        [true, true] => {
            let chat = completion_of_messages(fields)?;
            Ok((RecordFormat::CompletionOfMessages, Record::Chat(chat)))
        }
        _ => Err(format!(
            "its prompt is {} and its completion is {}, expected two texts, or two lists of messages",
            fields.peek("prompt").kind(),
            fields.peek("completion").kind()
        )
        .into()),
    }
}
