//! Preference data, as DPO, KTO and reward models learn from: answers of which one is better than another, or that are labelled as good or bad.

use minijinja::Value;
use minijinja::value::ValueKind;

use super::record_fields::RecordFields;
use crate::record_error::RecordError;

/// The fields of the better and the worse answer.
pub(super) const PREFERENCES: [&str; 2] = ["chosen", "rejected"];

/// An error if the record says which answers are better, and so also has what is not to be learned.
pub(super) fn refuse_preferences(fields: &RecordFields<'_>) -> Result<(), RecordError> {
    let there: Vec<&str> = PREFERENCES
        .into_iter()
        .filter(|name| fields.is_true(name))
        .collect();
    let (what, hint) = match there.is_empty() {
        false => (there.join(" and "), hint_of_chosen(fields)),
        true if is_labelled(fields) => (
            "a label that is true or false, or 1 or 0".to_string(),
            "keep the records whose label is true or 1, and leave the field out".to_string(),
        ),
        true => return Ok(()),
    };
    Err(RecordError::Unsupported(format!(
        "it has {what}: this is preference data, as for DPO, KTO and reward models, which is not supported, as only what the model should write is learned\nhint: {hint}"
    )))
}

/// How the better answers are learned.
fn hint_of_chosen(fields: &RecordFields<'_>) -> String {
    let is_list = |name: &str| fields.peek(name).kind() == ValueKind::Seq;
    let field = match () {
        () if !fields.is_true("chosen") => None,
        () if is_list("chosen") && !is_list("prompt") => Some("messages"),
        () if fields.has("conversations") || fields.has("messages") => None,
        () if fields.has("prompt") => Some("completion"),
        () if fields.has("instruction") => Some("output"),
        () => Some("text"),
    };
    match field {
        Some(field) => format!("--columns {field}=chosen trains on the chosen answers alone"),
        None => "leave such records out, or write the better answer where the model's answer is expected".to_string(),
    }
}

/// Whether a completion or conversation is labelled as one to be learned or not, as for KTO; other labels are notes.
fn is_labelled(fields: &RecordFields<'_>) -> bool {
    let label: Value = fields.peek("label");
    let is_said = label.as_str().is_some_and(|text| {
        text.eq_ignore_ascii_case("true") || text.eq_ignore_ascii_case("false")
    });
    let answers = ["completion", "messages", "conversations", "output"];
    let is_bit = [0, 1].map(Value::from).contains(&label);
    (label.kind() == ValueKind::Bool || is_said || is_bit)
        && answers.iter().any(|name| fields.has(name))
}
