//! A checkpoint's chat template: Jinja as transformers renders it.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use candle_core::{Result, bail};
use jiff::civil::Date;
use jiff::tz::TimeZone;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Rest;
use minijinja::{Environment, Error, ErrorKind, State, Value};

use super::assistant_spans::find_assistant_spans;
use super::conversation::Chat;
use super::generation_marks::{marked_spans, replace_tags};
use super::loss_masks::take_masked;
use super::python_json::tojson;
use super::template_kwargs::TemplateKwargs;
use super::template_source::TemplateSource;
use crate::Tokenizer;

/// Names in the environment. What a template is called tells the engine what to escape: nothing.
const DEFAULT: &str = "chat";
const WITH_TOOLS: &str = "chat with tools";
const MARKED: &str = " and marks";

/// Instructions that a template may take for a conversation; to read or write 64 bytes counts as one. A message takes about a hundred: a
/// conversation of a million tokens a few millions.
const MAX_STEPS: u64 = 50_000_000;

/// A chat template. It knows the special tokens by their names, such as `bos_token`.
#[derive(Clone, Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    special_tokens: BTreeMap<String, String>,
    source: TemplateSource,
    date: Date,
    kwargs: TemplateKwargs,
}

/// A conversation as text.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Rendered {
    /// The text.
    pub text: String,
    /// What of it the assistant writes, the ends of its turns included, in bytes; without the messages that are not learned.
    pub assistant: Vec<Range<usize>>,
    /// The assistant's messages that are not learned.
    pub masked: Vec<Range<usize>>,
}

impl ChatTemplate {
    /// The template of the checkpoint in `dir`, or `None` if it has none; `special_tokens` are spellings by name (`bos_token`, ..).
    ///
    /// # Errors
    /// A file that cannot be read, or a template that is no Jinja.
    pub fn from_dir(
        dir: impl AsRef<Path>,
        special_tokens: BTreeMap<String, String>,
    ) -> Result<Option<Self>> {
        let dir = dir.as_ref();
        let source = TemplateSource::read(dir)?;
        let template = source.map(|source| Self::of_source(source, special_tokens));
        template.transpose()
    }

    /// That of a text, which errors call `path`.
    pub(crate) fn of_text(path: &Path, text: &str, tokenizer: &Tokenizer) -> Result<Self> {
        let source = TemplateSource::of_text(path.to_path_buf(), text);
        Self::of_source(source, tokenizer.named_special_tokens().clone())
    }

    pub(super) fn of_source(
        source: TemplateSource,
        special_tokens: BTreeMap<String, String>,
    ) -> Result<Self> {
        let path = source.path.clone();
        tracing::debug!("chat template: {}", path.display());
        Self::new(source, special_tokens).map_err(|err| {
            candle_core::Error::msg(format!(
                "the chat template of {path:?} is not one that can be rendered: {}",
                explain(&err)
            ))
        })
    }

    /// The template itself, for conversations without tools.
    pub fn text_of_template(&self) -> &str {
        &self.source.default
    }

    /// That for conversations with tools, where it is another one.
    pub(super) fn text_with_tools(&self) -> Option<&str> {
        self.source.with_tools.as_deref()
    }

