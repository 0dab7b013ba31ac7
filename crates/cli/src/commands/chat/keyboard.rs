//! Where the lines of a conversation come from: a terminal, where they can be edited, or any other stdin.

use std::io::{BufRead, ErrorKind, IsTerminal, Write, stderr};

use candle_core::{Error, Result};
use candle_launch::Interrupts;
use candle_train_run::print_note;
use rustyline::error::ReadlineError;
use rustyline::{Config, DefaultEditor};

const PROMPT: &str = "> ";
/// What is said before the first prompt of a terminal.
const WELCOME: &str = "/help lists commands, Ctrl-D ends the conversation";

/// The input of the first rank.
pub(super) enum Keyboard {
    /// A terminal, with Ctrl-C during an answer.
    Terminal(Box<DefaultEditor>, Interrupts),
    /// Lines as they are; a terminal without editing where stdout is none.
    Plain,
}

impl Keyboard {
    /// That of this process; on a terminal it says how to end.
    ///
    /// # Errors
    /// A terminal that does not let its lines be edited.
    pub fn open() -> Result<Self> {
        let is_typed = std::io::stdin().is_terminal();
        if is_typed {
            print_note(WELCOME);
        }
        if !is_typed || !std::io::stdout().is_terminal() {
            return Ok(Self::Plain);
        }
        let config = Config::builder().auto_add_history(true).build();
        let editor = DefaultEditor::with_config(config).map_err(|err| cannot_read(&err))?;
        Ok(Self::Terminal(Box::new(editor), Interrupts::hear()))
    }

    /// The next line that says something, without the space around it; `None` at the end, which of a terminal is `/exit`.
    pub fn line(&mut self) -> Result<Option<String>> {
        loop {
            let line = match self {
                Self::Terminal(editor, _) => match editor.readline(PROMPT) {
                    Ok(line) => line,
                    Err(ReadlineError::Eof) => return Ok(Some("/exit".to_string())),
                    Err(ReadlineError::Interrupted) => {
                        print_note("/exit or Ctrl-D ends the conversation");
                        continue;
                    }
                    Err(ReadlineError::Io(err)) if err.kind() == ErrorKind::InvalidData => {
                        print_note("that line is no text in UTF-8, and is left out");
                        continue;
                    }
                    Err(err) => return Err(cannot_read(&err)),
                },
                Self::Plain => {
                    let is_typed = std::io::stdin().is_terminal();
                    if is_typed {
                        let _ = write!(stderr(), "{PROMPT}");
                    }
                    let mut line = Vec::new();
                    if std::io::stdin().lock().read_until(b'\n', &mut line)? == 0 {
                        return Ok(is_typed.then(|| "/exit".to_string()));
                    }
                    String::from_utf8_lossy(&line).into_owned()
                }
            };
            let line = line.trim();
            if !line.is_empty() {
                return Ok(Some(line.to_string()));
            }
        }
    }

    /// Whether Ctrl-C was pressed since the last call.
    pub fn is_interrupted(&self) -> bool {
        match self {
            Self::Terminal(_, interrupts) => interrupts.take(),
            Self::Plain => false,
        }
    }
}

fn cannot_read(err: &ReadlineError) -> Error {
    Error::msg(format!("--chat: cannot read from the terminal: {err}"))
}
