//! A program as a child process, with a time limit.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::sleep;
use std::time::{Duration, Instant};

use nix::sys::signal::{SigHandler, Signal, signal};

/// No run here takes more than a few seconds; one that takes this long hangs.
const TIME_LIMIT: Duration = Duration::from_secs(60);

/// A program and its flags.
#[derive(Clone)]
pub struct Program {
    /// The words before the binary's name: a launcher and its flags.
    launcher: Vec<String>,
    binary: PathBuf,
    subcommand: Option<&'static str>,
    /// Between subcommand and flags.
    arguments: Vec<String>,
    /// Value of each flag; `None` for a switch.
    flags: BTreeMap<String, Option<String>>,
    variables: Vec<(String, String)>,
    limits_files: bool,
    has_reader: bool,
}

/// A command's process hears SIGINT, SIGQUIT and SIGHUP, also if the tests do not: a shell lets what it runs in the background ignore the first two,
/// `nohup` the last, and that passes to every process started from there.
#[allow(unsafe_code)]
pub fn hear_terminal(command: &mut Command) -> &mut Command {
    let hear = || {
        for heard in [Signal::SIGINT, Signal::SIGQUIT, Signal::SIGHUP] {
            // SAFETY: no handler is set, and none is there that could be replaced in a process of one thread that starts a program.
            unsafe { signal(heard, SigHandler::SigDfl) }?;
        }
        Ok(())
    };
    // SAFETY: what is called there are system calls, which may be made between fork and exec.
    unsafe { command.pre_exec(hear) }
}

/// How a run ended.
pub struct Outcome {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Program {
    pub fn new(binary: PathBuf, subcommand: Option<&'static str>) -> Self {
        Self {
            launcher: Vec::new(),
            binary,
            subcommand,
            arguments: Vec::new(),
            flags: BTreeMap::new(),
            variables: Vec::new(),
            limits_files: false,
            has_reader: true,
        }
    }

    /// Sets a flag, in place of an earlier value.
    pub fn flag(mut self, name: &str, value: impl ToString) -> Self {
        self.flags.insert(name.to_string(), Some(value.to_string()));
        self
    }

    /// Sets each of these flags.
    pub fn flags<V: Display>(self, flags: &[(&str, V)]) -> Self {
        let flags = flags.iter();
        flags.fold(self, |program, (flag, value)| program.flag(flag, value))
    }

    /// Adds a word that is no flag.
    pub fn argument(mut self, word: impl ToString) -> Self {
        self.arguments.push(word.to_string());
        self
    }

    pub fn switch(mut self, name: &str) -> Self {
        self.flags.insert(name.to_string(), None);
        self
    }

    /// Leaves a flag at its default.
    pub fn without(mut self, name: &str) -> Self {
        self.flags.remove(name);
        self
    }

    pub fn variable(mut self, name: &str, value: impl ToString) -> Self {
        self.variables.push((name.to_string(), value.to_string()));
        self
    }

    /// The system refuses to let a file of the program grow beyond 64 KiB, as it would on a full disk.
    pub fn with_limited_files(mut self) -> Self {
        self.limits_files = true;
        self
    }

    /// Nobody reads what the program prints: its end of the pipe is closed.
    pub fn without_reader(mut self) -> Self {
        self.has_reader = false;
        self
    }

    /// Whether it trains.
    pub fn trains(&self) -> bool {
        matches!(self.subcommand, Some("finetune" | "pretrain"))
    }

    /// Starts the program by a launcher.
    pub fn under(mut self, launcher: Vec<String>) -> Self {
        self.launcher = launcher;
        self
    }

    /// The command line, without a launcher.
    #[cfg(feature = "mpi")]
    pub fn words(&self) -> Vec<String> {
        let binary = std::iter::once(self.binary.display().to_string());
        binary.chain(self.arguments()).collect()
    }

    #[track_caller]
    pub fn run(&self) -> Outcome {
        self.run_and(|_| ())
    }

    /// Runs the program and shows `watch` what it has said on stderr, again and again until it ends.
    #[track_caller]
    pub fn run_and(&self, mut watch: impl FnMut(&str)) -> Outcome {
        self.run_and_pid(|said, _| watch(said))
    }

