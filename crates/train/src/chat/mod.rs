//! Conversations as a model reads them: rendered with its chat template, and which characters are the assistant's.

mod assistant_spans;
mod chat_template;
mod conversation;
mod generation_marks;
mod python_json;
mod template_source;

pub use chat_template::{ChatTemplate, Rendered};
pub use conversation::Chat;
