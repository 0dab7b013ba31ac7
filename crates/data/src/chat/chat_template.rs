//! A checkpoint's chat template: Jinja as transformers renders it.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::ops::Range;
use std::path::Path;
use std::thread;

use candle_core::{Result, bail};
use jiff::civil::Date;
use jiff::tz::TimeZone;
use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, Error, ErrorKind, Value};

use super::assistant_spans::find_assistant_spans;
use super::conversation::Chat;
use super::generation_marks::marked_spans;
use super::jinja_source::JinjaSource;
use super::loss_masks::take_masked;
use super::python_language::add_language;
use super::python_values::{MAX_TEXT, too_long};
use super::roles::compared_roles;
use super::template_kwargs::TemplateKwargs;
use super::template_source::TemplateSource;
use crate::record_error::RecordError;

/// Names in the environment. What a template is called tells the engine what to escape: nothing.
const DEFAULT: &str = "chat";
const WITH_TOOLS: &str = "chat with tools";
const MARKED: &str = " and marks";

/// Instructions that a template may take for a conversation, and more for each message; to read or write 64 bytes counts as one. A message takes
/// about a hundred, or as many as there are messages where a template looks at all others for each.
const MIN_STEPS: u64 = 20_000_000;
const STEPS_PER_MESSAGE: u64 = 10_000;
const MAX_STEPS: u64 = 50_000_000;

/// Bytes of stack for what the engine does by recursion, which limits of depth bound: reading a template and, where it can call itself, rendering.
const STACK: usize = 64 << 20;

