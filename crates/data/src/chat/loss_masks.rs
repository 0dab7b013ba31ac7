//! What a record says about which of its messages are learned.
//!
//! OpenAI and Mistral call it `weight`, axolotl `train` or `training`, ms-swift `loss`, others `loss_mask`; 0 or false: no loss.

use std::ops::Range;

use minijinja::Value;
use minijinja::value::ValueKind;

use crate::record_error::RecordError;

/// The names of it in a message.
pub(super) const MASKS: [&str; 5] = ["weight", "train", "training", "loss_mask", "loss"];

/// The names of it in a record, which has a list with an entry for each message; what is called `loss` there may be a note.
pub(crate) const MASKS_OF_RECORDS: [&str; 4] = ["weight", "train", "training", "loss_mask"];

/// What the fields of a message say: whether it is learned, or nothing.
///
/// # Errors
/// Weights between, such as 0.5; two names that contradict each other.
pub(super) fn mask_of_message(message: &Value) -> Result<Option<bool>, RecordError> {
    let mut said: Option<(&str, bool)> = None;
    for name in MASKS {
        let value = message.get_attr(name).unwrap_or_default();
        if is_score(name, &value) {
            continue;
        }
        let mask = mask_of(name, &value).map_err(|err| err.of(format!("has {name}")));
        let Some(mask) = mask? else {
            continue;
        };
        match said {
            Some((other, earlier)) if earlier != mask => {
                return Err(RecordError::Unsupported(format!(
                    "contradicts itself: by its {other} it is {}learned, and by its {name} it is {}",
                    if earlier { "" } else { "not " },
                    if mask { "" } else { "not" }
                )));
            }
            _ => said = Some((name, mask)),
        }
    }
    Ok(said.map(|(_, mask)| mask))
}

/// Whether a field is a note of how well something was predicted, and no mask.
pub(super) fn is_score(name: &str, value: &Value) -> bool {
    let number = f64::try_from(value.clone()).ok();
    let is_number = value.kind() == ValueKind::Number;
    name == "loss" && is_number && number.is_some_and(|number| number != 0.0 && number != 1.0)
}

/// What a list of this name with an entry for each message says.
///
/// # Errors
/// Something else than a list of so many masks.
pub(crate) fn masks_of_list(
    name: &str,
    list: &Value,
    num_messages: usize,
) -> Result<Vec<Option<bool>>, RecordError> {
    let is_list = list.kind() == ValueKind::Seq;
    if !is_list || list.len() != Some(num_messages) {
        return Err(RecordError::Unsupported(format!(
            "is {list}, expected a list of {num_messages} entries, one for each message"
        )));
    }
    let entries = list.try_iter().into_iter().flatten();
    entries.map(|entry| mask_of(name, &entry)).collect()
}

/// The mask that a value is; of null none, nor of a weight of 1, which any message may have.
fn mask_of(name: &str, value: &Value) -> Result<Option<bool>, RecordError> {
    let is_learned = match value.kind() {
        ValueKind::Undefined | ValueKind::None => return Ok(None),
        ValueKind::Bool => Some(value.is_true()),
        ValueKind::Number => match f64::try_from(value.clone()) {
            Ok(0.0) => Some(false),
            Ok(1.0) => Some(true),
            _ => None,
        },
        _ => None,
    };
    if let Some(is_learned) = is_learned {
        return Ok((!is_learned || name != "weight").then_some(is_learned));
    }
    Err(RecordError::Unsupported(format!(
        "{value}, expected 0 or 1, true or false: a message is learned as a whole or not at all"
    )))
}

/// Takes what belongs to the assistant's messages that are not learned from `spans`, bytes that the assistant writes, and returns the bytes
/// of these messages; `turns` are the masks and bytes of all the assistant's messages.
///
/// # Errors
/// A span that belongs to messages of both kinds, as a part of a sentence.
pub(super) fn take_masked(
    spans: &mut Vec<Range<usize>>,
    turns: impl Iterator<Item = (Option<bool>, Range<usize>)>,
) -> Result<Vec<Range<usize>>, String> {
    let (masked, learned): (Vec<_>, Vec<_>) = turns.partition(|(mask, _)| *mask == Some(false));
    let overlaps = |span: &Range<usize>, turns: &[(Option<bool>, Range<usize>)]| {
        let mut turns = turns.iter();
        turns.any(|(_, turn)| span.start < turn.end && turn.start < span.end)
    };
    if spans
        .iter()
        .any(|span| overlaps(span, &masked) && overlaps(span, &learned))
    {
        return Err("a generation tag of the chat template holds several of the assistant's messages, and not all of them are learned".to_string());
    }
    spans.retain(|span| !overlaps(span, &masked));
    Ok(masked.into_iter().map(|(_, turn)| turn).collect())
}