    /// As [`Self::run_and`]; `watch` is also told the number of the process.
    #[track_caller]
    pub fn run_and_pid(&self, mut watch: impl FnMut(&str, u32)) -> Outcome {
        let mut child = self.command().spawn().unwrap();
        let pid = child.id();
        let watch = |said: &str| watch(said, pid);
        let stdout = child.stdout.take().filter(|_| self.has_reader);
        let stdout = stdout.map(|pipe| read_all(pipe, Said::default()));
        let said = Said::default();
        let stderr = read_all(child.stderr.take().unwrap(), said.clone());
        let code = wait(&mut child, &said, watch);
        let outcome = Outcome {
            code: code.flatten(),
            stdout: stdout.map_or(String::new(), |reader| reader.join().unwrap()),
            stderr: without_activities(&stderr.join().unwrap()),
        };
        assert!(
            code.is_some(),
            "{:?} was still running after {TIME_LIMIT:?}\n{}",
            self.flags,
            outcome.stderr
        );
        outcome
    }

    /// Runs the program, which must succeed.
    #[track_caller]
    pub fn succeeds(&self) -> Outcome {
        let outcome = self.succeeds_with_warnings();
        assert!(!outcome.stderr.contains("error"), "{}", outcome.stderr);
        outcome
    }

    /// As [`Self::succeeds`]; what it says on stderr may be about errors in the data.
    #[track_caller]
    pub fn succeeds_with_warnings(&self) -> Outcome {
        let outcome = self.run();
        assert_eq!(
            outcome.code,
            Some(0),
            "{:?}\n{}",
            self.flags,
            outcome.stderr
        );
        outcome
    }

    /// Runs the program, which must fail as [`Outcome::assert_error`] says.
    #[track_caller]
    pub fn fails(&self, parts: &[&str]) -> Outcome {
        let outcome = self.run();
        outcome.assert_error(parts);
        outcome
    }

    /// Runs the program and kills it after `time`; whether it was still running then.
    pub fn is_killed_after(&self, time: Duration) -> bool {
        let mut child = self.command();
        let child = child.stdout(Stdio::null()).stderr(Stdio::null());
        let mut child = child.spawn().unwrap();
        let start = Instant::now();
        while start.elapsed() < time {
            if let Some(status) = child.try_wait().unwrap() {
                assert!(status.success(), "{:?}: {status}", self.flags);
                return false;
            }
            sleep(Duration::from_millis(1));
        }
        child.kill().unwrap();
        child.wait().unwrap();
        true
    }

    fn arguments(&self) -> Vec<String> {
        let flags = self.flags.iter();
        let flags = flags.flat_map(|(name, value)| [Some(name.clone()), value.clone()]);
        let subcommand = self.subcommand.map(str::to_string);
        let arguments = subcommand.into_iter().chain(self.arguments.clone());
        arguments.chain(flags.flatten()).collect()
    }

    fn command(&self) -> Command {
        let mut command = if self.limits_files {
            let mut shell = Command::new("sh");
            // In units of 512 bytes. A signal that is ignored stays ignored: the write fails instead.
            shell.args(["-c", "ulimit -f 128; exec \"$0\" \"$@\""]);
            shell.arg(&self.binary);
            shell
        } else if let Some((launcher, flags)) = self.launcher.split_first() {
            let mut command = Command::new(launcher);
            command.args(flags).arg(&self.binary);
            command
        } else {
            Command::new(&self.binary)
        };
        command.args(self.arguments());
        for name in ["RUST_LIB_BACKTRACE", "HF_TOKEN"] {
            command.env_remove(name);
        }
        command.env("HF_HUB_OFFLINE", "1");
        command.env("CANDLE_TRAIN_CACHE", "");
        // The error is one sentence all the same.
        command.env("RUST_BACKTRACE", "1");
        command.envs(self.variables.iter().map(|(name, value)| (name, value)));
        hear_terminal(&mut command)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }
}

/// Assertions about a text, which show it where they fail.
pub trait AssertText {
    /// All of `parts` are in the text.
    #[track_caller]
    fn assert_has(&self, parts: &[&str]);

