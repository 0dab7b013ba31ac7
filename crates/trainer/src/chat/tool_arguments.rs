//! Arguments of tool calls: OpenAI has them as JSON in a text, templates expect what the JSON says.

use std::borrow::Cow;

use minijinja::Value;
use minijinja::value::ValueKind;

use super::conversation::{Chat, Fields};
use super::python_json::read_json;

impl Chat {
    /// With each `tool_calls[].function.arguments` (or, without `function`, `tool_calls[].arguments`) that is an object of JSON in a
    /// text as that object. Borrowed if there is none.
    pub(crate) fn with_parsed_arguments(&self) -> Cow<'_, Self> {
        let parsed: Vec<Option<Value>> = self.messages().iter().map(parsed_message).collect();
        if parsed.iter().all(Option::is_none) {
            return Cow::Borrowed(self);
        }
        let messages = self.messages().iter().zip(parsed);
        let messages = messages.map(|(message, parsed)| parsed.unwrap_or_else(|| message.clone()));
        Cow::Owned(self.with_messages(messages.collect()))
    }
}

fn parsed_message(message: &Value) -> Option<Value> {
    let calls = message.get_attr("tool_calls").ok()?;
    let calls: Vec<Value> = calls.try_iter().ok()?.collect();
    let parsed: Vec<Option<Value>> = calls.iter().map(parsed_call).collect();
    if parsed.iter().all(Option::is_none) {
        return None;
    }
    let calls = calls.into_iter().zip(parsed);
    let calls: Vec<Value> = calls.map(|(call, parsed)| parsed.unwrap_or(call)).collect();
    Some(with_field(message, "tool_calls", calls.into()))
}

fn parsed_call(call: &Value) -> Option<Value> {
    match call.get_attr("function").ok() {
        Some(function) if function.kind() == ValueKind::Map => {
            Some(with_field(call, "function", parsed_function(&function)?))
        }
        _ => parsed_function(call),
    }
}

fn parsed_function(function: &Value) -> Option<Value> {
    let arguments = function.get_attr("arguments").ok()?;
    let object = read_json(arguments.as_str()?.as_bytes()).ok()?;
    (object.kind() == ValueKind::Map).then(|| with_field(function, "arguments", object))
}

fn with_field(object: &Value, name: &str, value: Value) -> Value {
    let mut fields = Fields::of(object);
    fields.set(name, value);
    fields.into_value()
}
