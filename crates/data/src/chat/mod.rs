//! Conversations as a model reads them: rendered with its chat template, and which characters are the assistant's.

mod assistant_spans;
mod chat_template;
mod chosen_template;
mod conversation;
mod generation_marks;
mod jinja_source;
pub(crate) mod json_text;
mod loss_masks;
mod message;
mod message_forms;
mod ollama;
mod python_json;
mod python_language;
mod python_values;
mod roles;
mod shapes;
mod similar_turns;
mod stand_ins;
mod template_kwargs;
mod template_source;
mod tool_arguments;
mod unread;

pub use chat_template::{ChatTemplate, Rendered};
pub use chosen_template::TemplateFit;
pub use conversation::Chat;
pub(crate) use conversation::NO_TEXT;
pub(crate) use loss_masks::{MASKS_OF_RECORDS, masks_of_list};
pub(crate) use message::has_content;
pub(crate) use roles::{ROLES, common_role};
pub use template_kwargs::TemplateKwargs;
