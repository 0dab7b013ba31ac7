//! The shapes of tools and of their calls: lists of objects, of which any part may be JSON in a text, as the cells of
//! tables have it.

use minijinja::Value;
use minijinja::value::ValueKind;

use super::json_text::read_json;
use super::message::{Fields, has_content};
use crate::record_error::RecordError;

/// Tools as templates read them, of a field that is a list of objects; `None` if it is empty.
///
/// # Errors
/// It is something else.
pub(super) fn tools(value: &Value) -> Result<Option<Value>, RecordError> {
    let tools = objects("tools", value)?;
    Ok((!tools.is_empty()).then(|| tools.into()))
}

/// The calls of a message, which are objects and have their `function`, if there is one, as an object.
///
/// # Errors
/// They are something else.
pub(super) fn tool_calls(value: &Value) -> Result<Value, RecordError> {
    let calls = objects("tool_calls", value)?.into_iter().enumerate();
    let calls = calls.map(|(index, call)| {
        let mut fields = Fields::of(&call);
        let Some(function) = fields.get("function") else {
            return Ok(call);
        };
        let function = object(&format!("tool_calls[{index}].function"), function)?;
        fields.set("function", function);
        Ok(fields.into_value())
    });
    calls.collect::<Result<Vec<_>, _>>().map(Value::from)
}

/// What `value` says, which must be an object.
///
/// # Errors
/// It is something else.
pub(super) fn object(name: &str, value: &Value) -> Result<Value, RecordError> {
    let said = said(name, value, "an object")?;
    match said.kind() {
        ValueKind::Map => Ok(said),
        kind => Err(other_shape(name, kind, "an object")),
    }
}

/// The objects of a list; none of a text or object that is empty.
fn objects(name: &str, value: &Value) -> Result<Vec<Value>, RecordError> {
    let expected = "a list of objects";
    if !has_content(value) || value.as_str().is_some_and(|text| text.trim().is_empty()) {
        return Ok(Vec::new());
    }
    let said = said(name, value, expected)?;
    if !has_content(&said) {
        return Ok(Vec::new());
    }
    if said.kind() != ValueKind::Seq {
        return Err(other_shape(name, said.kind(), expected));
    }
    let items = said.try_iter().into_iter().flatten().enumerate();
    let items = items.map(|(index, item)| object(&format!("{name}[{index}]"), &item));
    items.collect()
}

/// A value itself, or what it says as JSON in a text.
fn said(name: &str, value: &Value, expected: &str) -> Result<Value, RecordError> {
    match value.as_str() {
        None => Ok(value.clone()),
        Some(text) => read_json(text).map_err(|err| {
            RecordError::Unsupported(format!(
                "{name} in a text that is not valid JSON ({err}), expected {expected}"
            ))
        }),
    }
}

fn other_shape(name: &str, kind: ValueKind, expected: &str) -> RecordError {
    let found = match kind {
        ValueKind::Map => "one object".to_string(),
        ValueKind::Seq => "a list".to_string(),
        ValueKind::String => "a text".to_string(),
        kind => kind.to_string(),
    };
    RecordError::Unsupported(format!("{name} as {found}, expected {expected}"))
}
