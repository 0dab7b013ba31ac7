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
        change_field(fields, name, |function| of(name, function));
    }
}

fn change_field(fields: &mut Fields, name: &str, mut of: impl FnMut(Fields) -> Value) {
    let Some(calls) = fields.get(name).cloned() else {
        return;
    };
    let mut changed = |call: &Value| {
        let call = Fields::of(call);
        match call.get("function").cloned() {
            Some(function) => call.with("function", of(Fields::of(&function))),
            None => of(call),
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

impl Chat {
    /// With `of` each `tool_calls[].function.arguments` (or, without `function`, `tool_calls[].arguments`) in its
    /// place, where that is an object of JSON in a text; `None` if there is none.
    pub(super) fn with_arguments(&self, of: impl Fn(&str) -> Option<Value>) -> Option<Self> {
        let mut is_changed = false;
        let messages = self.messages().iter().map(|message| {
            let (mut fields, mut is_other) = (Fields::of(message), false);
            change_field(&mut fields, "tool_calls", |function| {
                let text = function.get("arguments").and_then(Value::as_str);
                let text = text.filter(|text| parsed_object(text).is_some());
                match text.and_then(&of) {
                    Some(arguments) => {
                        is_other = true;
                        function.with("arguments", arguments)
                    }
                    None => function.into_value(),
                }
            });
            is_changed |= is_other;
            match is_other {
                true => fields.into_value(),
                false => message.clone(),
            }
        });
        let messages = messages.collect();
        is_changed.then(|| self.with_messages(messages))
    }
}
