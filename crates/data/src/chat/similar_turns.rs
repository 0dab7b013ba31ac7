//! Turns of the assistant that are as one whose place is known.
//!
//! One rendering with marks around the texts of all messages shows where these texts are. A turn's place follows from
//! that of another turn if the messages are of the same kinds and all that the template writes from the text before
//! the turn to the text after it is the same, but for the texts themselves.

use std::cell::OnceCell;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;

use minijinja::Value;
use minijinja::value::Rest;

use super::assistant_spans::common_prefix;
use super::chat_template::ChatTemplate;
use super::conversation::Chat;
use super::message::{Fields, REASONING, content_of, has_content, texts_of};
use super::python_json::tojson;
use super::stand_ins::{BEGIN, END, stand_in};
use super::tool_arguments::change_calls;

/// Turns from which on similar ones are looked for: each of a few is rendered.
const FEW: usize = 2;

/// Turns whose place is known, by what is around them.
pub(super) struct SimilarTurns<'a> {
    template: &'a ChatTemplate,
    chat: &'a Chat,
    text: &'a str,
    /// Whether turns are added and found.
    pub is_used: bool,
    shown: OnceCell<Vec<ShownText>>,
    known: HashMap<Surroundings<'a>, Vec<KnownTurn<'a>>>,
}

/// Where a text of a message is, if the template shows it once, and after those of earlier messages.
struct ShownText {
    message: usize,
    range: Range<usize>,
}

/// What similar turns have alike.
#[derive(PartialEq, Eq, Hash)]
struct Surroundings<'a> {
    /// The kinds of the messages from the text before the turn to the one after it.
    kinds: Vec<String>,
    is_first: bool,
    is_last: bool,
    /// What the template writes before, between and after the turn's texts.
    written: Vec<&'a str>,
}

/// The places around and in a turn: what is written, and the texts between.
struct Frame {
    written: Vec<Range<usize>>,
    texts: Vec<Range<usize>>,
}

struct KnownTurn<'a> {
    start: Border<'a>,
    end: Border<'a>,
    /// What the header that asks for the turn has behind the turn's start, such as `<think>`.
    more_asked: String,
    /// Bytes of `more_asked` with which the turn begins.
    num_asked: usize,
}

/// A place in a frame.
enum Border<'a> {
    /// So many bytes behind the beginning of what is written.
    Written { nth: usize, offset: usize },
    /// Within a text, behind these bytes.
    InText { nth: usize, begin: &'a str },
}

impl<'a> SimilarTurns<'a> {
    /// Without any known turn of the conversation, whose text is `text`.
    pub fn of(template: &'a ChatTemplate, chat: &'a Chat, text: &'a str) -> Self {
        Self {
            template,
            chat,
            text,
            is_used: chat.assistant_turns().nth(FEW).is_some(),
            shown: OnceCell::new(),
            known: HashMap::new(),
        }
    }

    /// How many turns were added.
    #[cfg(test)]
    pub fn num_known(&self) -> usize {
        self.known.values().map(Vec::len).sum()
    }

    /// The place of turn `index`, if it is as one that was added.
    pub fn find(&self, index: usize) -> Option<Range<usize>> {
        if !self.is_used || self.known.is_empty() {
            return None;
        }
        let frame = self.frame(index);
        let known = self.known.get(&self.surroundings(index, &frame))?;
        known
            .iter()
            .find_map(|known| known.place_in(self.text, &frame))
    }

    /// Adds a turn whose place is known; `asked` are the messages before it with the header that asks for it.
    pub fn add(&mut self, index: usize, place: &Range<usize>, asked: Option<&str>) {
        if !self.is_used {
            return;
        }
        let text = self.text;
        let frame = self.frame(index);
        let (Some(start), Some(end @ Border::Written { .. })) = (
            frame.border(text, place.start),
            frame.border(text, place.end),
        ) else {
            return;
        };
        let more_asked = asked.and_then(|asked| asked.strip_prefix(&text[..place.start]));
        let more_asked = more_asked.unwrap_or_default().to_string();
        let known = KnownTurn {
            start,
            end,
            num_asked: common_prefix(&more_asked, &text[place.clone()]),
            more_asked,
        };
        self.known
            .entry(self.surroundings(index, &frame))
            .or_default()
            .push(known);
    }

    /// From the end of the nearest text of a message before a turn to the beginning of the nearest one after it.
    pub fn around(&self, index: usize) -> Range<usize> {
        let (before, _, after) = self.neighbours(index);
        let start = before.map_or(0, |before| before.range.end);
        let end = after.map_or(self.text.len(), |after| after.range.start);
        start..end
    }

