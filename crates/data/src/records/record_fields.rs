//! The fields of a record, and which of them have been read.

use minijinja::Value;
use minijinja::value::ValueKind;

use crate::chat::has_content;
use crate::chat::json_text::read_json;

/// The fields that records are read by.
pub(super) const FIELDS: [&str; 16] = [
    "text",
    "prompt",
    "completion",
    "messages",
    "conversations",
    "instruction",
    "input",
    "output",
    "system",
    "history",
    "tools",
    "chat_template_kwargs",
    "weight",
    "train",
    "training",
    "loss_mask",
];

/// The fields of an object.
pub(super) struct RecordFields<'a> {
    object: &'a Value,
    read: Vec<&'static str>,
}

impl<'a> RecordFields<'a> {
    pub fn of(object: &'a Value) -> Self {
        Self {
            object,
            read: Vec::new(),
        }
    }

    /// Names of the fields that are not null.
    pub fn names(&self) -> Vec<String> {
        let names = self.object.try_iter().into_iter().flatten();
        let names = names.map(|name| name.to_string());
        names.filter(|name| self.has(name)).collect()
    }

    /// Names of the fields that say something and have not been read.
    pub fn unread(&self) -> Vec<String> {
        let mut names = self.names();
        names.retain(|name| has_content(&self.peek(name)) && !self.read.contains(&name.as_str()));
        names
    }

    /// A field, which does not count as read by that.
    pub fn peek(&self, name: &str) -> Value {
        self.object.get_attr(name).unwrap_or_default()
    }

    /// Whether a field is there and not null.
    pub fn has(&self, name: &str) -> bool {
        let value = self.peek(name);
        !value.is_undefined() && !value.is_none()
    }

    /// Whether a field is neither 0, false, null nor empty.
    pub fn is_true(&self, name: &str) -> bool {
        self.peek(name).is_true()
    }

    /// Whether a field is 1 or true.
    pub fn is_one(&self, name: &str) -> bool {
        let value = self.peek(name);
        value == Value::from(true) || value == Value::from(1)
    }

    /// A field that is there and not null.
    pub fn value(&mut self, name: &'static str) -> Option<Value> {
        self.read.push(name);
        let value = self.object.get_attr(name).ok()?;
        self.has(name).then_some(value)
    }

    pub fn text(&mut self, name: &'static str) -> Result<String, String> {
        match self.value(name) {
            Some(value) => match value.as_str() {
                Some(text) => Ok(text.to_string()),
                None => Err(format!("its {name} is {}, expected a text", value.kind())),
            },
            None => Err(format!("it has no {name}")),
        }
    }

    /// A text that may be missing, which is as good as empty.
    pub fn optional_text(&mut self, name: &'static str) -> Result<Option<String>, String> {
        let text = match self.has(name) {
            true => Some(self.text(name)?),
            false => None,
        };
        Ok(text.filter(|text| !text.is_empty()))
    }

    /// Whether a field is a text that is a list of messages as JSON.
    pub fn has_messages_as_text(&self, name: &str) -> bool {
        let field = self.peek(name);
        let text = field.as_str().filter(|text| text.starts_with('['));
        let list = text.and_then(|text| read_json(text).ok());
        let mut messages = list
            .iter()
            .flat_map(|list| list.try_iter())
            .flatten()
            .peekable();
        let is_message = |message: Value| {
            let has = |name: &str| {
                message
                    .get_attr(name)
                    .is_ok_and(|value| !value.is_undefined())
            };
            has("role") || has("from")
        };
        messages.peek().is_some() && messages.all(is_message)
    }

    /// A list, which may be JSON in a text, as cells of a table have it.
    pub fn list(&mut self, name: &'static str) -> Result<Vec<Value>, String> {
        let mut value = self.value(name).unwrap_or_default();
        if let Some(text) = value.as_str() {
            value = match read_json(text) {
                Ok(list) if list.kind() == ValueKind::Seq => list,
                Ok(other) => {
                    let kind = other.kind();
                    return Err(format!(
                        "its {name} is JSON in a text, and there {kind}, expected a list"
                    ));
                }
                Err(err) => {
                    return Err(format!(
                        "its {name} is a text, expected a list, perhaps as JSON in a text; but that is not valid JSON: {err}"
                    ));
                }
            };
        }
        match value.kind() {
            ValueKind::Seq => Ok(value.try_iter().into_iter().flatten().collect()),
            kind => Err(format!("its {name} is {kind}, expected a list")),
        }
    }
}
