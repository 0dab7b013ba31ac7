//! Where the assistant's turns are in a conversation whose template does not tell.
//!
//! Of most templates the messages before turn i, with the header that asks for it, and those up to it give two
//! beginnings of the rendered conversation, and turn i is what is between their ends. But templates may render a turn
//! differently once others follow, as Qwen3 does, which leaves out earlier thoughts. Then turn i gets another text:
//! what follows that in the whole conversation, and not in one that ends with turn i, is what comes after turn i. A
//! turn that shows its calls in place of its text is what the rendering gains with it.
//!
//! That takes several renderings for a turn. They are spared for turns that are as an earlier one but for the texts,
//! and one rendering shows where those texts are ([`SimilarTurns`]).

use std::ops::Range;

use minijinja::Value;

use super::chat_template::ChatTemplate;
use super::conversation::Chat;
use super::similar_turns::{SimilarTurns, marked};
use super::stand_ins::stand_in;
use super::tool_arguments::change_calls;

/// The bytes of `text`, the rendered `chat`, that the assistant writes.
pub(super) fn find_assistant_spans(
    template: &ChatTemplate,
    chat: &Chat,
    text: &str,
    special_tokens: &[String],
) -> Result<Vec<Range<usize>>, String> {
    let similar = SimilarTurns::of(template, chat, text);
    let mut finder = SpanFinder {
        template,
        chat,
        text,
        similar,
    };
    finder.spans(special_tokens)
}

struct SpanFinder<'a> {
    template: &'a ChatTemplate,
    chat: &'a Chat,
    text: &'a str,
    similar: SimilarTurns<'a>,
}

/// A turn whose place is looked for, and what its place follows from.
struct Turn {
    index: usize,
    /// Where the one before ends.
    earlier: usize,
    /// The messages before it, with the header that asks for it, if the template does not refuse them.
    asked: Option<String>,
    /// Those up to it.
    done: Option<String>,
}

