//! What records call those who speak, and what chat templates call them.

use super::chat_template::ChatTemplate;
use super::conversation::Chat;
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

impl ChatTemplate {
    /// # Errors
    /// A role that is neither a common one nor named in the template: one that prints any role would train the model
    /// on it.
    pub(crate) fn check_roles(&self, chat: &Chat) -> Result<(), RecordError> {
        let is_known = |role: &str| {
            common_role(role) == Some(role) || MORE_ROLES.contains(&role) || self.names(role)
        };
        let mut all = (0..chat.messages().len()).map(|index| (index, chat.role(index)));
        let Some((index, role)) = all.find(|(_, role)| !is_known(role)) else {
            return Ok(());
        };
        Err(RecordError::Unsupported(format!(
            "message {index} has the role {role:?}, which is no common one, and the chat template in {} does not name it; expected one of {}, {}",
            self.path().display(),
            ROLES.map(|(name, _)| name).join(", "),
            MORE_ROLES.join(", ")
        )))
    }

    /// Whether the template has this text between quotes.
    fn names(&self, role: &str) -> bool {
        let quoted = ["'", "\""].map(|quote| format!("{quote}{role}{quote}"));
        let mut texts = self.texts();
        texts.any(|text| quoted.iter().any(|quoted| text.contains(quoted)))
    }
}
