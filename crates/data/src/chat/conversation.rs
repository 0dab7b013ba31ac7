//! A conversation: messages with roles, and the tools that the assistant may call.

use minijinja::Value;
use minijinja::value::ValueKind;
use serde::Deserialize;

use super::loss_masks::mask_of_message;
use super::message::{CALLS, Fields, REASONING, has_content, text_part, texts_of_parts};
use super::roles::common_role;
use super::shapes;
use super::template_kwargs::TemplateKwargs;
use crate::record_error::RecordError;

/// Parts of a message that a model of texts cannot read.
pub(crate) const NO_TEXT: [&str; 6] = ["image", "images", "audio", "audios", "video", "videos"];

/// A conversation.
#[derive(Clone, Debug)]
pub struct Chat {
    messages: Vec<Value>,
    /// The content of each message as its record has it, if that is null or in parts.
    pub(super) contents: Vec<Option<Value>>,
    /// The role of each message as its record has it, if that is another name of a common one.
    pub(super) role_names: Vec<Option<String>>,
    tools: Option<Value>,
    /// The variables for the chat template.
    pub(super) template_kwargs: TemplateKwargs,
    /// Of each message, whether its record says that it is learned, or that it is not.
    pub(crate) masks: Vec<Option<bool>>,
    /// Messages before those that are a completion, of which alone something is learned where prompts are not.
    num_in_prompt: usize,
}

impl Chat {
    /// Checks that each of `messages` is an object with a `role`, and with content, calls of tools or thoughts.
    /// Fields that are null are missing. Common names of roles, such as `human`, become those that templates know.
    /// Tools and their calls, or parts of them, that are JSON in a text become what the JSON says. Content may be in
    /// parts that are all text. A message with `"weight": 0`, or `train`, `training`, `loss` or `loss_mask` that is
    /// false or 0, is not learned.
    ///
    /// # Errors
    /// What is wrong with a message.
    pub fn new(messages: Vec<Value>, tools: Option<Value>) -> Result<Self, RecordError> {
        if messages.is_empty() {
            return Err("it has no messages".to_string().into());
        }
        let read = messages.iter().enumerate().map(|(index, message)| {
            let of_message = |err: RecordError| err.of(format!("message {index}"));
            let normalized = normalized(message).map_err(of_message)?;
            let mask = mask_of_message(message).map_err(of_message)?;
            Ok::<_, RecordError>((normalized, mask))
        });
        let (read, masks): (Vec<_>, _) = read.collect::<Result<Vec<_>, _>>()?.into_iter().unzip();
        let role_names = messages.iter().map(other_name_of_role).collect();
        let (messages, contents) = read.into_iter().unzip();
        let tools = tools.as_ref().map(shapes::tools).transpose();
        Ok(Self {
            messages,
            contents,
            role_names,
            tools: tools.map_err(|err| err.of("it has"))?.flatten(),
            template_kwargs: TemplateKwargs::default(),
            masks,
            num_in_prompt: 0,
        })
    }

    /// With these variables for the chat template, which come before the template's own.
    pub fn with_template_kwargs(self, template_kwargs: TemplateKwargs) -> Self {
        Self {
            template_kwargs,
            ..self
        }
    }

