//! One record of a data set, in the spellings in which people write them.

use std::fmt;

use minijinja::Value;
use minijinja::value::ValueKind;
use serde::{Deserialize, Serialize};

use crate::chat::Chat;

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
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum RecordFormat {
    /// A text file, or `{"text"}`.
    Text,
    /// `{"prompt", "completion"}`
    Completion,
    /// `{"messages": [{"role", "content"}]}`, which may have `"tools"`.
    Messages,
    /// `{"instruction", "input", "output"}`, which may have `"system"`.
    Alpaca,
    /// `{"conversations": [{"from", "value"}]}`, which may have `"system"` and `"tools"`.
    ShareGpt,
}

impl fmt::Display for RecordFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Text => "text",
            Self::Completion => "prompt and completion",
            Self::Messages => "messages",
            Self::Alpaca => "Alpaca",
            Self::ShareGpt => "ShareGPT",
        })
    }
}

impl Record {
    /// Reads a record, whose fields tell how it is spelled.
    ///
    /// # Errors
    /// Why it is none, as a part of a sentence.
    pub fn parse(fields: &Value) -> Result<(RecordFormat, Self), String> {
        if fields.kind() != ValueKind::Map {
            return Err(format!("it is {}, expected an object", fields.kind()));
        }
        let has = |name: &str| field(fields, name).is_some();
        if has("messages") {
            let messages = list(fields, "messages")?;
            let chat = Chat::new(messages, field(fields, "tools"))?;
            Ok((RecordFormat::Messages, Self::Chat(chat)))
        } else if has("conversations") {
            Ok((RecordFormat::ShareGpt, Self::Chat(share_gpt(fields)?)))
        } else if has("prompt") && has("completion") {
            let record = Self::Completion {
                prompt: text(fields, "prompt")?,
                completion: text(fields, "completion")?,
            };
            Ok((RecordFormat::Completion, record))
        } else if has("instruction") && has("output") {
            Ok((RecordFormat::Alpaca, alpaca(fields)?))
        } else if has("text") {
            Ok((RecordFormat::Text, Self::Text(text(fields, "text")?)))
        } else {
            let names = fields.try_iter().into_iter().flatten();
            let names: Vec<String> = names.map(|name| name.to_string()).collect();
            Err(format!(
                "its fields are {names:?}, expected text; prompt and completion; messages; instruction and output; or conversations"
            ))
        }
    }
}

/// A field that is there and not null.
fn field(fields: &Value, name: &str) -> Option<Value> {
    let value = fields.get_attr(name).ok()?;
    (!value.is_undefined() && !value.is_none()).then_some(value)
}

fn text(fields: &Value, name: &str) -> Result<String, String> {
    match field(fields, name) {
        Some(value) => match value.as_str() {
            Some(text) => Ok(text.to_string()),
            None => Err(format!("its {name} is {}, expected a text", value.kind())),
        },
        None => Err(format!("it has no {name}")),
    }
}

/// A text that may be missing, which is as good as empty.
fn optional_text(fields: &Value, name: &str) -> Result<Option<String>, String> {
    let text = field(fields, name)
        .map(|_| text(fields, name))
        .transpose()?;
    Ok(text.filter(|text| !text.is_empty()))
}

fn list(fields: &Value, name: &str) -> Result<Vec<Value>, String> {
    let value = field(fields, name).unwrap_or_default();
    match value.kind() {
        ValueKind::Seq => Ok(value.try_iter().into_iter().flatten().collect()),
        kind => Err(format!("its {name} is {kind}, expected a list")),
    }
}

/// Roles of ShareGPT, and what chat templates call them.
const ROLES: [(&str, &str); 13] = [
    ("system", "system"),
    ("human", "user"),
    ("user", "user"),
    ("gpt", "assistant"),
    ("assistant", "assistant"),
    ("model", "assistant"),
    ("bot", "assistant"),
    ("chatgpt", "assistant"),
    ("bing", "assistant"),
    ("bard", "assistant"),
    ("tool", "tool"),
    ("function_response", "tool"),
    ("observation", "tool"),
];

fn share_gpt(fields: &Value) -> Result<Chat, String> {
    let mut messages = Vec::new();
    if let Some(system) = optional_text(fields, "system")? {
        messages.push(message("system", system));
    }
    for (index, turn) in list(fields, "conversations")?.iter().enumerate() {
        // Some files have this name for the other spelling.
        if field(turn, "role").is_some() {
            messages.push(turn.clone());
            continue;
        }
        let of_turn = |err: String| format!("of turn {index}: {err}");
        let from = text(turn, "from").map_err(of_turn)?;
        let role = ROLES.iter().find(|(name, _)| *name == from);
        let Some((_, role)) = role else {
            return Err(format!(
                "turn {index} is from {from:?}, which is no known role"
            ));
        };
        messages.push(message(role, text(turn, "value").map_err(of_turn)?));
    }
    Chat::new(messages, field(fields, "tools"))
}

/// The prompt of Stanford's Alpaca, for models without a chat template.
const WITH_INPUT: &str = "Below is an instruction that describes a task, paired with an input that provides further context. \
                          Write a response that appropriately completes the request.";
const WITHOUT_INPUT: &str = "Below is an instruction that describes a task. Write a response that appropriately completes the request.";

fn alpaca(fields: &Value) -> Result<Record, String> {
    let instruction = text(fields, "instruction")?;
    let input = optional_text(fields, "input")?;
    let output = text(fields, "output")?;
    let system = optional_text(fields, "system")?;
    let (preamble, asked, input) = match input {
        Some(input) => (
            WITH_INPUT,
            format!("{instruction}\n{input}"),
            format!("### Input:\n{input}\n\n"),
        ),
        None => (WITHOUT_INPUT, instruction.clone(), String::new()),
    };
    let preamble = system.clone().unwrap_or(preamble.to_string());
    let system = system.map(|system| message("system", system));
    let turns = [message("user", asked), message("assistant", output.clone())];
    Ok(Record::Instruction {
        chat: Chat::new(system.into_iter().chain(turns).collect(), None)?,
        prompt: format!("{preamble}\n\n### Instruction:\n{instruction}\n\n{input}### Response:\n"),
        output,
    })
}

fn message(role: &str, content: String) -> Value {
    minijinja::context! { role => role, content => content }
}
