//! The fields of a message.

use minijinja::Value;
use minijinja::value::ValueKind;

use crate::record_error::RecordError;

/// Names under which data sets keep what the assistant thought; the first is the one that templates read.
pub(super) const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// What the assistant writes beside its text.
pub(super) const CALLS: [&str; 2] = ["tool_calls", "function_call"];

/// The texts of a content in parts.
pub(super) fn texts_of_parts(parts: &Value) -> Result<Vec<String>, RecordError> {
    let parts = parts.try_iter().into_iter().flatten();
    let texts = parts.map(|part| {
        let text = ["text", "value"].into_iter().find_map(|name| {
            let text = part.get_attr(name).ok()?;
            text.as_str().map(str::to_string)
        });
        let text = part.as_str().map(str::to_string).or(text);
        text.ok_or_else(|| {
            RecordError::Unsupported(
                "has a part that is no text; images and sounds are not supported".to_string(),
            )
        })
    });
    texts.collect()
}

/// A part of a content that is this text.
pub(super) fn text_part(text: String) -> Value {
    minijinja::context! { type => "text", text => text }
}

/// The texts of a content: of its parts, if it is a list of these.
pub(super) fn texts_of(content: &Value) -> Vec<String> {
    match content.as_str() {
        Some(text) => vec![text.to_string()],
        None => texts_of_parts(content).unwrap_or_default(),
    }
}

/// A content of these texts: a list of parts, or one text.
pub(super) fn content_of(texts: Vec<String>, is_in_parts: bool) -> Value {
    if is_in_parts {
        texts.into_iter().map(text_part).collect()
    } else {
        Value::from(texts.concat())
    }
}

/// Whether a value says anything: no null, and no empty text, list or object.
pub(crate) fn has_content(value: &Value) -> bool {
    match value.kind() {
        ValueKind::Undefined | ValueKind::None => false,
        ValueKind::String | ValueKind::Seq | ValueKind::Map => value.is_true(),
        _ => true,
    }
}

/// An object's fields, in their order.
pub(super) struct Fields(pub Vec<(String, Value)>);

impl Fields {
    pub fn of(value: &Value) -> Self {
        let names = value.try_iter().into_iter().flatten();
        let fields = names.map(|name| {
            let field = value.get_item(&name).unwrap_or_default();
            (name.to_string(), field)
        });
        Self(fields.collect())
    }

    /// A field that is not null.
    pub fn get(&self, name: &str) -> Option<&Value> {
        let is_it = |(known, value): &&(String, Value)| known == name && !value.is_none();
        let field = self.0.iter().find(is_it);
        field.map(|(_, value)| value)
    }

    pub fn has_content(&self, name: &str) -> bool {
        self.get(name).is_some_and(has_content)
    }

    pub fn set(&mut self, name: &str, value: Value) {
        match self.0.iter_mut().find(|(known, _)| known == name) {
            Some((_, old)) => *old = value,
            None => self.0.push((name.to_string(), value)),
        }
    }

    /// Sets the content to this text, as the only part of a content in parts.
    pub fn set_text(&mut self, text: &str) {
        let is_in_parts = self.is_in_parts();
        let content = content_of(vec![text.to_string()], is_in_parts);
        self.set("content", content);
    }

    /// Whether the content is a list.
    pub fn is_in_parts(&self) -> bool {
        let content = self.get("content");
        content.is_some_and(|content| content.kind() == ValueKind::Seq)
    }

    /// The object with this field, in place of one of the same name.
    pub fn with(mut self, name: &str, value: Value) -> Value {
        self.set(name, value);
        self.into_value()
    }

    pub fn remove(&mut self, names: &[&str]) {
        self.0.retain(|(name, _)| !names.contains(&name.as_str()));
    }

    pub fn into_value(self) -> Value {
        Value::from_pairs(self.0)
    }
}
