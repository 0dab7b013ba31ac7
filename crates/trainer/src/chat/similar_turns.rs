//! Turns of the assistant among messages of the same kinds, of which the place of one tells that of the others.
//!
//! From the end of the text before a turn to the turn, and from the turn's end to the text after it, a template
//! writes what follows from the kinds of these messages: roles, and the names of what they have. So those bytes are
//! compared with the ones around a turn whose place is known.

use std::collections::HashMap;
use std::ops::Range;

use minijinja::Value;

use super::assistant_spans::common_prefix;
use super::chat_template::ChatTemplate;
use super::conversation::{Chat, Fields, content_of, has_content, texts_of};
use super::stand_ins::{BEGIN, END, stand_in};

/// Turns whose place is known, by the kinds of their own and the neighbouring messages.
pub(super) struct SimilarTurns<'a> {
    text: &'a str,
    /// Each message's kind.
    kinds: Vec<String>,
    /// Where the content of each message that is not the assistant's is in the text, if the template shows it once.
    places: Vec<Option<Range<usize>>>,
    known: HashMap<[Option<String>; 3], Vec<KnownTurn<'a>>>,
}

/// What is around a turn whose place is known.
struct KnownTurn<'a> {
    /// From the end of the content before it, or of the beginning, to the turn.
    before: &'a str,
    /// From the turn's end to the content after it, or to the end.
    after: &'a str,
    /// What the header that asks for the turn has behind `before`, such as `<think>`.
    more_asked: String,
    /// Bytes of that with which the turn begins.
    num_asked: usize,
}

impl<'a> SimilarTurns<'a> {
    /// Of the conversation whose text is `text`.
    pub fn of(template: &ChatTemplate, chat: &Chat, text: &'a str) -> Self {
        let num_messages = chat.messages().len();
        // Of a few turns each is rendered.
        let places = match chat.assistant_turns().nth(FEW) {
            Some(_) => places_of_contents(template, chat, text),
            None => None,
        };
        Self {
            text,
            kinds: (0..num_messages)
                .map(|index| kind_of(chat, index))
                .collect(),
            places: places.unwrap_or_else(|| vec![None; num_messages]),
            known: HashMap::new(),
        }
    }

    #[cfg(test)]
    pub fn none(chat: &Chat, text: &'a str) -> Self {
        let num_messages = chat.messages().len();
        Self {
            text,
            kinds: vec![String::new(); num_messages],
            places: vec![None; num_messages],
            known: HashMap::new(),
        }
    }

    /// How many turns were added.
    #[cfg(test)]
    pub fn num_known(&self) -> usize {
        self.known.values().map(Vec::len).sum()
    }

    /// The place of turn `index`, if it is among messages as those of a turn that was added.
    pub fn find(&self, index: usize) -> Option<Range<usize>> {
        let around = self.around(index)?;
        let known = self.known.get(&self.kinds_around(index))?;
        known
            .iter()
            .find_map(|known| known.place_in(self.text, &around))
    }

    /// Adds a turn whose place is known; `asked` are the messages before it with the header that asks for it.
    pub fn add(&mut self, index: usize, place: &Range<usize>, asked: Option<&str>) {
        let Some(around) = self.around(index) else {
            return;
        };
        let text = self.text;
        let before = text.get(around.start..place.start);
        let after = text.get(place.end..around.end);
        let (Some(before), Some(after)) = (before, after) else {
            return;
        };
        let more_asked = asked.and_then(|asked| asked.strip_prefix(&text[..place.start]));
        let more_asked = more_asked.unwrap_or_default().to_string();
        let known = KnownTurn {
            before,
            after,
            num_asked: common_prefix(&more_asked, &text[place.clone()]),
            more_asked,
        };
        self.known
            .entry(self.kinds_around(index))
            .or_default()
            .push(known);
    }

    /// From the end of the content before a turn to the beginning of the one after it.
    pub fn around(&self, index: usize) -> Option<Range<usize>> {
        let start = match index.checked_sub(1) {
            Some(before) => self.places[before].as_ref()?.end,
            None => 0,
        };
        let end = match self.places.get(index + 1) {
            Some(after) => after.as_ref()?.start,
            None => self.text.len(),
        };
        (start <= end).then_some(start..end)
    }