/// A chat template. It knows the special tokens by their names, such as `bos_token`.
#[derive(Clone, Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    /// Whether it can call itself.
    recurses: bool,
    special_tokens: BTreeMap<String, String>,
    pub(super) source: TemplateSource,
    /// The names with which it compares roles.
    pub(super) compared_roles: BTreeSet<String>,
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

    pub(super) fn of_source(
        source: TemplateSource,
        special_tokens: BTreeMap<String, String>,
    ) -> Result<Self> {
        let path = &source.path;
        tracing::debug!("chat template: {}", path.display());
        let read =
            with_stack(|| environment_of(&source)).unwrap_or_else(|err| Err(err.to_string()));
        let (environment, recurses) = match read {
            Ok(read) => read,
            Err(err) => {
                bail!("the chat template of {path:?} is not one that can be rendered: {err}")
            }
        };
        let template = Self {
            environment,
            recurses,
            special_tokens,
            compared_roles: compared_roles(source.texts()),
            source,
            date: Date::ZERO,
            kwargs: TemplateKwargs::default(),
        };
        Ok(template.with_date(jiff::Zoned::now().date()))
    }

    /// The template itself, for conversations without tools.
    pub fn text_of_template(&self) -> &str {
        &self.source.default
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
        self.source.texts().any(|text| text.contains(name))
    }

    /// The text of the template for this conversation.
    pub(super) fn text_for(&self, chat: &Chat) -> &str {
        match (self.name(chat), &self.source.with_tools) {
            (WITH_TOOLS, Some(text)) => text,
            _ => self.text_of_template(),
        }
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
    /// The template refuses the conversation, or the turns cannot be told apart. That a template takes more steps or makes longer texts than any
    /// should is [`RecordError::Unsupported`].
    pub fn render(
        &self,
        chat: &Chat,
        special_tokens: &[String],
    ) -> std::result::Result<Rendered, RecordError> {
        self.render_as_read(&self.with_contents_as_read(chat).chat, special_tokens)
    }

    /// As [`Self::render`], of a conversation with its contents as the template reads them.
    pub(crate) fn render_as_read(
        &self,
        chat: &Chat,
        special_tokens: &[String],
    ) -> std::result::Result<Rendered, RecordError> {
        let text = self.render_named(self.name(chat), chat, chat.messages(), false)?;
        let marked = format!("{}{MARKED}", self.name(chat));
        let turns = || find_assistant_spans(self, chat, &text, special_tokens);
        let mut assistant = match self.environment.get_template(&marked) {
            Ok(_) => {
                let marked = self.render_named(&marked, chat, chat.messages(), false)?;
                let spans = marked_spans(&text, &marked);
                spans.ok_or_else(|| {
                    let reason =
                        "its generation tags do not come in pairs, or it contains U+FDD0 or U+FDD1";
                    reason.to_string()
                })?
            }
            Err(_) => turns()?,
        };
        let masks = || chat.assistant_turns().map(|turn| chat.masks[turn]);
        let masked = match masks().any(|mask| mask == Some(false)) {
            true => take_masked(&mut assistant, masks().zip(turns()?))?,
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
        let text = self.render_named(self.name(chat), chat, messages, add_generation_prompt);
        text.map_err(|err| err.to_string())
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
        if self.source.with_tools.is_some() && chat.tools().is_true() {
            WITH_TOOLS
        } else {
            DEFAULT
        }
    }

    fn render_named(
        &self,
        name: &str,
        chat: &Chat,
        messages: &[Value],
        add_generation_prompt: bool,
    ) -> std::result::Result<String, RecordError> {
        let tokens = self.special_tokens.iter();
        let tokens = tokens.map(|(name, token)| (name.as_str(), Value::from(token)));
        let documents = ("documents", Value::from(()));
        let kwargs = self.kwargs.iter().chain(chat.template_kwargs.iter());
        let all = [
            ("messages", Value::from(messages.to_vec())),
            ("tools", chat.tools()),
            ("add_generation_prompt", Value::from(add_generation_prompt)),
        ];
        // The last one of a name counts.
        let context = tokens.chain([documents]).chain(kwargs).chain(all);
        let context: BTreeMap<&str, Value> = context.collect();
        let num_messages = messages.len() as u64;
        let steps = MIN_STEPS.saturating_add(STEPS_PER_MESSAGE.saturating_mul(num_messages));
        let steps = steps.min(MAX_STEPS);
        let mut environment = self.environment.clone();
        environment.set_fuel(Some(steps));
        let render = || {
            let mut text = LimitedOutput::default();
            let template = environment.get_template(name);
            let rendered = template.and_then(|template| {
                let context = Value::from(context);
                template.render_captured_to(context, &mut text).map(drop)
            });
            rendered.map_err(|err| match (err.kind(), err.detail()) {
                (ErrorKind::WriteFailure, _) => RecordError::Unsupported(explain(&too_long())),
                (ErrorKind::OutOfFuel, None) => {
                    RecordError::Unsupported(format!("it takes more than {steps} steps"))
                }
                (ErrorKind::OutOfFuel, _) => RecordError::Unsupported(explain(&err)),
                _ => RecordError::Malformed(explain(&err)),
            })?;
            let text = String::from_utf8(text.0);
            text.map_err(|err| RecordError::Malformed(err.to_string()))
        };
        let rendered = if self.recurses {
            with_stack(render).unwrap_or_else(|err| Err(err.to_string().into()))
        } else {
            render()
        };
        rendered.map_err(|err| err.of("the chat template refuses it:"))
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

/// The engine with these templates, and whether one can call itself.
fn environment_of(
    source: &TemplateSource,
) -> std::result::Result<(Environment<'static>, bool), String> {
    let fail = |err: Error| explain(&err);
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder()
        .trim_blocks(true)
        .lstrip_blocks(true)
        .build();
    environment.set_syntax(syntax.map_err(fail)?);
    add_language(&mut environment);
    let mut recurses = false;
    let with_tools = source.with_tools.as_ref().map(|text| (WITH_TOOLS, text));
    for (name, text) in [(DEFAULT, &source.default)].into_iter().chain(with_tools) {
        let source = JinjaSource::new(text)?;
        recurses |= source.recurses;
        let marked = source
            .marked
            .map(|marked| (format!("{name}{MARKED}"), marked));
        for (name, text) in [(name.to_string(), source.text)].into_iter().chain(marked) {
            environment.add_template_owned(name, text).map_err(fail)?;
        }
    }
    Ok((environment, recurses))
}

/// Does it with a stack of [`STACK`] bytes, whatever thread this is.
fn with_stack<T: Send>(work: impl FnOnce() -> T + Send) -> io::Result<T> {
    thread::scope(|scope| {
        let builder = thread::Builder::new().name("chat template".into());
        let thread = builder.stack_size(STACK).spawn_scoped(scope, work)?;
        Ok(thread
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    })
}

/// A rendered text of at most [`MAX_TEXT`] bytes.
#[derive(Default)]
struct LimitedOutput(Vec<u8>);

impl io::Write for LimitedOutput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > MAX_TEXT {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The innermost reason, without the engine's words around it.
fn explain(err: &Error) -> String {
    let detail = err.detail().map_or_else(|| err.to_string(), str::to_string);
    match err.line() {
        Some(line) if err.kind() != ErrorKind::InvalidOperation => {
            format!("{detail} (line {line} of the template)")
        }
        _ => detail,
    }
}

fn strftime(format: &str, date: Date) -> std::result::Result<String, Error> {
    let midnight = date.to_zoned(TimeZone::UTC);
    let text = midnight.and_then(|midnight| jiff::fmt::strtime::format(format, &midnight));
    text.map_err(|err| Error::new(ErrorKind::InvalidOperation, err.to_string()))
}
