//! A conversation: messages with roles, and the tools that the assistant may call.

use minijinja::Value;
use minijinja::value::ValueKind;
use serde::Deserialize;

/// Names under which data sets keep what the assistant thought; the first is the one that templates read.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// A conversation.
#[derive(Clone, Debug)]
pub struct Chat {
    messages: Vec<Value>,
    tools: Option<Value>,
}

impl Chat {
    /// Checks that each of `messages` is an object with a `role`. Content of several parts that are all text becomes one text, and
    /// tools that are JSON in a text become what the JSON says, as templates expect them.
    ///
    /// # Errors
    /// What is wrong with a message, as a part of a sentence.
    pub fn new(messages: Vec<Value>, tools: Option<Value>) -> Result<Self, String> {
        if messages.is_empty() {
            return Err("it has no messages".to_string());
        }
        let messages = messages.iter().enumerate().map(|(index, message)| {
            normalized(message).map_err(|err| format!("message {index} {err}"))
        });
        let tools = match tools {
            Some(tools) => match tools.as_str() {
                Some("") => None,
                Some(json) => Some(
                    serde_json::from_str(json)
                        .map_err(|err| format!("its tools are no JSON: {err}"))?,
                ),
                None => Some(tools),
            },
            None => None,
        };
        Ok(Self {
            messages: messages.collect::<Result<_, _>>()?,
            tools: tools.filter(Value::is_true),
        })
    }

    /// As [`Self::new`], of JSON objects and without tools.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn from_json(messages: &[serde_json::Value]) -> Result<Self, String> {
        let values = messages.iter().map(Value::deserialize);
        let values = values.collect::<Result<_, _>>();
        Self::new(values.map_err(|err| err.to_string())?, None)
    }

    /// The messages, in order.
    pub fn messages(&self) -> &[Value] {
        &self.messages
    }

    /// The tools, as templates get them; `None` becomes their `none`.
    pub(crate) fn tools(&self) -> Value {
        self.tools.clone().unwrap_or(Value::from(()))
    }

    /// Indices of the assistant's messages.
    pub(crate) fn assistant_turns(&self) -> impl Iterator<Item = usize> {
        let is_assistant = |message: &Value| matches!(message.get_attr("role"), Ok(role) if role.as_str() == Some("assistant"));
        let turns = self.messages.iter().enumerate();
        turns.filter_map(move |(index, message)| is_assistant(message).then_some(index))
    }

    /// The messages, where that at `index` says `content` and nothing else of its own but calls of tools.
    pub(crate) fn with_content(&self, index: usize, content: &str) -> Vec<Value> {
        let mut messages = self.messages.clone();
        if let Some(message) = messages.get_mut(index) {
            let mut fields = Fields::of(message);
            fields
                .0
                .retain(|(name, _)| !REASONING.contains(&name.as_str()));
            fields.set("content", Value::from(content));
            *message = fields.into_value();
        }
        messages
    }
}

fn normalized(message: &Value) -> Result<Value, String> {
    if message.kind() != ValueKind::Map {
        return Err(format!("is {}, expected an object", message.kind()));
    }
    let mut fields = Fields::of(message);
    if fields.get("role").and_then(|role| role.as_str()).is_none() {
        return Err("has no role that is a text".to_string());
    }
    let content = fields.get("content").cloned().unwrap_or_default();
    match content.kind() {
        ValueKind::String | ValueKind::None | ValueKind::Undefined => {}
        ValueKind::Seq => fields.set("content", Value::from(joined(&content)?)),
        kind => return Err(format!("has content that is {kind}, expected a text")),
    }
    if let Some(reasoning) = REASONING.iter().find_map(|name| fields.get(name)).cloned() {
        if fields.get("thinking").is_none() {
            fields
                .0
                .insert(0, ("thinking".to_string(), reasoning.clone()));
        }
        fields.set("reasoning_content", reasoning);
    }
    Ok(fields.into_value())
}

/// The text of a content in parts.
fn joined(parts: &Value) -> Result<String, String> {
    let mut joined = String::new();
    for part in parts.try_iter().into_iter().flatten() {
        let text = part.get_attr("text").unwrap_or_default();
        match (part.as_str(), text.as_str()) {
            (Some(text), _) | (None, Some(text)) => joined += text,
            _ => {
                return Err(
                    "has a part that is no text; images and sounds are not supported".to_string(),
                );
            }
        }
    }
    Ok(joined)
}

/// An object's fields, in their order.
struct Fields(Vec<(String, Value)>);

impl Fields {
    fn of(value: &Value) -> Self {
        let names = value.try_iter().into_iter().flatten();
        let fields = names.map(|name| {
            let field = value.get_item(&name).unwrap_or_default();
            (name.to_string(), field)
        });
        Self(fields.collect())
    }

    /// A field that is not null.
    fn get(&self, name: &str) -> Option<&Value> {
        let field = self.0.iter().find(|(known, _)| known == name);
        field
            .map(|(_, value)| value)
            .filter(|value| !value.is_none())
    }

    fn set(&mut self, name: &str, value: Value) {
        match self.0.iter_mut().find(|(known, _)| known == name) {
            Some((_, old)) => *old = value,
            None => self.0.push((name.to_string(), value)),
        }
    }

    fn into_value(self) -> Value {
        Value::from_pairs(self.0)
    }
}
