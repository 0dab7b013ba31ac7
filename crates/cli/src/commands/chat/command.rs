//! What a line of a conversation asks for.

/// What `/help` says.
pub(super) const COMMANDS: &str = "\
/clear        begin anew
/system TEXT  begin anew with this system's message; without a text, with none
/help         this list
/exit         end, as Ctrl-D does
//TEXT        say /TEXT to the model
Ctrl-C ends an answer while it is written; what is there stays part of the conversation";

/// What a line asks for.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Input {
    /// An answer to this.
    Says(String),
    Clear,
    /// Another system's message; none if it is empty.
    System(String),
    Help,
    Exit,
    /// The word is that of no command.
    Unknown(String),
}

impl Input {
    /// That of a line, which is a command if it begins with one slash.
    pub fn of(line: &str) -> Self {
        let line = line.trim();
        let Some(command) = line.strip_prefix('/') else {
            return Self::Says(line.to_string());
        };
        if command.starts_with('/') {
            return Self::Says(command.to_string());
        }
        let (word, rest) = command
            .split_once(char::is_whitespace)
            .unwrap_or((command, ""));
        match (word, rest.trim()) {
            ("clear", "") => Self::Clear,
            ("system", text) => Self::System(text.to_string()),
            ("help", "") => Self::Help,
            ("exit", "") => Self::Exit,
            // A command that takes no text has one: more likely it is meant for the model.
            ("clear" | "help" | "exit", _) => Self::Unknown(line.to_string()),
            _ => Self::Unknown(format!("/{word}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Input;

    #[test]
    fn one_slash_is_a_command() {
        let says = |text: &str| Input::Says(text.to_string());
        let unknown = |text: &str| Input::Unknown(text.to_string());
        let system = |text: &str| Input::System(text.to_string());
        for (line, expected) in [
            ("Who are you?", says("Who are you?")),
            ("and/or", says("and/or")),
            ("//etc/passwd is a file", says("/etc/passwd is a file")),
            ("//", says("/")),
            ("/clear", Input::Clear),
            (" /clear ", Input::Clear),
            ("/system Be brief. /help", system("Be brief. /help")),
            ("/system\tBe brief.", system("Be brief.")),
            ("/system", system("")),
            ("/systems", unknown("/systems")),
            ("/help", Input::Help),
            ("/help me", unknown("/help me")),
            ("/exit", Input::Exit),
            ("/quit now", unknown("/quit")),
            ("/", unknown("/")),
            ("/Clear", unknown("/Clear")),
        ] {
            assert_eq!(Input::of(line), expected, "{line:?}");
        }
    }
}
