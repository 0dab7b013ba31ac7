//! Roles, content and arguments of calls in the form that a chat template reads: transformers gives them as a record has
//! them, which not all templates expect. What a template makes of something else in their place tells.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::sync::LazyLock;

use minijinja::Value;
use regex::Regex;

use super::chat_template::ChatTemplate;
use super::conversation::Chat;
use super::message::{Fields, content_of, texts_of};
use super::roles::{MORE_ROLES, ROLES, common_role};
use super::stand_ins::{BEGIN, END, labels, stand_in};
use super::tool_arguments::parsed_object;
use crate::record_error::RecordError;

/// A test of a content for null, as in `message['content'] is none`.
static TESTS_FOR_NONE: LazyLock<Option<Regex>> = LazyLock::new(|| {
    Regex::new(r#"content['"]?\s*[\])]?\s*(is\s+(not\s+)?[nN]one|[!=]=\s*[nN]one)\b"#).ok()
});

/// The beginnings of a text in a list, as Python or JSON prints one.
const IN_LIST: [&str; 3] = ["'text': '", "\"text\": \"", "\"text\":\""];

/// A conversation with its content as the template reads it.
pub(crate) struct ReadContents<'a> {
    pub chat: Cow<'a, Chat>,
    /// Whether there is content in parts that the template gets as parts.
    pub keeps_parts: bool,
    /// Whether there is content in parts that was joined to one text.
    pub joins_parts: bool,
}

impl ChatTemplate {
    /// # Errors
    /// A role that is neither a common one nor one for which the template tests: one that prints any role would train
    /// the model on it.
    pub(crate) fn check_roles(&self, chat: &Chat) -> Result<(), RecordError> {
        let is_known = |role: &str| {
            common_role(role).is_some()
                || MORE_ROLES.contains(&role)
                || self.compared_roles.contains(role)
        };
        let mut all = (0..chat.messages().len()).map(|index| (index, chat.role(index)));
        let Some((index, role)) = all.find(|(_, role)| !is_known(role)) else {
            return Ok(());
        };
        Err(RecordError::Unsupported(format!(
            "message {index} has the role {role:?}, which is no common one, and the chat template in {} does not test for it; expected one of {}, {}",
            self.path().display(),
            ROLES.map(|(name, _)| name).join(", "),
            MORE_ROLES.join(", ")
        )))
    }

    /// With roles as the record has them where the template tests for those names.
    pub(super) fn with_roles_as_read<'a>(&self, chat: &'a Chat) -> Cow<'a, Chat> {
        let names = chat.role_names.iter().map(|name| {
            let name = name.as_ref();
            name.filter(|name| self.compared_roles.contains(*name))
        });
        let names: Vec<Option<&String>> = names.collect();
        if names.iter().all(Option::is_none) {
            return Cow::Borrowed(chat);
        }
        let messages = chat.messages().iter().zip(names);
        let messages = messages.map(|(message, name)| match name {
            Some(name) => Fields::of(message).with("role", name.into()),
            None => message.clone(),
        });
        Cow::Owned(chat.with_messages(messages.collect()))
    }

    /// Content in parts stays so where the template shows each part, null for a template that tests for it, and another
    /// name of a common role for one that tests for that name.
    pub(crate) fn with_contents_as_read<'a>(&self, chat: &'a Chat) -> ReadContents<'a> {
        let mut read = ReadContents {
            chat: self.with_roles_as_read(chat),
            keeps_parts: false,
            joins_parts: false,
        };
        let contents = &chat.contents;
        if contents.iter().all(Option::is_none) {
            return read;
        }
        let chat = read.chat.clone();
        let walked = self.walked_parts(&chat);
        let reads_null = TESTS_FOR_NONE
            .iter()
            .any(|test| test.is_match(self.text_for(&chat)));
        let messages = chat.messages().iter().zip(contents).enumerate();
        let messages = messages.map(|(index, (message, content))| {
            let Some(content) = content else {
                return message.clone();
            };
            let is_kept = if content.is_none() {
                reads_null
            } else {
                let is_walked = walked.contains(&index);
                read.keeps_parts |= is_walked;
                read.joins_parts |= !is_walked;
                is_walked
            };
            if is_kept {
                Fields::of(message).with("content", content.clone())
            } else {
                message.clone()
            }
        });
        let messages: Vec<Value> = messages.collect();
        read.chat = Cow::Owned(chat.with_messages(messages));
        read
    }

    /// The messages with content in parts of which the template shows each, and not as Python prints a list.
    fn walked_parts(&self, chat: &Chat) -> BTreeSet<usize> {
        let is_said = |text: &String| !text.trim().is_empty();
        let all: Vec<Vec<String>> = chat
            .contents
            .iter()
            .map(|content| content.as_ref().map(texts_of).unwrap_or_default())
            .collect();
        if all.iter().all(Vec::is_empty) {
            return BTreeSet::new();
        }
        let messages = chat.messages().iter().zip(&all).enumerate();
        let messages = messages.map(|(index, (message, texts))| {
            if texts.is_empty() {
                return message.clone();
            }
            let stand_ins = texts.iter().enumerate().map(|(part, text)| {
                if is_said(text) {
                    stand_in(format_args!("{index}.{part}"))
                } else {
                    text.clone()
                }
            });
            Fields::of(message).with("content", content_of(stand_ins.collect(), true))
        });
        let messages: Vec<Value> = messages.collect();
        let shown = self.text(chat, &messages, false).unwrap_or_default();
        let found = labels(&shown, &IN_LIST);
        let is_shown =
            |index: usize, part: usize| found.contains(format!("{index}.{part}").as_str());
        let is_walked = |(index, texts): (usize, &Vec<String>)| {
            let mut said = (0..texts.len())
                .filter(|&part| is_said(&texts[part]))
                .peekable();
            let is_walked = said.peek().is_some() && said.all(|part| is_shown(index, part));
            is_walked.then_some(index)
        };
        all.iter().enumerate().filter_map(is_walked).collect()
    }

    /// With arguments of calls that are JSON in a text as what the JSON says; but as texts for a template that
    /// refuses objects or prints them as Python does, and shows texts as they are. Borrowed if nothing is changed.
    pub(crate) fn with_arguments_as_read<'a>(&self, chat: &'a Chat) -> Cow<'a, Chat> {
        let object = Value::from_pairs([(stand_in("key"), "value")]);
        let json = format!(r#"{{"{BEGIN}key{END}": "value"}}"#);
        let shown = |arguments: &Value| {
            let replaced = chat.with_arguments(|_| Some(arguments.clone()))?;
            self.text(chat, replaced.messages(), false).ok()
        };
        let Some(parsed) = chat.with_arguments(parsed_object) else {
            return Cow::Borrowed(chat);
        };
        let is_read = |text: String| {
            text.contains(&stand_in("key")) && !text.contains(&format!("{{'{BEGIN}"))
        };
        let reads_objects = shown(&object).is_some_and(is_read);
        let keeps_texts =
            || shown(&Value::from(json.clone())).is_some_and(|text| text.contains(&json));
        if !reads_objects && keeps_texts() {
            return Cow::Borrowed(chat);
        }
        Cow::Owned(parsed)
    }
}
