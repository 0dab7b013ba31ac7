//! A conversation with a model: what its user types, and the messages that come of it.

mod command;
mod keyboard;

use std::ops::ControlFlow;

use candle_comm::ProcessGroup;
use candle_core::{Error, Result, bail};
use candle_parallel::gather;
use candle_train_run::{in_words, print_note};
use candle_trainer::{Chat, ChatTemplate};
use serde_json::{Value, json};

use crate::commands::writer::Writer;
use command::{COMMANDS, Input};
use keyboard::Keyboard;

/// The messages so far, the same on all ranks.
pub(crate) struct Conversation<'a> {
    template: &'a ChatTemplate,
    /// The system's message, with which it begins anew.
    system: Option<String>,
    messages: Vec<Value>,
}

impl<'a> Conversation<'a> {
    /// One that begins with the `system`'s message, if there is one.
    pub fn new(template: &'a ChatTemplate, system: Option<String>) -> Self {
        let mut conversation = Self {
            template,
            system,
            messages: Vec::new(),
        };
        conversation.begin();
        conversation
    }

    /// Answers `first`, if there is one, and then what the first rank's user types, until that ends. Every rank must call it.
    ///
    /// # Errors
    /// A template that refuses the messages, a model that cannot answer, and an input that ends before it says anything.
    pub fn hold(&mut self, first: Option<&str>, writer: &mut Writer<'_>) -> Result<()> {
        let is_first = writer.world().rank() == 0;
        let mut keyboard = is_first.then(Keyboard::open).transpose()?;
        if let Some(first) = first
            && let Some(refused) = self.answer(first, keyboard.as_ref(), writer)?
        {
            return Err(refused);
        }
        let mut has_said = first.is_some();
        loop {
            let Some(line) = read_line(writer.world(), keyboard.as_mut())? else {
                if !has_said {
                    bail!(
                        "--chat: stdin ended before a line that says something\nhint: ranks that candle-train launch starts have no stdin: \
                         without it --tp N runs them as threads; or give the first turn as --prompt"
                    );
                }
                return Ok(());
            };
            has_said = true;
            let tell = |text: &str| {
                if is_first {
                    print_note(text);
                }
            };
            match Input::of(&line) {
                Input::Says(text) => {
                    if let Some(refused) = self.answer(&text, keyboard.as_ref(), writer)? {
                        tell(&in_words(&refused));
                    }
                }
                Input::Clear => {
                    self.begin();
                    tell("the conversation begins anew");
                }
                Input::System(text) => {
                    self.system = Some(text).filter(|text| !text.is_empty());
                    self.begin();
                    tell(match self.system {
                        Some(_) => "the conversation begins anew, with this system's message",
                        None => "the conversation begins anew, without a system's message",
                    });
                }
                Input::Help => tell(COMMANDS),
                Input::Exit => return Ok(()),
                Input::Unknown(word) => tell(&format!(
                    "there is no command {word}: /help lists them, and //.. says /.. to the model"
                )),
            }
        }
    }

    /// Forgets what was said.
    fn begin(&mut self) {
        let system = self.system.iter();
        self.messages = system.map(|text| message("system", text)).collect();
    }

    /// Has the model answer `turn`, until Ctrl-C at the keyboard, if there is one. One with which the conversation is too long is left out: why.
    fn answer(
        &mut self,
        turn: &str,
        keyboard: Option<&Keyboard>,
        writer: &mut Writer<'_>,
    ) -> Result<Option<Error>> {
        self.messages.push(message("user", turn));
        let chat = Chat::from_json(&self.messages).map_err(Error::msg)?;
        let prompt = self.template.generation_prompt(&chat)?;
        let prompt = writer.model.tokenizer.encode(&prompt)?;
        if let Err(refused) = writer.model.limits_after(prompt.len()) {
            self.messages.pop();
            return Ok(Some(refused));
        }
        let world = writer.world().clone();
        // One from before is not meant for this answer.
        keyboard.map(Keyboard::is_interrupted);
        let answer = writer.write(&prompt, false, || {
            let is_over = keyboard.is_some_and(Keyboard::is_interrupted);
            let all: Vec<bool> = gather(&world, &is_over)?;
            Ok(match all.first() {
                Some(true) => ControlFlow::Break(()),
                _ => ControlFlow::Continue(()),
            })
        })?;
        self.messages.push(message("assistant", answer.trim()));
        Ok(None)
    }
}

fn message(role: &str, content: &str) -> Value {
    json!({"role": role, "content": content})
}

/// The next line that says something, for all ranks, of the keyboard that the first one has; `None` at its end.
fn read_line(world: &ProcessGroup, keyboard: Option<&mut Keyboard>) -> Result<Option<String>> {
    let line = match keyboard {
        Some(keyboard) => keyboard.line()?,
        None => None,
    };
    // A line that says something is not empty.
    let lines: Vec<String> = gather(world, &line.unwrap_or_default())?;
    let line = lines.into_iter().next();
    Ok(line.filter(|line| !line.is_empty()))
}