    /// The nearest text before turn `index`, those of the turn, and the nearest one after it.
    fn neighbours(&self, index: usize) -> (Option<&ShownText>, &[ShownText], Option<&ShownText>) {
        let shown = self
            .shown
            .get_or_init(|| shown_texts(self.template, self.chat, self.text));
        let first = shown.partition_point(|text| text.message < index);
        let end = shown.partition_point(|text| text.message <= index);
        let before = first.checked_sub(1).map(|before| &shown[before]);
        (before, &shown[first..end], shown.get(end))
    }

    fn frame(&self, index: usize) -> Frame {
        let around = self.around(index);
        let (_, own, _) = self.neighbours(index);
        let mut texts: Vec<Range<usize>> = own.iter().map(|text| text.range.clone()).collect();
        let messages = self.chat.messages();
        let near = &messages[index.saturating_sub(1)..messages.len().min(index + 2)];
        let more: BTreeSet<String> = near.iter().flat_map(texts_beside).collect();
        let mut more: Vec<String> = more.into_iter().collect();
        more.sort_by_key(|text| std::cmp::Reverse(text.len()));
        for text in more {
            for gap in gaps(&around, &texts) {
                let found = self.text[gap.clone()].match_indices(&text);
                texts.extend(found.map(|(place, found)| {
                    let start = gap.start + place;
                    start..start + found.len()
                }));
            }
            texts.sort_by_key(|text| text.start);
        }
        Frame {
            written: gaps(&around, &texts),
            texts,
        }
    }

    fn surroundings(&self, index: usize, frame: &Frame) -> Surroundings<'a> {
        let (before, _, after) = self.neighbours(index);
        let last = self.chat.messages().len() - 1;
        let messages =
            before.map_or(0, |text| text.message)..=after.map_or(last, |text| text.message);
        let text = self.text;
        Surroundings {
            kinds: messages.map(|index| kind_of(self.chat, index)).collect(),
            is_first: before.is_none(),
            is_last: after.is_none(),
            written: frame
                .written
                .iter()
                .map(|range| &text[range.clone()])
                .collect(),
        }
    }
}

impl Frame {
    /// Where `place` is in the frame.
    fn border<'a>(&self, text: &'a str, place: usize) -> Option<Border<'a>> {
        let is_at = |range: &Range<usize>| range.start <= place && place <= range.end;
        if let Some(nth) = self.written.iter().position(is_at) {
            let offset = place - self.written[nth].start;
            return Some(Border::Written { nth, offset });
        }
        let nth = self.texts.iter().position(is_at)?;
        let begin = &text[self.texts[nth].start..place];
        Some(Border::InText { nth, begin })
    }
}

impl KnownTurn<'_> {
    /// The place of a turn of the same surroundings, if it begins as this one does.
    fn place_in(&self, text: &str, frame: &Frame) -> Option<Range<usize>> {
        let place = self.start.place_in(text, frame)?..self.end.place_in(text, frame)?;
        let turn = text.get(place.clone())?;
        let begins_so = common_prefix(&self.more_asked, turn) == self.num_asked;
        begins_so.then_some(place)
    }
}

impl Border<'_> {
    fn place_in(&self, text: &str, frame: &Frame) -> Option<usize> {
        match self {
            Self::Written { nth, offset } => Some(frame.written.get(*nth)?.start + offset),
            Self::InText { nth, begin } => {
                let range = frame.texts.get(*nth)?;
                let begins_so = text[range.clone()].starts_with(begin);
                begins_so.then_some(range.start + begin.len())
            }
        }
    }
}

/// What of `around` is before, between and after `texts`, which are in order.
fn gaps(around: &Range<usize>, texts: &[Range<usize>]) -> Vec<Range<usize>> {
    let starts = std::iter::once(around.start).chain(texts.iter().map(|text| text.end));
    let ends = texts.iter().map(|text| text.start);
    let ends = ends.chain(std::iter::once(around.end));
    starts.zip(ends).map(|(start, end)| start..end).collect()
}

/// What a template may look at beside the texts of a message: its role, and the names of what it has.
fn kind_of(chat: &Chat, index: usize) -> String {
    let fields = Fields::of(&chat.messages()[index]);
    let is_in_parts = fields.is_in_parts();
    let role = fields.get("role").cloned();
    let mut names: Vec<String> = fields
        .0
        .into_iter()
        .filter(|(_, value)| has_content(value))
        .map(|(name, _)| name)
        .collect();
    names.sort();
    format!("{role:?} {is_in_parts} {names:?}")
}