    fn new(
        source: TemplateSource,
        special_tokens: BTreeMap<String, String>,
    ) -> std::result::Result<Self, Error> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder()
            .trim_blocks(true)
            .lstrip_blocks(true)
            .build()?;
        environment.set_syntax(syntax);
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.set_formatter(write_as_python);
        environment.set_fuel(Some(MAX_STEPS));
        environment.add_filter("tojson", tojson);
        environment.add_function("raise_exception", raise_exception);
        let with_tools = source.with_tools.as_ref().map(|text| (WITH_TOOLS, text));
        for (name, text) in [(DEFAULT, &source.default)].into_iter().chain(with_tools) {
            match replace_tags(text) {
                None => environment.add_template_owned(name, text.clone())?,
                Some((plain, marked)) => {
                    environment.add_template_owned(name, plain)?;
                    environment.add_template_owned(format!("{name}{MARKED}"), marked)?;
                }
            }
        }
        Ok(Self {
            environment,
            special_tokens,
            source,
            date: Date::ZERO,
            kwargs: TemplateKwargs::default(),
        }
        .with_date(jiff::Zoned::now().date()))
    }

    /// The template on this date, from midnight, whatever the clock says: the same conversation has the same text whenever it is rendered.
    /// Without it the date is that of today.
    pub fn with_date(mut self, date: Date) -> Self {
        self.date = date;
        self.environment
            .add_function("strftime_now", move |format: &str| strftime(format, date));
        self
    }

    /// The template with these variables, which those of a conversation come before.
    ///
    /// # Errors
    /// One that the template does not read.
    pub fn with_kwargs(self, kwargs: TemplateKwargs) -> Result<Self> {
        if let Some(name) = kwargs.names().find(|name| !self.mentions(name)) {
            bail!(
                "the chat template in {} does not read {name}, which is among the variables for it",
                self.path().display()
            );
        }
        Ok(Self { kwargs, ..self })
    }

    /// Whether the template has this name in its text.
    pub(super) fn mentions(&self, name: &str) -> bool {
        self.texts().any(|text| text.contains(name))
    }

    /// The texts of the templates: for conversations, and for those with tools.
    pub(super) fn texts(&self) -> impl Iterator<Item = &str> {
        let with_tools = self.source.with_tools.as_deref();
        std::iter::once(self.source.default.as_str()).chain(with_tools)
    }

    /// The text of the template for this conversation.
    pub(super) fn text_for(&self, chat: &Chat) -> &str {
        let with_tools = self.source.with_tools.as_deref();
        let with_tools = with_tools.filter(|_| chat.tools().is_true());
        with_tools.unwrap_or(&self.source.default)
    }

    /// The file that it is in, or the name by which it was chosen.
    pub fn path(&self) -> &Path {
        &self.source.path
    }

    /// The date of the texts, if the template asks for it.
    pub fn date(&self) -> Option<Date> {
        self.mentions("strftime_now").then_some(self.date)
    }

    /// Renders a conversation and finds the assistant's turns in it.
    ///
    /// A template with `{% generation %}` says where they are. Of another one they follow from what it makes of the conversation
    /// cut off before and after each turn: of white space after the last of the tokenizer's `special_tokens` none belongs to the turn.
    ///
    /// # Errors
    /// The template refuses the conversation, or the turns cannot be told apart; a part of a sentence.
    pub fn render(
        &self,
        chat: &Chat,
        special_tokens: &[String],
    ) -> std::result::Result<Rendered, String> {
        self.render_as_read(&self.with_contents_as_read(chat).chat, special_tokens)
    }

    /// As [`Self::render`], of a conversation with its contents as the template reads them.
    pub(crate) fn render_as_read(
        &self,
        chat: &Chat,
        special_tokens: &[String],
    ) -> std::result::Result<Rendered, String> {
        let text = self.text(chat, chat.messages(), false)?;
        let marked = format!("{}{MARKED}", self.name(chat));
        let turns = || find_assistant_spans(self, chat, &text, special_tokens);
        let mut assistant = match self.environment.get_template(&marked) {
            Ok(_) => {
                let marked = self.render_named(&marked, chat, chat.messages(), false)?;
                let spans = marked_spans(&text, &marked);
                spans.ok_or(
                    "its generation tags do not come in pairs, or it contains U+FDD0 or U+FDD1",
                )?
            }
            Err(_) => turns()?,
        };
        let masked = match chat.has_masked_turns() {
            true => take_masked(&mut assistant, chat, turns()?)?,
            false => Vec::new(),
        };
        Ok(Rendered {
            text,
            assistant,
            masked,
        })
    }

    /// What the template makes of `messages` in place of those of `chat`, perhaps with the header of the assistant's turn.
    pub(super) fn text(
        &self,
        chat: &Chat,
        messages: &[Value],
        add_generation_prompt: bool,
    ) -> std::result::Result<String, String> {
        self.render_named(self.name(chat), chat, messages, add_generation_prompt)
    }

    /// The text that a model continues with the assistant's answer to `chat`.
    ///
    /// # Errors
    /// The template refuses the conversation.
    pub fn generation_prompt(&self, chat: &Chat) -> Result<String> {
        let chat = self.with_contents_as_read(chat).chat;
        match self.text(&chat, chat.messages(), true) {
            Ok(text) => Ok(text),
            Err(err) => bail!("the conversation cannot be rendered: {err}"),
        }
    }

    fn name(&self, chat: &Chat) -> &'static str {
        match self.source.with_tools.is_some() && chat.tools().is_true() {
            true => WITH_TOOLS,
            false => DEFAULT,
        }
    }

    fn render_named(
        &self,
        name: &str,
        chat: &Chat,
        messages: &[Value],
        add_generation_prompt: bool,
    ) -> std::result::Result<String, String> {
        let tokens = self.special_tokens.iter();
        let tokens = tokens.map(|(name, token)| (name.as_str(), Value::from(token)));
        let documents = ("documents", Value::from(()));
        let kwargs = self.kwargs.iter().chain(chat.template_kwargs().iter());
        let all = [
            ("messages", Value::from(messages.to_vec())),
            ("tools", chat.tools()),
            ("add_generation_prompt", Value::from(add_generation_prompt)),
        ];
        // The last one of a name counts.
        let context = tokens.chain([documents]).chain(kwargs).chain(all);
        let context: BTreeMap<&str, Value> = context.collect();
        let rendered = self.environment.get_template(name);
        let rendered = rendered.and_then(|template| template.render(Value::from(context)));
        rendered.map_err(|err| format!("the chat template refuses it: {}", explain(&err)))
    }

    /// What decides what is rendered.
    pub(crate) fn identity(&self) -> String {
        let date = self.date().map(|date| date.to_string());
        let TemplateSource {
            default,
            with_tools,
            ..
        } = &self.source;
        let (special_tokens, kwargs) = (&self.special_tokens, self.kwargs.to_string());
        format!("{special_tokens:?} {default:?} {with_tools:?} {date:?} {kwargs}")
    }
}

