//! `candle-train generate --chat`: commands, several ranks, and a terminal with its keys.

use std::fs;
use std::fs::File;
use std::io::{Read, Write};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::sleep;
use std::time::{Duration, Instant};

use nix::pty::openpty;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::program::{Outcome, Program, hear_terminal};
use super::workspace::{Workspace, candle_train};

/// A model whose template is seen in the prompt.
fn workspace() -> Workspace {
    let workspace = Workspace::new();
    let template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>";
    fs::write(workspace.model("chat_template.jinja"), template).unwrap();
    workspace
}

fn generate(workspace: &Workspace) -> Program {
    candle_train("generate")
        .flag("--model", workspace.path("model").display())
        .flag("--max-new-tokens", 8)
}

/// A conversation of these lines.
fn chat(workspace: &Workspace, lines: &str, tp: usize) -> Outcome {
    let typed = format!("printf '%s' '{lines}' | \"$0\" \"$@\"");
    let shell = ["sh", "-c", &typed].map(String::from);
    let program = generate(workspace).under(shell.into());
    program.switch("--chat").flag("--tp", tp).succeeds()
}

/// What the model writes after a prompt.
fn after(workspace: &Workspace, prompt: &str) -> String {
    let text = generate(workspace).flag("--prompt", prompt).succeeds();
    text.stdout.strip_prefix(prompt).unwrap().to_string()
}

#[test]
fn commands_are_obeyed_on_all_ranks_and_slashes_said() {
    let workspace = workspace();
    let lines = "/help\n//slash\n/clear\n\nWho are you?\n/system Be brief.\nWho are you?\n/system\n/forget it\nWho are you?\n";
    let first = after(&workspace, "<user>/slash<assistant>");
    let second = after(&workspace, "<user>Who are you?<assistant>");
    let third = after(&workspace, "<system>Be brief.<user>Who are you?<assistant>");
    for tp in [1, 2] {
        let outcome = chat(&workspace, lines, tp);
        assert_eq!(outcome.stdout, format!("{first}{second}{third}{second}"));
        for part in [
            "/system TEXT  begin anew with this",
            "the conversation begins anew\n",
            "begins anew, with this system's message\n",
            "begins anew, without a system's message\n",
            "there is no command /forget: /help lists them",
        ] {
            let said = outcome.stderr.matches(part).count();
            assert_eq!(said, 1, "{part:?} in {}", outcome.stderr);
        }
    }
}

#[test]
fn a_conversation_remembers_and_ends() {
    let workspace = workspace();
    let answer = after(&workspace, "<user>One.<assistant>");
    let remembered = format!(
        "<user>One.<assistant>{}<user>Two.<assistant>",
        answer.trim()
    );
    let both = chat(&workspace, "One.\nTwo.\n/exit\nThree.\n", 1).stdout;
    assert_eq!(both, format!("{answer}{}", after(&workspace, &remembered)));
    assert_eq!(chat(&workspace, "/exit\nOne.\n", 2).stdout, "");
    // Without the end of its line.
    assert_eq!(chat(&workspace, "One.", 1).stdout, answer);
}

#[test]
fn at_the_models_positions_a_conversation_goes_on() {
    let workspace = workspace();
    workspace.edit_config(|config| config["max_position_embeddings"] = 48.into());
    let turn = "Two and three. ".repeat(20);
    let typed = format!("printf '%s' 'One.\n{turn}\n/clear\nOne.\n' | \"$0\" \"$@\"");
    let shell = ["sh", "-c", &typed].map(String::from);
    let program = generate(&workspace).flag("--max-new-tokens", 1000);
    let program = program.switch("--chat");
    for tp in [1, 2] {
        let program = program.clone().under(shell.to_vec()).flag("--tp", tp);
        let outcome = program.succeeds();
        let (first, second) = outcome.stdout.split_at(outcome.stdout.len() / 2);
        assert!(first.len() > 10 && first == second, "{}", outcome.stdout);
        for (part, count) in [
            ("the text has reached the model's 48 positions", 2),
            ("the conversation has ", 1),
            ("hint: /clear begins anew", 3),
        ] {
            let said = outcome.stderr.matches(part).count();
            assert_eq!(said, count, "{part:?} in {}", outcome.stderr);
        }
    }
    program
        .flag("--prompt", &turn)
        .fails(&["the conversation has ", "takes 48 at most"]);
}

