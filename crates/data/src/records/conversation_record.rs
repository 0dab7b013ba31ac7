//! Conversations as records have them: `messages` of role and content, `conversations` of from and value (ShareGPT).

use minijinja::Value;
use minijinja::value::ValueKind;

use super::record_fields::RecordFields;
use crate::chat::json_text::read_json;
use crate::chat::{
    Chat, MASKS_OF_RECORDS, ROLES, TemplateKwargs, common_role, has_content, masks_of_list,
};
use crate::record_error::RecordError;

/// What the assistant is called where it calls a tool.
const FUNCTION_CALL: &str = "function_call";

/// Roles of ShareGPT beside the common ones, and what chat templates call them.
const MORE_ROLES: [(&str, &str); 3] = [
    (FUNCTION_CALL, "assistant"),
    ("function_response", "tool"),
    ("observation", "tool"),
];

/// The conversation that begins with the messages of `prompt` and goes on with those of `completion`, of which alone the assistant's are learned.
pub(super) fn completion_of_messages(fields: &mut RecordFields<'_>) -> Result<Chat, RecordError> {
    let num_answers = fields.list("completion")?.len();
    if num_answers == 0 {
        return Err("its completion is empty".to_string().into());
    }
    let chat = conversation(fields, &["prompt", "completion"])?;
    Ok(chat.with_completion(num_answers))
}

/// The conversation of the fields `names` after one another, with the record's `system`, its `tools` and its masks, if it has them.
pub(super) fn conversation(
    fields: &mut RecordFields<'_>,
    names: &[&'static str],
) -> Result<Chat, RecordError> {
    let mut turns = Vec::new();
    for name in names {
        turns.extend(fields.list(name)?);
    }
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
    if let Some(kwargs) = template_kwargs(fields)? {
        chat = chat.with_template_kwargs(kwargs);
    }
    for name in MASKS_OF_RECORDS {
        if fields.has(name) && !fields.is_one(name) {
            let list = fields.value(name).unwrap_or_default();
            let masks = masks_of_list(name, &list, num_turns);
            chat = chat.with_last_masks(&masks.map_err(|err| err.of(format!("its {name}")))?);
        }
    }
    Ok(chat)
}

/// The variables that the record has for the chat template.
pub(super) fn template_kwargs(
    fields: &mut RecordFields<'_>,
) -> Result<Option<TemplateKwargs>, RecordError> {
    let name = "chat_template_kwargs";
    let kwargs = fields.value(name).filter(has_content);
    let kwargs = kwargs.as_ref().map(TemplateKwargs::of).transpose();
    let kwargs = kwargs.map_err(|err| RecordError::Unsupported(format!("its {name} {err}")))?;
    Ok(kwargs.map(TemplateKwargs::without_nulls))
}

/// The record's `system` as a message, unless the first turn says the same.
fn system_message(
    fields: &mut RecordFields<'_>,
    first: Option<&Value>,
) -> Result<Option<Value>, RecordError> {
    let Some(system) = fields.optional_text("system")? else {
        return Ok(None);
    };
    let value = |name: &str| first.and_then(|turn| turn.get_attr(name).ok());
    let is_system =
        value("role").is_some_and(|role| role.as_str().and_then(common_role) == Some("system"));
    let is_same = value("content").is_some_and(|content| content.as_str() == Some(&system));
    match (is_system, is_same) {
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
    let more = MORE_ROLES.iter().find(|(name, _)| *name == from);
    let more = more.map(|(_, role)| *role);
    let Some(role) = more.or(common_role(&from).map(|_| from.as_str())) else {
        let known: Vec<&str> = ROLES
            .iter()
            .chain(&MORE_ROLES)
            .map(|(name, _)| *name)
            .collect();
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
    let mut own = vec![("role".to_string(), Value::from(role))];
    match from == FUNCTION_CALL {
        true => own.extend([
            ("content".to_string(), Value::from("")),
            ("tool_calls".to_string(), calls_of(&content)?),
        ]),
        false => own.push(("content".to_string(), Value::from(content))),
    }
    let is_more = |name: &Value| {
        !["from", "value", "role", "content"].contains(&name.as_str().unwrap_or_default())
    };
    let names = turn.try_iter().into_iter().flatten();
    let more = names.filter(is_more);
    own.extend(more.map(|name| (name.to_string(), turn.get_item(&name).unwrap_or_default())));
    Ok(Value::from_pairs(own))
}

/// The `tool_calls` that `text` says: JSON of a name and arguments, or a list of such.
fn calls_of(text: &str) -> Result<Value, RecordError> {
    let said = read_json(text).unwrap_or_default();
    let calls: Vec<Value> = match said.kind() {
        ValueKind::Seq => said.try_iter().into_iter().flatten().collect(),
        _ => vec![said],
    };
    let calls = calls.iter().map(|call| {
        let field = |name: &str| {
            let field = call.get_attr(name).ok();
            field.filter(|field| !field.is_undefined())
        };
        let name = field("name").filter(|name| name.as_str().is_some())?;
        let arguments = field("arguments")?;
        let function = minijinja::context! { name, arguments };
        Some(minijinja::context! { type => "function", function })
    });
    let calls: Option<Vec<Value>> = calls.collect();
    match calls.filter(|calls| !calls.is_empty()) {
        Some(calls) => Ok(calls.into()),
        None => Err(format!(
            "is a {FUNCTION_CALL} whose value is no call, expected JSON such as {{\"name\": \"f\", \"arguments\": {{\"x\": 1}}}}"
        )
        .into()),
    }
}

/// A message of this role.
pub(super) fn message(role: &str, content: String) -> Value {
    minijinja::context! { role => role, content => content }
}
