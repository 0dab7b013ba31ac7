//! Where the assistant's turns are in a conversation whose template does not tell.
//!
//! Of most templates the messages before turn i, with the header that asks for it, and those up to it give two beginnings of the
//! rendered conversation, and turn i is what is between their ends. But templates may render a turn differently once others follow,
//! as Qwen3 does, which leaves out earlier thoughts. Then turn i gets another text: what follows that in the whole conversation, and
//! not in one that ends with turn i, is what comes after turn i.

use std::ops::Range;

use super::chat_template::ChatTemplate;
use super::conversation::Chat;

/// What stands in place of a turn; nothing that a template looks for.
const STAND_IN: &str = "\u{FDD2}turn\u{FDD3}";

/// The bytes of `text`, the rendered `chat`, that the assistant writes.
pub(super) fn find_assistant_spans(
    template: &ChatTemplate,
    chat: &Chat,
    text: &str,
    special_tokens: &[String],
) -> Result<Vec<Range<usize>>, String> {
    let mut spans: Vec<Range<usize>> = Vec::new();
    for turn in chat.assistant_turns() {
        let (before, after) = borders(template, chat, text, turn)?;
        let earlier = spans.last().map_or(0, |span| span.end);
        if !(earlier <= before
            && before < after
            && text.is_char_boundary(before)
            && text.is_char_boundary(after))
        {
            return Err(format!(
                "the chat template does not show where the assistant's message {turn} is"
            ));
        }
        spans.push(before..before + written_len(&text[before..after], special_tokens));
    }
    Ok(spans)
}

/// Where turn `turn` begins, after its header, and where the next one does.
fn borders(
    template: &ChatTemplate,
    chat: &Chat,
    text: &str,
    turn: usize,
) -> Result<(usize, usize), String> {
    let messages = chat.messages();
    // A template may refuse what has no message yet.
    let asked = template.text(chat, &messages[..turn], true).ok();
    let done = match turn + 1 == messages.len() {
        true => Some(text.to_string()),
        false => template.text(chat, &messages[..=turn], false).ok(),
    };
    match (&asked, done) {
        (Some(asked), Some(done)) if text.starts_with(asked) && text.starts_with(&done) => {
            Ok((asked.len(), done.len()))
        }
        _ => borders_of_stand_in(template, chat, text, (turn, asked)),
    }
}

fn borders_of_stand_in(
    template: &ChatTemplate,
    chat: &Chat,
    text: &str,
    (turn, asked): (usize, Option<String>),
) -> Result<(usize, usize), String> {
    let replaced = chat.with_content(turn, STAND_IN);
    let other = template.text(chat, &replaced, false)?;
    let unclear = || {
        format!(
            "the chat template does not show the content of the assistant's message {turn} once"
        )
    };
    let end_of = |text: &str| match text.matches(STAND_IN).count() {
        1 => text
            .find(STAND_IN)
            .map(|place| place + STAND_IN.len())
            .ok_or_else(unclear),
        _ => Err(unclear()),
    };
    let end = end_of(&other)?;
    let place = end - STAND_IN.len();
    let silent = template.text(chat, &chat.messages()[..turn], false).ok();
    let begin = begin_of_turn(&other[..place], asked.as_deref(), silent.as_deref());
    let begin = begin.min(common_prefix(text, &other));
    if turn + 1 == replaced.len() {
        return Ok((begin, text.len()));
    }
    let last = template.text(chat, &replaced[..=turn], false)?;
    // What ends the turn, and what follows.
    let ending = common_prefix(&last[end_of(&last)?..], &other[end..]);
    let following = &other[end + ending..];
    match text.ends_with(following) {
        true => Ok((begin, text.len() - following.len())),
        false => Err(unclear()),
    }
}

/// Where a turn begins whose content is what follows `before`; `asked` and `silent` are the messages before it with and without the header that
/// asks for it.
fn begin_of_turn(before: &str, asked: Option<&str>, silent: Option<&str>) -> usize {
    let (asked, silent) = (asked.unwrap_or_default(), silent.unwrap_or_default());
    let common = common_prefix(asked, before);
    if common == asked.len() && common > 0 {
        return common;
    }
    // What comes earlier may depend on what is last: the header alone counts.
    let header = asked
        .strip_prefix(silent)
        .filter(|header| !header.is_empty());
    match header.and_then(|header| Some(before.rfind(header)? + header.len())) {
        Some(begin) => begin,
        // The header may begin the answer, as one that ends with `<think>` does.
        None if header.is_some() && common > silent.len() => common,
        None => before.trim_end_matches(' ').len(),
    }
}

/// Bytes that both begin with.
fn common_prefix(a: &str, b: &str) -> usize {
    let pairs = a.char_indices().zip(b.chars());
    let mut pairs = pairs.skip_while(|((_, a), b)| a == b);
    match pairs.next() {
        Some(((place, _), _)) => place,
        None => a.len().min(b.len()),
    }
}

/// Bytes of a turn up to its last special token, if only white space comes after it; else all.
fn written_len(turn: &str, special_tokens: &[String]) -> usize {
    let trimmed = turn.trim_end();
    let ends = special_tokens
        .iter()
        .any(|token| trimmed.ends_with(token.as_str()));
    match ends {
        true => trimmed.len(),
        false => turn.len(),
    }
}