/// A program at a terminal.
struct Terminal {
    child: Child,
    keys: File,
    shown: Arc<Mutex<String>>,
}

impl Terminal {
    fn start(workspace: &Workspace) -> Self {
        let pty = openpty(None, None).unwrap();
        let (keys, side) = (File::from(pty.master), File::from(pty.slave));
        let mut command = Command::new(env!("CARGO_BIN_EXE_candle-train"));
        let side = || Stdio::from(side.try_clone().unwrap());
        let command = hear_terminal(&mut command)
            .args([
                "generate",
                "--chat",
                "--max-new-tokens",
                "1000000",
                "--model",
            ])
            .arg(workspace.path("model"))
            .env("TERM", "xterm")
            .stdin(side())
            .stdout(side())
            .stderr(side());
        let child = command.spawn().unwrap();
        let shown = Arc::new(Mutex::new(String::new()));
        let (mut screen, all) = (keys.try_clone().unwrap(), shown.clone());
        std::thread::spawn(move || {
            let mut part = [0; 4096];
            // It fails when the program has ended.
            while let Ok(len @ 1..) = screen.read(&mut part) {
                let text = String::from_utf8_lossy(&part[..len]).into_owned();
                all.lock().unwrap().push_str(&text);
            }
        });
        Self { child, keys, shown }
    }

    fn press(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).unwrap();
    }

    /// Waits until this is shown `count` times.
    #[track_caller]
    fn shows(&self, part: &str, count: usize) {
        let start = Instant::now();
        loop {
            let shown = self.shown.lock().unwrap().clone();
            if shown.matches(part).count() >= count {
                return;
            }
            let is_late = start.elapsed() > Duration::from_secs(60);
            assert!(!is_late, "{part:?} is not shown {count} times: {shown}");
            sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn at_a_terminal_lines_are_edited_and_an_answer_is_ended() {
    let workspace = workspace();
    let mut terminal = Terminal::start(&workspace);
    terminal.shows("/help lists commands, Ctrl-D ends the conversation", 1);
    terminal.shows("> ", 1);
    terminal.press("\x03");
    terminal.shows("/exit or Ctrl-D ends the conversation", 1);
    // A letter is taken back.
    terminal.press("/hexl");
    terminal.press("\x7f\x7flp\r");
    terminal.shows("/clear        begin anew", 1);
    // The line before comes again.
    terminal.press("\x1b[A\r");
    terminal.shows("/clear        begin anew", 2);
    terminal.press("Who are you?\r");
    // It would write for hours.
    terminal.shows("Who are you?", 1);
    let before = terminal.shown.lock().unwrap().len();
    let pid = Pid::from_raw(terminal.child.id() as i32);
    while terminal.shown.lock().unwrap().len() < before + 100 {
        assert!(terminal.child.try_wait().unwrap().is_none());
        sleep(Duration::from_millis(5));
    }
    kill(pid, Signal::SIGINT).unwrap();
    sleep(Duration::from_millis(100));
    terminal.press("/nothing\r");
    terminal.shows("there is no command /nothing", 1);
    terminal.press("\x04");
    let start = Instant::now();
    let status = loop {
        if let Some(status) = terminal.child.try_wait().unwrap() {
            break status;
        }
        assert!(start.elapsed() < Duration::from_secs(60));
        sleep(Duration::from_millis(5));
    };
    assert!(status.success(), "{status}");
}