    fn kinds_around(&self, index: usize) -> [Option<String>; 3] {
        let before = index.checked_sub(1);
        [before, Some(index), Some(index + 1)].map(|index| self.kinds.get(index?).cloned())
    }
}

impl KnownTurn<'_> {
    /// The place of a turn that is within `around`, if it is as this one.
    fn place_in(&self, text: &str, around: &Range<usize>) -> Option<Range<usize>> {
        let inner = text[around.clone()].strip_prefix(self.before)?;
        let turn = inner.strip_suffix(self.after)?;
        let begins_so = common_prefix(&self.more_asked, turn) == self.num_asked;
        let is_apart = !is_cut(self.before, turn) && !is_cut(turn, self.after);
        let start = around.start + self.before.len();
        (begins_so && is_apart && !turn.is_empty()).then(|| start..start + turn.len())
    }
}

/// Whether there is a word or number of which both have a part: it may be another one than the known turn has beside
/// it.
fn is_cut(before: &str, after: &str) -> bool {
    let [last, first] = [before.chars().next_back(), after.chars().next()];
    [last, first]
        .iter()
        .all(|c| c.is_some_and(char::is_alphanumeric))
}

/// Turns from which on similar ones are looked for.
const FEW: usize = 2;

/// What a template may look at beside the texts of a message: its role, and the names of what it has.
fn kind_of(chat: &Chat, index: usize) -> String {
    let fields = Fields::of(&chat.messages()[index]);
    let is_in_parts = fields.is_in_parts();
    let mut names: Vec<String> = fields
        .0
        .into_iter()
        .filter(|(_, value)| has_content(value))
        .map(|(name, _)| name)
        .collect();
    names.sort();
    format!("{} {is_in_parts} {names:?}", chat.role(index))
}

/// Where the contents of messages that are not the assistant's are in `text`, which is the rendered conversation:
/// what the template makes of it with marks around each of them is the same text with marks in it, or nothing is
/// known.
fn places_of_contents(
    template: &ChatTemplate,
    chat: &Chat,
    text: &str,
) -> Option<Vec<Option<Range<usize>>>> {
    if text.contains([BEGIN, END]) {
        return None;
    }
    let is_turn = |index: usize| chat.role(index) == "assistant";
    let messages = chat.messages().iter().enumerate();
    let messages: Vec<Value> = messages
        .map(|(index, message)| {
            if is_turn(index) {
                message.clone()
            } else {
                marked(index, message)
            }
        })
        .collect();
    let marked = template.text(chat, &messages, false).ok()?;
    let mut marks: Vec<Vec<usize>> = vec![Vec::new(); messages.len()];
    let mut pieces = marked.split(BEGIN);
    let mut plain = pieces.next()?.to_string();
    for piece in pieces {
        let (label, rest) = piece.split_once(END)?;
        let index: usize = label.parse().ok()?;
        marks.get_mut(index)?.push(plain.len());
        plain += rest;
    }
    let place = |marks: &Vec<usize>| match marks[..] {
        [start, end] => Some(start..end),
        _ => None,
    };
    (plain == text).then(|| marks.iter().map(place).collect())
}

/// A message with a mark before and after its content, within the white space around it, which templates trim.
fn marked(index: usize, message: &Value) -> Value {
    let fields = Fields::of(message);
    let mut texts = fields.get("content").map(texts_of).unwrap_or_default();
    let is_said = |text: &String| !text.trim().is_empty();
    let (first, last) = (
        texts.iter().position(is_said),
        texts.iter().rposition(is_said),
    );
    let (Some(first), Some(last)) = (first, last) else {
        return message.clone();
    };
    let mark = stand_in(index);
    let end = texts[last].trim_end().len();
    texts[last].insert_str(end, &mark);
    let start = texts[first].len() - texts[first].trim_start().len();
    texts[first].insert_str(start, &mark);
    let is_in_parts = fields.is_in_parts();
    fields.with("content", content_of(texts, is_in_parts))
}