/// Arguments and identifiers of calls as most templates show them. Numbers can have no marks, so they are looked for
/// in what is around a turn.
fn texts_beside(message: &Value) -> Vec<String> {
    let mut fields = Fields::of(message);
    let mut texts = Vec::new();
    change_calls(&mut fields, |_, function| {
        let arguments = function.get("arguments");
        texts.extend(arguments.and_then(|arguments| match arguments.as_str() {
            Some(text) => Some(text.to_string()),
            None => Some(tojson(arguments, Rest(Vec::new())).ok()?.to_string()),
        }));
        function.into_value()
    });
    let calls = fields
        .get("tool_calls")
        .and_then(|calls| calls.try_iter().ok());
    let ids = calls
        .into_iter()
        .flatten()
        .filter_map(|call| call.get_attr("id").ok());
    let ids = ids.chain(fields.get("tool_call_id").cloned());
    texts.extend(ids.filter_map(|id| Some(id.as_str()?.to_string())));
    texts.retain(|text| !text.is_empty());
    texts
}

/// Where the texts of messages are in `text`, which is the rendered conversation: what the template makes of it with
/// marks around them is the same text with marks in it, or nothing is known.
fn shown_texts(template: &ChatTemplate, chat: &Chat, text: &str) -> Vec<ShownText> {
    if text.contains([BEGIN, END]) {
        return Vec::new();
    }
    let shown = |marks_empty: bool| {
        let messages = chat.messages().iter().enumerate();
        let messages: Vec<Value> = messages
            .map(|(index, message)| {
                let marks_empty = marks_empty && chat.role(index) != "assistant";
                marked(index, message, marks_empty).into_value()
            })
            .collect();
        let marked = template.text(chat, &messages, false).ok()?;
        places_of_marks(&marked, text)
    };
    // A template may not show a message that says nothing.
    shown(true).or_else(|| shown(false)).unwrap_or_default()
}

/// The places of pairs of marks, if `marked` is `text` but for them.
fn places_of_marks(marked: &str, text: &str) -> Option<Vec<ShownText>> {
    let mut marks: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    let mut pieces = marked.split(BEGIN);
    let mut plain = pieces.next()?.to_string();
    for piece in pieces {
        let (label, rest) = piece.split_once(END)?;
        marks.entry(label).or_default().push(plain.len());
        plain += rest;
    }
    if plain != text {
        return None;
    }
    let pairs = marks.iter().filter_map(|(label, marks)| match marks[..] {
        [start, end] => {
            let (message, _) = label.split_once('.')?;
            let message = message.parse().ok()?;
            let range = start..end;
            Some(ShownText { message, range })
        }
        _ => None,
    });
    let mut shown: Vec<ShownText> = pairs.collect();
    shown.sort_by_key(|text| (text.range.start, text.range.end, text.message));
    let (mut message, mut end) = (0, 0);
    shown.retain(|text| {
        let is_in_order = message <= text.message && end <= text.range.start;
        if is_in_order {
            (message, end) = (text.message, text.range.end);
        }
        is_in_order
    });
    Some(shown)
}

/// A message with a mark before and after each of its texts, thoughts and names of functions that it calls, within
/// the white space around it, which templates trim; `marks_empty` is for a content that says nothing.
pub(super) fn marked(index: usize, message: &Value, marks_empty: bool) -> Fields {
    let mut fields = Fields::of(message);
    let mut num_marked = 0;
    let mut next_mark = || {
        num_marked += 1;
        stand_in(format_args!("{index}.{num_marked}"))
    };
    // Templates cut a text at these tags.
    let mut mark = |text: &str| {
        let mut marked = String::with_capacity(text.len());
        for piece in text.split_inclusive("think>") {
            let tags = ["</think>", "<think>"];
            let text = tags.iter().find_map(|tag| piece.strip_suffix(tag));
            let text = text.unwrap_or(piece);
            let said = text.trim();
            if said.is_empty() {
                marked += piece;
                continue;
            }
            let (mark, start) = (next_mark(), text.len() - text.trim_start().len());
            marked += &piece[..start];
            marked += &format!("{mark}{said}{mark}");
            marked += &piece[start + said.len()..];
        }
        marked
    };
    let is_in_parts = fields.is_in_parts();
    if let Some(content) = fields.get("content") {
        let texts: Vec<String> = texts_of(content).iter().map(|text| mark(text)).collect();
        fields.set("content", content_of(texts, is_in_parts));
    }
    for name in REASONING {
        if let Some(text) = fields.get(name).and_then(Value::as_str) {
            let marked = mark(text);
            fields.set(name, marked.into());
        }
    }
    change_calls(&mut fields, |_, function| {
        match function.get("name").and_then(Value::as_str).map(&mut mark) {
            Some(marked) => function.with("name", marked.into()),
            None => function.into_value(),
        }
    });
    let content = fields.get("content").and_then(Value::as_str);
    if let Some(content) = content.filter(|content| marks_empty && content.trim().is_empty()) {
        let mark = next_mark();
        let marked = format!("{mark}{mark}{content}");
        fields.set("content", marked.into());
    }
    fields
}
