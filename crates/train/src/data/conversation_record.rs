//! Conversations as records have them: `messages` of role and content, `conversations` of from and value (ShareGPT).

use minijinja::Value;

use super::record_fields::RecordFields;
use crate::chat::{Chat, MASKS_OF_RECORDS, has_content, masks_of_list};
use crate::record_error::RecordError;

/// Roles of ShareGPT, and what chat templates call them.
const ROLES: [(&str, &str); 14] = [
    ("system", "system"),
    ("human", "user"),
    ("user", "user"),
    ("gpt", "assistant"),
    ("assistant", "assistant"),
    ("ai", "assistant"),
    ("model", "assistant"),
    ("bot", "assistant"),
    ("chatgpt", "assistant"),
    ("bing", "assistant"),
    ("bard", "assistant"),
    ("tool", "tool"),
    ("function_response", "tool"),
    ("observation", "tool"),
];

/// The conversation of the field `name`, with the record's `system`, its `tools` and its masks, if it has them.
pub(super) fn conversation(
    fields: &mut RecordFields<'_>,
    name: &'static str,
) -> Result<Chat, RecordError> {
    let turns = fields.list(name)?;
    let num_turns = turns.len();
    let turns = turns.iter().enumerate();
    let turns = turns.map(|(index, turn)| {
        let message = message_of(turn);
        message.map_err(|err| err.of(format!("turn {index}")))
    });
    let turns: Vec<Value> = turns.collect::<Result<_, _>>()?;
    let system = system_message(fields, turns.first())?;
    let messages = system.into_iter().chain(turns).collect();
    let mut chat = Chat::new(messages, fields.value("tools"))?;
    for name in MASKS_OF_RECORDS {
        if fields.has(name) && !fields.is_one(name) {
            let list = fields.value(name).unwrap_or_default();
            let masks = masks_of_list(name, &list, num_turns);
            chat = chat.with_last_masks(&masks.map_err(|err| err.of(format!("its {name}")))?);
        }
    }
    Ok(chat)
}

/// The record's `system` as a message, unless the first turn says the same.
fn system_message(
    fields: &mut RecordFields<'_>,
    first: Option<&Value>,
) -> Result<Option<Value>, RecordError> {
    let Some(system) = fields.optional_text("system")? else {
        return Ok(None);
    };
    let says = |name: &str, text: &str| {
        let value = first.and_then(|turn| turn.get_attr(name).ok());
        value.is_some_and(|value| value.as_str() == Some(text))
    };
    match (says("role", "system"), says("content", &system)) {
        (true, true) => Ok(None),
        (true, false) => Err(RecordError::Unsupported(
            "it has a system, and its messages begin with another one".to_string(),
        )),
        (false, _) => Ok(Some(message("system", system))),
    }
}

/// A turn as templates read it; some files spell it so already.
fn message_of(turn: &Value) -> Result<Value, RecordError> {
    let text = |name: &str| {
        let value = turn.get_attr(name).unwrap_or_default();
        value.as_str().map(str::to_string)
    };
    let Some(from) = text("from").filter(|_| text("role").is_none()) else {
        return Ok(turn.clone());
    };
    let role = ROLES.iter().find(|(name, _)| *name == from);
    let Some((_, role)) = role else {
        let known: Vec<&str> = ROLES.iter().map(|(name, _)| *name).collect();
        return Err(RecordError::Unsupported(format!(
            "is from {from:?}, which is no known role; expected one of {}",
            known.join(", ")
        )));
    };
    let Some(content) = text("value") else {
        return Err("has no value that is a text".to_string().into());
    };
    let other = turn.get_attr("content").unwrap_or_default();
    if has_content(&other) && other.as_str() != Some(&content) {
        return Err(RecordError::Unsupported(
            "has a value, and a content that is another one".to_string(),
        ));
    }
    let is_more = |name: &Value| {
        !["from", "value", "role", "content"].contains(&name.as_str().unwrap_or_default())
    };
    let names = turn.try_iter().into_iter().flatten();
    let more = names.filter(is_more);
    let more = more.map(|name| (name.to_string(), turn.get_item(&name).unwrap_or_default()));
    let own = [
        ("role".to_string(), Value::from(*role)),
        ("content".to_string(), Value::from(content)),
    ];
    Ok(Value::from_pairs(
        own.into_iter().chain(more).collect::<Vec<_>>(),
    ))
}

/// A message of this role.
pub(super) fn message(role: &str, content: String) -> Value {
    minijinja::context! { role => role, content => content }
}
