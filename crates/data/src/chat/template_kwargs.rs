//! Variables that a chat template gets beside the conversation, such as `enable_thinking`.

use std::fmt;
use std::str::FromStr;

use minijinja::Value;
use minijinja::value::ValueKind;

use super::json_text::read_json;
use super::message::Fields;

/// What a conversation itself is, and what transformers takes by these names for itself.
const RESERVED: [&str; 7] = [
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "conversation",
    "chat_template",
    "tokenize",
];

/// Variables that a chat template gets beside the conversation, such as `enable_thinking`: the named arguments of
/// transformers' `apply_chat_template`. As a text they are a JSON object.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TemplateKwargs(Vec<(String, Value)>);

impl TemplateKwargs {
    /// Those of a JSON object, which may be in a text.
    pub(crate) fn of(value: &Value) -> Result<Self, String> {
        if let Some(text) = value.as_str() {
            return text.parse();
        }
        if value.kind() != ValueKind::Map {
            return Err(format!("is {}, expected a JSON object", value.kind()));
        }
        let fields = Fields::of(value).0;
        let reserved = fields
            .iter()
            .find(|(name, _)| RESERVED.contains(&name.as_str()));
        match reserved {
            Some((name, _)) => Err(format!(
                "has {name}, which is no variable that may be chosen: a template gets it from the conversation"
            )),
            None => Ok(Self(fields)),
        }
    }

    /// Those that say something: Arrow has null for what a record does not have.
    pub(crate) fn without_nulls(mut self) -> Self {
        self.0.retain(|(_, value)| !value.is_none());
        self
    }

    /// Their names.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|(name, _)| name.as_str())
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&str, Value)> {
        let pairs = self.0.iter();
        pairs.map(|(name, value)| (name.as_str(), value.clone()))
    }
}

impl FromStr for TemplateKwargs {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let value: Value = read_json(text).map_err(|err| {
            format!("is not valid JSON ({err}), expected an object such as {{\"enable_thinking\": false}}")
        })?;
        match value.as_str() {
            Some(_) => Err("is a text of JSON, expected an object".to_string()),
            None => Self::of(&value),
        }
    }
}

impl fmt::Display for TemplateKwargs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let object = Value::from_pairs(self.0.iter().cloned());
        let json = serde_json::to_string(&object).map_err(|_| fmt::Error)?;
        f.write_str(&json)
    }
}