    #[track_caller]
    fn assert_begins(&self, beginning: &str);
}

impl AssertText for str {
    fn assert_has(&self, parts: &[&str]) {
        for part in parts {
            assert!(self.contains(part), "{part:?} is not in: {self}");
        }
    }

    fn assert_begins(&self, beginning: &str) {
        assert!(
            self.starts_with(beginning),
            "{beginning:?} does not begin: {self}"
        );
    }
}

impl Outcome {
    /// The program must have ended with this exit code.
    #[track_caller]
    pub fn exited(self, code: i32) -> Self {
        assert_eq!(self.code, Some(code), "{}", self.stderr);
        self
    }

    /// All of `parts` are on stdout.
    #[track_caller]
    pub fn prints(&self, parts: &[&str]) {
        self.stdout.assert_has(parts);
    }

    /// All of `parts` are on stderr.
    #[track_caller]
    pub fn says(&self, parts: &[&str]) {
        self.stderr.assert_has(parts);
    }

    /// The program must have said, as its last word, one error that mentions all of `parts`, and perhaps a hint.
    #[track_caller]
    pub fn assert_error(&self, parts: &[&str]) {
        let stderr = &self.stderr;
        assert!(
            !matches!(self.code, None | Some(0)),
            "expected an error about {parts:?}, got exit code {:?}\n{stderr}",
            self.code
        );
        let lines: Vec<&str> = stderr.lines().collect();
        let error = lines.iter().position(|line| line.starts_with("error:"));
        let error = error.unwrap_or_else(|| panic!("no line begins with `error:`\n{stderr}"));
        for line in &lines[..error] {
            assert!(is_progress(line), "{line:?} before the error\n{stderr}");
        }
        for line in &lines[error + 1..] {
            assert!(is_advice(line), "{line:?} after the error\n{stderr}");
        }
        stderr.assert_has(parts);
        assert!(!self.stdout.contains("saved to"), "{}", self.stdout);
    }
}

/// Without the lines about what takes over a second on a slow machine, such as `loading weights: 3.2 MB, 1 s`.
fn without_activities(stderr: &str) -> String {
    let is_activity = |line: &str| {
        let secs = line.trim_end().strip_suffix(" s");
        let secs = secs.and_then(|line| line.rsplit(' ').next());
        let doing = line.split([' ', ':']).next().unwrap_or_default();
        let is_doing = doing.ends_with("ing") && doing != "warning";
        is_doing && secs.is_some_and(|secs| secs.parse::<u64>().is_ok())
    };
    let lines = stderr.split_inclusive('\n');
    lines.filter(|line| !is_activity(line)).collect()
}

fn is_progress(line: &str) -> bool {
    let is_step = line.starts_with("step ") && line.contains(" loss ");
    // A build with CUDA tells the device that it chose.
    is_step || line.starts_with("device: ")
}

/// Our own hints, what holds the memory of a GPU, and what the parser of the flags adds.
fn is_advice(line: &str) -> bool {
    let line = line.trim_start();
    let beginnings = [
        "hint: ",
        "tip: ",
        "this rank: ",
        "Usage: ",
        "For more information, try ",
    ];
    line.is_empty()
        || line.starts_with('[')
        || line.ends_with(" in tensors of this process")
        || beginnings.iter().any(|b| line.starts_with(b))
}

/// What has been read so far.
type Said = Arc<Mutex<String>>;

fn read_all(mut pipe: impl Read + Send + 'static, said: Said) -> std::thread::JoinHandle<String> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        let mut part = [0; 4096];
        loop {
            let len = pipe.read(&mut part).unwrap();
            bytes.extend_from_slice(&part[..len]);
            let all = String::from_utf8_lossy(&bytes).into_owned();
            if len == 0 {
                return all;
            }
            *said.lock().unwrap() = all;
        }
    })
}

/// The exit code, once there is one; `None` if the time ran out and the program was ended.
fn wait(child: &mut Child, said: &Said, mut watch: impl FnMut(&str)) -> Option<Option<i32>> {
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return Some(status.code());
        }
        if start.elapsed() > TIME_LIMIT {
            child.kill().unwrap();
            child.wait().unwrap();
            return None;
        }
        let so_far = said.lock().unwrap().clone();
        watch(&so_far);
        sleep(Duration::from_millis(5));
    }
}