impl SpanFinder<'_> {
    fn spans(&mut self, special_tokens: &[String]) -> Result<Vec<Range<usize>>, String> {
        let text = self.text;
        let mut spans: Vec<Range<usize>> = Vec::new();
        for index in self.chat.assistant_turns() {
            let earlier = spans.last().map_or(0, |span| span.end);
            let found = self.similar.find(index);
            let (Range { start, end }, asked) = match found.clone() {
                Some(borders) => (borders, None),
                None => self.borders(index, earlier)?,
            };
            let is_place = earlier <= start && start < end;
            if !(is_place && text.is_char_boundary(start) && text.is_char_boundary(end)) {
                return Err(format!(
                    "the chat template does not show where the assistant's message {index} is"
                ));
            }
            if found.is_none() {
                self.similar.add(index, &(start..end), asked.as_deref());
            }
            spans.push(start..start + written_len(&text[start..end], special_tokens));
        }
        Ok(spans)
    }

    /// What the template makes of the first `num_messages`; `None` if it refuses them.
    fn first(&self, num_messages: usize, add_generation_prompt: bool) -> Option<String> {
        let messages = &self.chat.messages()[..num_messages];
        let text = self
            .template
            .text(self.chat, messages, add_generation_prompt);
        text.ok()
    }

    /// From where turn `index` begins, after its header, to where the next one does; and the messages before it with
    /// the header.
    fn borders(
        &self,
        index: usize,
        earlier: usize,
    ) -> Result<(Range<usize>, Option<String>), String> {
        let text = self.text;
        // A template may refuse what has no message yet.
        let asked = self.first(index, true);
        let done = if index + 1 == self.chat.messages().len() {
            Some(text.to_string())
        } else {
            self.first(index + 1, false)
        };
        let turn = Turn {
            index,
            earlier,
            asked,
            done,
        };
        let borders = match (&turn.asked, &turn.done) {
            (Some(asked), Some(done)) if text.starts_with(asked) && text.starts_with(done) => {
                asked.len()..done.len()
            }
            _ => self.borders_of_stand_in(&turn)?,
        };
        Ok((borders, turn.asked))
    }

    fn borders_of_stand_in(&self, turn: &Turn) -> Result<Range<usize>, String> {
        let Self {
            template,
            chat,
            text,
            ..
        } = self;
        let index = turn.index;
        let stand_in = stand_in("turn");
        let unclear = || {
            format!(
                "the chat template does not show the content of the assistant's message {index} once"
            )
        };
        let end_of = |text: &str| {
            let place = text.find(&stand_in)? + stand_in.len();
            (text.matches(&stand_in).count() == 1).then_some(place)
        };
        let silent = self.first(index, false);
        let replaced = chat.with_content(index, &stand_in);
        let other = template.text(chat, &replaced, false);
        let end = other.as_ref().ok().and_then(|other| end_of(other));
        let (Ok(other), Some(end)) = (&other, end) else {
            if chat.has_calls(index) {
                let borders = silent.and_then(|silent| self.borders_of_gain(turn, &silent));
                return borders.ok_or_else(unclear);
            }
            return Err(other.err().unwrap_or_else(unclear));
        };
        let place = end - stand_in.len();
        let begin = begin_of_turn(&other[..place], turn.asked.as_deref(), silent.as_deref());
        let begin = begin.min(common_prefix(text, other));
        if index + 1 == replaced.len() {
            return Ok(begin..text.len());
        }
        let last = template.text(chat, &replaced[..=index], false)?;
        // What ends the turn, and what follows.
        let last = &last[end_of(&last).ok_or_else(unclear)?..];
        let ending = match common_tags(last, &other[end..]) {
            0 => common_prefix(last, &other[end..]),
            ending => ending,
        };
        let following = &other[end + ending..];
        if text.ends_with(following) {
            Ok(begin..text.len() - following.len())
        } else {
            Err(unclear())
        }
    }

    /// A turn that shows its calls in place of its text: what the template writes once the turn follows the messages
    /// before it, which are `silent`.
    fn borders_of_gain(&self, turn: &Turn, silent: &str) -> Option<Range<usize>> {
        let (text, index) = (self.text, turn.index);
        let asked = turn.asked.as_deref().unwrap_or_default();
        // A template may leave out thoughts, or a text beside calls, once others follow.
        let calls_alone = self.chat.with_content(index, "");
        let done_alone = self.template.text(self.chat, &calls_alone[..=index], false);
        let candidates = [
            (self.chat.messages(), turn.done.as_deref()),
            (&calls_alone[..], done_alone.as_deref().ok()),
        ];
        for (messages, done) in candidates {
            let Some((done, gained)) =
                done.and_then(|done| Some((done, done.strip_prefix(silent)?)))
            else {
                continue;
            };
            // Its header, as far as the turn has it.
            let begin = common_tags(asked, done).max(silent.len());
            if text.starts_with(silent) {
                // What ends the turn may be missing where another one follows.
                let end = common_tags(done, text);
                if self.is_ending(&done[end..], &messages[..=index]) {
                    return Some(begin..end);
                }
                continue;
            }
            // What comes earlier is another text in the whole conversation, but for the messages' own texts.
            let around = self.similar.around(index);
            let earlier = around.start.max(turn.earlier);
            let mut places = text.get(earlier..around.end)?.match_indices(gained);
            if let (Some((place, _)), None) = (places.next(), places.next()) {
                let place = earlier + place;
                return Some(place + begin - silent.len()..place + gained.len());
            }
        }
        None
    }

    /// Whether nothing that the last of `messages` says is in `ending`, with which their text ends.
    fn is_ending(&self, ending: &str, messages: &[Value]) -> bool {
        let Some((message, before)) = messages.split_last().filter(|_| !ending.is_empty()) else {
            return ending.is_empty();
        };
        let mut said = marked(before.len(), message, false);
        change_calls(&mut said, |_, function| match function.get("arguments") {
            Some(_) => {
                let argument = (stand_in("argument"), Value::from(stand_in("value")));
                function.with("arguments", Value::from_pairs([argument]))
            }
            None => function.into_value(),
        });
        let messages = [before, &[said.into_value()]].concat();
        let text = self.template.text(self.chat, &messages, false);
        text.is_ok_and(|text| text.ends_with(ending))
    }
}

