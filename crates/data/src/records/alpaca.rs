//! Alpaca's records: an instruction, perhaps with input, history and system prompt, and the answer.

use minijinja::Value;
use minijinja::value::ValueKind;

use super::conversation_record::{message, template_kwargs};
use super::record::Record;
use super::record_fields::RecordFields;
use crate::chat::Chat;
use crate::record_error::RecordError;

/// The prompt of Stanford's Alpaca, for models without a chat template.
const WITH_INPUT: &str = "Below is an instruction that describes a task, paired with an input that provides further context. \
                          Write a response that appropriately completes the request.";
const WITHOUT_INPUT: &str = "Below is an instruction that describes a task. Write a response that appropriately completes the request.";

/// A record with a `history` is a conversation, for which Alpaca's prompt has no place.
pub(super) fn alpaca(fields: &mut RecordFields<'_>) -> Result<Record, RecordError> {
    let instruction = fields.text("instruction")?;
    let input = fields.optional_text("input")?;
    let output = fields.text("output")?;
    let system = fields.optional_text("system")?;
    let history = history(fields)?;
    let (preamble, asked, input) = match input {
        Some(input) => (
            WITH_INPUT,
            format!("{instruction}\n{input}"),
            format!("### Input:\n{input}\n\n"),
        ),
        None => (WITHOUT_INPUT, instruction.clone(), String::new()),
    };
    let preamble = system.clone().unwrap_or(preamble.to_string());
    let has_history = !history.is_empty();
    let system = system.map(|system| message("system", system)).into_iter();
    let turns = [message("user", asked), message("assistant", output.clone())];
    let mut chat = Chat::new(system.chain(history).chain(turns).collect(), None)?;
    if let Some(kwargs) = template_kwargs(fields)? {
        chat = chat.with_template_kwargs(kwargs);
    }
    Ok(match has_history {
        true => Record::Chat(chat),
        false => Record::Instruction {
            chat,
            prompt: format!(
                "{preamble}\n\n### Instruction:\n{instruction}\n\n{input}### Response:\n"
            ),
            output,
        },
    })
}

/// The messages of earlier turns, of which `history` is a list: of an instruction and its answer each.
fn history(fields: &mut RecordFields<'_>) -> Result<Vec<Value>, RecordError> {
    let mut messages = Vec::new();
    if !fields.is_true("history") {
        return Ok(messages);
    }
    for (index, turn) in fields.list("history")?.iter().enumerate() {
        let texts: Vec<Value> = match turn.kind() {
            ValueKind::Seq => turn.try_iter().into_iter().flatten().collect(),
            _ => Vec::new(),
        };
        let texts: Vec<Option<&str>> = texts.iter().map(Value::as_str).collect();
        let &[Some(instruction), Some(output)] = texts.as_slice() else {
            return Err(RecordError::Unsupported(format!(
                "turn {index} of its history is {turn}, expected a list of two texts: an instruction and its answer"
            )));
        };
        messages.push(message("user", instruction.to_string()));
        messages.push(message("assistant", output.to_string()));
    }
    Ok(messages)
}
