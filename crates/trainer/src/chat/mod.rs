//! Conversations as a model reads them: rendered with its chat template, and which characters are the assistant's.

mod assistant_spans;
mod chat_template;
mod chosen_template;
mod conversation;
mod generation_marks;
mod jinja_source;
mod loss_masks;
mod ollama;
mod python_json;
mod python_language;
mod python_values;
mod template_source;
mod tool_arguments;
mod unread;

pub use chat_template::{ChatTemplate, Rendered};
pub use chosen_template::TemplateFit;
pub use conversation::Chat;
pub(crate) use conversation::{NO_TEXT, has_content};
pub(crate) use loss_masks::{MASKS_OF_RECORDS, masks_of_list};
pub(crate) use python_json::{read_json, read_json_values};