/// Bytes that both begin with, without the beginning of a tag that only one of them has: `<call>` and `<answer>`
/// share nothing.
fn common_tags(a: &str, b: &str) -> usize {
    let common = common_prefix(a, b);
    if common == a.len() || common == b.len() {
        return common;
    }
    let shared = &a[..common];
    match shared.rfind(['<', '[']) {
        Some(open) if !shared[open..].contains(['>', ']']) => open,
        _ => common,
    }
}

/// Where a turn begins whose content is what follows `before`; `asked` and `silent` are the messages before it with
/// and without the header that asks for it.
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
pub(super) fn common_prefix(a: &str, b: &str) -> usize {
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

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::path::Path;

    use serde_json::json;

    use super::*;
    use crate::chat::template_source::TemplateSource;

    fn templates() -> Vec<(String, ChatTemplate)> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let fixtures = root.join("../../tests/fixtures/chat");
        let tokens = [("bos_token", "<s>"), ("eos_token", "</s>")];
        let tokens = tokens.map(|(name, token)| (name.to_string(), token.to_string()));
        let tokens = BTreeMap::from(tokens);
        let names = ["llama2", "llama3", "qwen2.5", "qwen3", "mistral", "zephyr"];
        let mut all: Vec<_> = names
            .iter()
            .map(|name| {
                let template = ChatTemplate::from_dir(fixtures.join(name), tokens.clone());
                (name.to_string(), template.unwrap().unwrap())
            })
            .collect();
        // Thoughts that the prompt begins, a turn without a header, and one that shows calls in place of its text.
        let more = [
            "{% for m in messages %}<{{ m.role }}>{{ m.content.split('</think>')[-1] if not loop.last else m.content }}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<assistant><think>{% endif %}",
            "{{ bos_token }}{% for m in messages %}{{ loop.index0 if m.role == 'user' }} {{ m.content | trim }}\n{% endfor %}",
            "{% for m in messages %}{% if m.tool_calls %}[CALLS]{{ m.tool_calls | tojson }}{% else %}<{{ m.role }}>{{ m.content | trim }}{% endif %}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}",
            include_str!("templates/gemma.jinja"),
        ];
        for text in more {
            let source = TemplateSource::new("own".into(), text, None);
            all.push((
                text.to_string(),
                ChatTemplate::of_source(source, tokens.clone()).unwrap(),
            ));
        }
        all
    }

    /// A conversation of so many questions with answers of several kinds, with calls of tools or without.
    fn chat(num_questions: usize, kinds: &[&str]) -> Chat {
        let mut messages = Vec::new();
        let say = |role: &str, content: String| json!({"role": role, "content": content});
        for index in 0..num_questions {
            messages.push(say("user", format!(" q{index}\n")));
            match kinds[index % kinds.len()] {
                "call" => {
                    let calls = json!([{"function": {"name": format!("f{index}"), "arguments": {"x": index}}}]);
                    messages.push(json!({"role": "assistant", "content": "", "tool_calls": calls}));
                    messages.push(say("tool", format!("r{index}")));
                    messages.push(say("assistant", format!("a{index} ")));
                }
                "think" => messages.push(say("assistant", format!("<think>\nt{index}\n</think>\n\na{index}"))),
                "reasoning" => messages.push(json!({"role": "assistant", "content": format!("a{index}"), "reasoning_content": "hm"})),
                // What is around turns, in one of them.
                _ => messages.push(say("assistant", format!("a{index}</s><user> q0<|im_end|>\n"))),
            }
        }
        Chat::from_json(&messages).unwrap()
    }

    #[test]
    fn similar_turns_are_where_a_search_for_each_finds_them() {
        let mut num_found = 0;
        for (name, template) in templates() {
            for kinds in [
                &["plain"][..],
                &["plain", "call"],
                &["think", "plain", "reasoning"],
                &["call", "call", "plain", "think"],
            ] {
                let chat = chat(7, kinds);
                let Ok(text) = template.text(&chat, chat.messages(), false) else {
                    continue;
                };
                let special_tokens = ["</s>".to_string(), "<|im_end|>".to_string()];
                let found = find_assistant_spans(&template, &chat, &text, &special_tokens);
                let mut each = SpanFinder {
                    template: &template,
                    chat: &chat,
                    text: &text,
                    similar: SimilarTurns::of(&template, &chat, &text),
                };
                each.similar.is_used = false;
                assert_eq!(found, each.spans(&special_tokens), "{name} {kinds:?}");
                num_found += usize::from(found.is_ok());
            }
        }
        assert!(num_found >= 24, "{num_found}");
    }

    #[test]
    fn empty_messages_and_turns_in_a_row_take_few_searches() {
        let say = |role: &str, content: String| json!({"role": role, "content": content});
        let turn = |index: usize| say("assistant", format!("a{index}"));
        let answered = |index| [say("user", String::new()), turn(index)];
        let call = |index: usize| {
            let call = json!({"id": format!("call {index}"), "function": {"name": "f", "arguments": {"x": index}}});
            let called = json!({"role": "assistant", "content": "", "tool_calls": [call]});
            [called, say("tool", String::new())]
        };
        let question = || vec![say("user", "q".into())];
        let in_a_row = question().into_iter().chain((0..200).map(turn));
        let calls = question().into_iter().chain((0..200).flat_map(call));
        let mut num_found = 0;
        for messages in [
            (0..200).flat_map(answered).collect::<Vec<_>>(),
            in_a_row.collect(),
            calls.chain([turn(0)]).collect(),
        ] {
            let chat = Chat::from_json(&messages).unwrap();
            for (name, template) in templates() {
                if !["qwen2.5", "qwen3", "llama3", "zephyr"].contains(&name.as_str()) {
                    continue;
                }
                if let Some((num_searched, all_known)) = searched(&template, &chat) {
                    num_found += 1;
                    assert!(num_searched <= 6 && all_known, "{name}: {num_searched}");
                }
            }
        }
        assert!(num_found >= 4, "{num_found}");
    }

    /// How many turns of a conversation are searched for, and whether all are known then; `None` where the template does not show them.
    fn searched(template: &ChatTemplate, chat: &Chat) -> Option<(usize, bool)> {
        let text = template.text(chat, chat.messages(), false).ok()?;
        let mut finder = SpanFinder {
            template,
            chat,
            text: &text,
            similar: SimilarTurns::of(template, chat, &text),
        };
        finder.spans(&[]).ok()?;
        let num_searched = finder.similar.num_known();
        let mut turns = chat.assistant_turns();
        let all_known = turns.all(|turn| finder.similar.find(turn).is_some());
        Some((num_searched, all_known))
    }

    #[test]
    fn long_conversations_take_few_searches() {
        let mut num_found = 0;
        for (name, template) in templates() {
            let is_numbered = name.contains("loop.index0 if");
            for kinds in [&["plain"][..], &["plain", "call"]] {
                let chat = chat(200, kinds);
                let Some((num_searched, all_known)) = searched(&template, &chat) else {
                    continue;
                };
                num_found += 1;
                assert!(
                    is_numbered || num_searched <= 6 && all_known,
                    "{name} {kinds:?}: {num_searched}"
                );
            }
        }
        assert!(num_found >= 4, "{num_found}");
    }
}
