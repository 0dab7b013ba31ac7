//! Arguments of tool calls: OpenAI has them as JSON in a text, most templates expect what the JSON says.

use minijinja::Value;
use minijinja::value::ValueKind;

use super::conversation::Chat;
use super::json_text::read_json;
use super::message::{CALLS, Fields};

/// The object that a text of JSON says.
pub(super) fn parsed_object(text: &str) -> Option<Value> {
    let object: Value = read_json(text).ok()?;
    (object.kind() == ValueKind::Map).then_some(object)
}

/// Puts what `of` makes of it in place of each function that a message calls; it gets the field that has the calls.
pub(super) fn change_calls(fields: &mut Fields, mut of: impl FnMut(&str, Fields) -> Value) {
    for name in CALLS {
        let Some(calls) = fields.get(name).cloned() else {
            continue;
        };
        let mut changed = |call: &Value| {
            let call = Fields::of(call);
            match call.get("function").cloned() {
                Some(function) => call.with("function", of(name, Fields::of(&function))),
                None => of(name, call),
            }
        };
        let calls = if calls.kind() == ValueKind::Seq {
            let calls = calls.try_iter().into_iter().flatten();
            calls.map(|call| changed(&call)).collect()
        } else {
            changed(&calls)
        };
        fields.set(name, calls);
    }
}

impl Chat {
    /// With `of` each `tool_calls[].function.arguments` (or, without `function`, `tool_calls[].arguments`) in its
    /// place, where that is an object of JSON in a text; `None` if there is none.
    pub(super) fn with_arguments(&self, of: impl Fn(&str) -> Option<Value>) -> Option<Self> {
        let changed: Vec<Option<Value>> = self
            .messages()
            .iter()
            .map(|message| changed_message(message, &of))
            .collect();
        if changed.iter().all(Option::is_none) {
            return None;
        }
        let messages = self.messages().iter().zip(changed);
        let messages =
            messages.map(|(message, changed)| changed.unwrap_or_else(|| message.clone()));
        Some(self.with_messages(messages.collect()))
    }
}

fn changed_message(message: &Value, of: impl Fn(&str) -> Option<Value>) -> Option<Value> {
    let calls = message.get_attr("tool_calls").ok()?;
    let calls: Vec<Value> = calls.try_iter().ok()?.collect();
    let changed: Vec<Option<Value>> = calls.iter().map(|call| changed_call(call, &of)).collect();
    if changed.iter().all(Option::is_none) {
        return None;
    }
    let calls = calls.into_iter().zip(changed);
    let calls: Vec<Value> = calls
        .map(|(call, changed)| changed.unwrap_or(call))
        .collect();
    Some(Fields::of(message).with("tool_calls", calls.into()))
}

fn changed_call(call: &Value, of: impl Fn(&str) -> Option<Value>) -> Option<Value> {
    match call.get_attr("function").ok() {
        Some(function) if function.kind() == ValueKind::Map => {
            let changed = changed_function(&function, of)?;
            Some(Fields::of(call).with("function", changed))
        }
        _ => changed_function(call, of),
    }
}

fn changed_function(function: &Value, of: impl Fn(&str) -> Option<Value>) -> Option<Value> {
    let arguments = function.get_attr("arguments").ok()?;
    let text = arguments.as_str()?;
    parsed_object(text)?;
    Some(Fields::of(function).with("arguments", of(text)?))
}