/// The innermost reason, without the engine's words around it.
fn explain(err: &Error) -> String {
    if err.kind() == ErrorKind::OutOfFuel {
        return format!(
            "it takes more than {MAX_STEPS} steps, or writes more than {} GB",
            MAX_STEPS * 64 / 1_000_000_000
        );
    }
    let detail = err.detail().map_or_else(|| err.to_string(), str::to_string);
    match err.line() {
        Some(line) if err.kind() != ErrorKind::InvalidOperation => {
            format!("{detail} (line {line} of the template)")
        }
        _ => detail,
    }
}

/// As Python prints values; they differ in these three.
fn write_as_python(
    out: &mut minijinja::Output<'_>,
    state: &mut State<'_, '_>,
    value: &Value,
) -> std::result::Result<(), Error> {
    let text = match bool::try_from(value.clone()) {
        Ok(true) => "True",
        Ok(false) => "False",
        Err(_) if value.is_none() => "None",
        Err(_) => return minijinja::escape_formatter(out, state, value),
    };
    out.write_str(text).map_err(Error::from)
}

fn raise_exception(message: Rest<Value>) -> std::result::Result<Value, Error> {
    let message: Vec<String> = message.iter().map(ToString::to_string).collect();
    Err(Error::new(ErrorKind::InvalidOperation, message.join(" ")))
}

fn strftime(format: &str, date: Date) -> std::result::Result<String, Error> {
    let midnight = date.to_zoned(TimeZone::UTC);
    let text = midnight.and_then(|midnight| jiff::fmt::strtime::format(format, &midnight));
    text.map_err(|err| Error::new(ErrorKind::InvalidOperation, err.to_string()))
}
