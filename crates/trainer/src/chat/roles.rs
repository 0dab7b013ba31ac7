//! What records call those who speak, and what chat templates call them.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::sync::LazyLock;

use regex::Regex;

use super::chat_template::ChatTemplate;
use super::conversation::{Chat, Fields};
use crate::record_error::RecordError;

/// Common names, and the roles that chat templates know.
pub(crate) const ROLES: [(&str, &str); 12] = [
    ("system", "system"),
    ("human", "user"),
    ("user", "user"),
    ("gpt", "assistant"),
    ("assistant", "assistant"),
    ("ai", "assistant"),
    ("model", "assistant"),
    ("bot", "assistant"),
    ("chatgpt", "assistant"),
    ("bing", "assistant"),
    ("bard", "assistant"),
    ("tool", "tool"),
];

/// Roles of some families of models, which other templates print as they are.
const MORE_ROLES: [&str; 3] = ["developer", "function", "ipython"];

/// The role that a common name stands for, in small or capital letters.
pub(crate) fn common_role(name: &str) -> Option<&'static str> {
    let role = ROLES
        .iter()
        .find(|(known, _)| known.eq_ignore_ascii_case(name));
    role.map(|(_, role)| *role)
}

/// Tests of a role: the first group has the names.
static TESTS_OF_ROLES: LazyLock<Vec<Regex>> = LazyLock::new(|| {
    let tests = [
        // `message['role'] == 'user'`, `role | lower != "user"`
        r#"role['"]?\s*\]?\)?(?:\s*\|\s*\w+)*\s*[=!]=\s*('[^']*'|"[^"]*")"#,
        // `'user' == message.role`
        r#"('[^']*'|"[^"]*")\s*[=!]=\s*[^\s=%}]*role\b"#,
        // `message.role not in ['user', 'tool']`
        r#"role['"]?\s*\]?\)?(?:\s*\|\s*\w+)*\s+(?:not\s+)?in\s*[\[({]([^\])}]*)"#,
        // `selectattr('role', 'equalto', 'user')`
        r#"attr\(\s*['"]role['"]\s*,\s*['"](?:equalto|eq|==|ne|!=|in)['"]\s*,([^)]*)"#,
    ];
    tests
        .iter()
        .filter_map(|test| Regex::new(test).ok())
        .collect()
});

static QUOTED: LazyLock<Option<Regex>> =
    LazyLock::new(|| Regex::new(r#"'([^']+)'|"([^"]+)""#).ok());

/// The names with which templates compare roles.
pub(super) fn compared_roles<'a>(templates: impl Iterator<Item = &'a str>) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for template in templates {
        let tests = TESTS_OF_ROLES
            .iter()
            .flat_map(|test| test.captures_iter(template));
        let lists = tests.filter_map(|test| Some(test.get(1)?.as_str()));
        for list in lists {
            let quoted = QUOTED.iter().flat_map(|quoted| quoted.find_iter(list));
            names.extend(quoted.map(|name| name.as_str().trim_matches(['\'', '"']).to_string()));
        }
    }
    names
}

impl ChatTemplate {
    /// # Errors
    /// A role that is neither a common one nor one for which the template tests: one that prints any role would train
    /// the model on it.
    pub(crate) fn check_roles(&self, chat: &Chat) -> Result<(), RecordError> {
        let is_known = |role: &str| {
            common_role(role).is_some()
                || MORE_ROLES.contains(&role)
                || self.compared_roles().contains(role)
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
        let names = chat.role_names().iter().map(|name| {
            let name = name.as_ref();
            name.filter(|name| self.compared_roles().contains(*name))
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
}
