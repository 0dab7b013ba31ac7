//! What of a conversation its chat template does not show.
//!
//! What a template shows of a text may be changed, trimmed or escaped, so the text is not looked for: something else is put in its place, and where
//! that gives the same rendering the template does not show it.

use std::collections::BTreeSet;

use minijinja::Value;

use super::chat_template::ChatTemplate;
use super::conversation::Chat;
use super::loss_masks::{MASKS, is_score};
use super::message::{CALLS, Fields, REASONING, has_content, texts_of};
use super::stand_ins::{labels, stand_in};
use super::tool_arguments::change_calls;
use crate::record_error::RecordError;

impl ChatTemplate {
    /// The names of fields, of messages and of the record, that change nothing in `text`, which the template has made of `chat`.
    ///
    /// # Errors
    /// A message whose text or calls of tools the template does not show.
    pub(crate) fn unread(&self, chat: &Chat, text: &str) -> Result<Vec<String>, RecordError> {
        let (hidden, is_beside_calls) = self.hidden_contents(chat, text);
        if let Some(index) = hidden {
            let place = self.not_shown(chat, index);
            return Err(RecordError::Unsupported(format!(
                "{place}\nhint: give it a role that the template shows there, such as system, user, assistant or tool, or put its text into another message"
            )));
        }
        if let Some((name, index)) = self.hidden_calls(chat, text) {
            let place = self.not_shown(chat, index);
            return Err(RecordError::Unsupported(format!("{name}: {place}")));
        }
        let messages = || chat.messages().iter();
        let names: BTreeSet<String> = messages().flat_map(names_of_more).collect();
        let mut unread = Vec::new();
        if is_beside_calls {
            unread.push("messages[].content beside calls of tools".to_string());
        }
        for name in names {
            let removed = match name == REASONING[0] {
                true => &REASONING[..],
                false => &[name.as_str()][..],
            };
            let without = messages().map(|message| {
                let mut fields = Fields::of(message);
                fields.remove(removed);
                fields.into_value()
            });
            if self.gives(chat, &without.collect::<Vec<_>>(), text) {
                unread.push(format!("messages[].{name}"));
            }
        }
        let unknown = chat.template_kwargs.names();
        let unknown = unknown.filter(|name| !self.mentions(name));
        unread.extend(unknown.map(|name| format!("chat_template_kwargs.{name}")));
        if chat.tools().is_true() && self.gives(&chat.without_tools(), chat.messages(), text) {
            unread.push("tools".to_string());
        }
        Ok(unread)
    }

    /// The first calls of tools of which nothing is in `text`: their name, and the message.
    fn hidden_calls(&self, chat: &Chat, text: &str) -> Option<(&'static str, usize)> {
        let all = chat.messages();
        let calls = (0..all.len()).flat_map(|index| CALLS.map(|name| (name, index)));
        let mut calls = calls
            .filter(|(name, index)| Fields::of(&all[*index]).has_content(name))
            .peekable();
        calls.peek()?;
        // Most templates show the names of all of them at once.
        let shown = self.text(chat, &with_stand_ins_for_calls(chat), false);
        let shown = shown.unwrap_or_default();
        let shown = labels(&shown, &[]);
        let is_shown =
            |(name, index): &(&str, usize)| shown.contains(label_of_call(name, *index).as_str());
        let mut others = calls.filter(|call| !is_shown(call));
        others.find(|(name, index)| {
            let mut messages = all.to_vec();
            let mut fields = Fields::of(&messages[*index]);
            fields.remove(&[name]);
            messages[*index] = fields.into_value();
            self.gives(chat, &messages, text)
        })
    }

    /// Of messages whose texts are not in `text`: the first one that says nothing else, and whether one that calls
    /// tools is among them, as a template may write calls in place of the text.
    fn hidden_contents(&self, chat: &Chat, text: &str) -> (Option<usize>, bool) {
        let is_said = |message: &Value| {
            let content = message.get_attr("content").unwrap_or_default();
            let texts = texts_of(&content);
            texts.iter().any(|text| !text.trim().is_empty())
        };
        let all = chat.messages();
        let said: Vec<usize> = (0..all.len()).filter(|&at| is_said(&all[at])).collect();
        // Most templates show all of them at once.
        let shown = self.text(chat, &with_stand_ins(chat, &said), false);
        let shown = shown.unwrap_or_default();
        let shown = labels(&shown, &[]);
        let others = said
            .into_iter()
            .filter(|index| !shown.contains(index.to_string().as_str()));
        let (beside_calls, alone): (Vec<usize>, Vec<usize>) =
            others.partition(|&index| chat.has_calls(index));
        let is_hidden = |index: &usize| self.gives(chat, &with_stand_ins(chat, &[*index]), text);
        let first = alone.into_iter().find(is_hidden);
        (first, beside_calls.iter().any(is_hidden))
    }

    fn gives(&self, chat: &Chat, messages: &[Value], text: &str) -> bool {
        self.text(chat, messages, false)
            .is_ok_and(|other| other == text)
    }

    fn not_shown(&self, chat: &Chat, index: usize) -> String {
        format!(
            "the chat template in {} does not show message {index}, of the role {:?}",
            self.path().display(),
            chat.role(index)
        )
    }
}

fn with_stand_ins(chat: &Chat, indices: &[usize]) -> Vec<Value> {
    let mut messages = chat.messages().to_vec();
    for &index in indices {
        let mut fields = Fields::of(&messages[index]);
        fields.set_text(&stand_in(index));
        messages[index] = fields.into_value();
    }
    messages
}

fn label_of_call(field: &str, index: usize) -> String {
    format!("{field} {index}")
}

/// The messages with stand-ins for the names of all functions that are called.
fn with_stand_ins_for_calls(chat: &Chat) -> Vec<Value> {
    let messages = chat.messages().iter().enumerate();
    let messages = messages.map(|(index, message)| {
        let mut fields = Fields::of(message);
        change_calls(&mut fields, |name, function| {
            function.with("name", stand_in(label_of_call(name, index)).into())
        });
        fields.into_value()
    });
    messages.collect()
}

/// The names of what a message has beside role, content and masks; what the assistant thought has one name.
fn names_of_more(message: &Value) -> Vec<String> {
    let fields = Fields::of(message).0.into_iter();
    let fields = fields.filter(|(name, value)| {
        let is_known = ["role", "content"].contains(&name.as_str());
        let is_mask = MASKS.contains(&name.as_str()) && !is_score(name, value);
        !is_known && !is_mask && has_content(value)
    });
    let names = fields.map(|(name, _)| match REASONING.contains(&name.as_str()) {
        true => REASONING[0].to_string(),
        false => name,
    });
    names.collect()
}