    /// As [`Self::new`], of JSON objects and without tools.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn from_json(messages: &[serde_json::Value]) -> Result<Self, RecordError> {
        let values = messages.iter().map(Value::deserialize);
        let values = values.collect::<Result<_, _>>();
        Self::new(values.map_err(|err| err.to_string())?, None)
    }

    /// The messages, in order. Content in parts is joined to one text.
    pub fn messages(&self) -> &[Value] {
        &self.messages
    }

    /// The tools, as templates get them; `None` becomes their `none`.
    pub(crate) fn tools(&self) -> Value {
        self.tools.clone().unwrap_or(Value::from(()))
    }

    /// With these messages in place of its own, one for each.
    pub(super) fn with_messages(&self, messages: Vec<Value>) -> Self {
        Self {
            messages,
            ..self.clone()
        }
    }

    /// Without tools.
    pub(super) fn without_tools(&self) -> Self {
        Self {
            tools: None,
            ..self.clone()
        }
    }

    /// The role of message `index`, by its common name if it has one.
    pub(crate) fn role(&self, index: usize) -> String {
        let role = self.messages[index].get_attr("role").unwrap_or_default();
        let role = role.as_str().unwrap_or_default();
        common_role(role).unwrap_or(role).to_string()
    }

    /// Whether message `index` calls tools.
    pub(super) fn has_calls(&self, index: usize) -> bool {
        let fields = Fields::of(&self.messages[index]);
        CALLS.iter().any(|name| fields.has_content(name))
    }

    /// Indices of the assistant's messages.
    pub(crate) fn assistant_turns(&self) -> impl Iterator<Item = usize> + use<'_> {
        (0..self.messages.len()).filter(|&index| self.role(index) == "assistant")
    }

    /// With these masks, one for each of the last messages, beside those of the messages: what one of them rules out is not learned.
    pub(crate) fn with_last_masks(mut self, masks: &[Option<bool>]) -> Self {
        for (own, other) in self.masks.iter_mut().rev().zip(masks.iter().rev()) {
            *own = match (*own, *other) {
                (Some(own), Some(other)) => Some(own && other),
                (own, other) => own.or(other),
            };
        }
        self
    }

    /// With the last `num_messages` as a completion, and all before as its prompt.
    pub(crate) fn with_completion(mut self, num_messages: usize) -> Self {
        self.num_in_prompt = self.messages.len().saturating_sub(num_messages);
        self
    }

    /// With nothing learned of the prompt, if there is a completion, but messages for which the record asks.
    pub(crate) fn without_loss_in_prompt(mut self) -> Self {
        for mask in &mut self.masks[..self.num_in_prompt] {
            *mask = mask.or(Some(false));
        }
        self
    }

    /// Whether nothing of some messages is learned because they are a prompt.
    pub(crate) fn has_prompt(&self) -> bool {
        self.num_in_prompt > 0
    }

    /// With nothing learned but the assistant's last message.
    pub(crate) fn with_last_answer_only(mut self) -> Self {
        let mut turns: Vec<usize> = self.assistant_turns().collect();
        turns.pop();
        for turn in turns {
            self.masks[turn] = Some(false);
        }
        self
    }

    /// The messages, where that at `index` says `content` and nothing else of its own but calls of tools.
    pub(crate) fn with_content(&self, index: usize, content: &str) -> Vec<Value> {
        let mut messages = self.messages.clone();
        if let Some(message) = messages.get_mut(index) {
            let mut fields = Fields::of(message);
            fields.remove(&REASONING);
            fields.set_text(content);
            *message = fields.into_value();
        }
        messages
    }
}

/// The role of a message, if it is another name of a common one.
fn other_name_of_role(message: &Value) -> Option<String> {
    let role = message.get_attr("role").ok()?;
    let role = role.as_str()?;
    let is_other = common_role(role).is_some_and(|common| common != role);
    is_other.then(|| role.to_string())
}

/// A message as templates read it; and its content as the record has it, if that is null or in parts.
fn normalized(message: &Value) -> Result<(Value, Option<Value>), RecordError> {
    if message.kind() != ValueKind::Map {
        return Err(format!("is {}, expected an object", message.kind()).into());
    }
    let mut fields = Fields::of(message);
    let is_null = fields
        .0
        .iter()
        .any(|(name, value)| name == "content" && value.is_none());
    fields.0.retain(|(_, value)| !value.is_none());
    let Some(role) = fields.get("role").and_then(|role| role.as_str()) else {
        return Err("has no role that is a text".to_string().into());
    };
    if let Some(common) = common_role(role).filter(|common| *common != role) {
        fields.set("role", Value::from(common));
    }
    // 0 or false images are none.
    let is_there = |name: &&str| fields.get(name).is_some_and(Value::is_true);
    if let Some(name) = NO_TEXT.into_iter().find(is_there) {
        return Err(RecordError::Unsupported(format!(
            "has {name}, which are not supported: only texts are learned"
        )));
    }
    if let Some(calls) = fields.get("tool_calls") {
        let is_list = calls.kind() == ValueKind::Seq;
        let calls = shapes::tool_calls(calls).map_err(|err| err.of("has"))?;
        if is_list || calls.is_true() {
            fields.set("tool_calls", calls);
        } else {
            // An empty text is no list.
            fields.remove(&["tool_calls"]);
        }
    }
    if let Some(call) = fields.get("function_call").filter(|call| has_content(call)) {
        let call = shapes::object("function_call", call).map_err(|err| err.of("has"))?;
        fields.set("function_call", call);
    }
    let mut original = is_null.then(|| Value::from(()));
    let content = fields.get("content").cloned().unwrap_or_default();
    match content.kind() {
        ValueKind::String => {}
        ValueKind::Undefined => {
            let mut others = CALLS.iter().chain(&REASONING);
            if !others.any(|name| fields.has_content(name)) {
                let names: Vec<&str> = fields.0.iter().map(|(name, _)| name.as_str()).collect();
                return Err(format!(
                    "has no content and no calls of tools; its fields are {names:?}"
                )
                .into());
            }
        }
        ValueKind::Seq => {
            let parts = texts_of_parts(&content)?;
            fields.set("content", Value::from(parts.concat()));
            original = Some(parts.into_iter().map(text_part).collect());
        }
        kind => return Err(format!("has content that is {kind}, expected a text").into()),
    }
    if let Some(reasoning) = REASONING.iter().find_map(|name| fields.get(name)).cloned() {
        if fields.get("thinking").is_none() {
            fields
                .0
                .insert(0, ("thinking".to_string(), reasoning.clone()));
        }
        fields.set("reasoning_content", reasoning);
    }
    Ok((fields.into_value(), original))
}
