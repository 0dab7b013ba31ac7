//! Runs of `candle-train launch` whose processes can be found and never outlive their test.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;

use crate::cli::program::{AssertText, hear_terminal};

/// What a test waits for happens within this time, also where other tests take all the cores.
const DEADLINE: Duration = Duration::from_secs(180);
pub const MARK: &str = "LAUNCH_TEST_MARK";

/// A launcher that was started in a folder of its own.
pub struct Launching {
    child: Child,
    folder: TempDir,
}

/// A launcher that ended.
pub struct Ended {
    pub code: Option<i32>,
    /// What it wrote to stdout and to stderr.
    pub out: Vec<u8>,
    pub err: String,
    folder: TempDir,
}

/// Starts `candle-train launch` with these arguments.
pub fn start(args: &[&str]) -> Launching {
    start_in(TempDir::new().unwrap(), args, &|_| {})
}

/// Starts `candle-train launch` with `num_ranks` ranks that run this shell script.
pub fn start_script(num_ranks: usize, options: &[&str], script: &str) -> Launching {
    let num_ranks = num_ranks.to_string();
    let first = ["--nproc-per-node", &num_ranks];
    start(&[&first, options, &["sh", "-c", script]].concat())
}

/// The same, until it ended.
pub fn run_script(num_ranks: usize, options: &[&str], script: &str) -> Ended {
    start_script(num_ranks, options, script).wait()
}

/// Runs it in this folder, after a change of the command.
pub fn start_in(folder: TempDir, args: &[&str], change: &dyn Fn(&mut Command)) -> Launching {
    let mut command = Command::new(env!("CARGO_BIN_EXE_candle-train"));
    command.arg("launch").args(args);
    spawn(folder, command, change)
}

/// Runs any command that becomes a launcher.
pub fn spawn(folder: TempDir, mut command: Command, change: &dyn Fn(&mut Command)) -> Launching {
    let file = |name: &str| File::create(folder.path().join(name)).unwrap();
    hear_terminal(&mut command)
        .current_dir(folder.path())
        .env(MARK, folder.path())
        .stdin(Stdio::piped())
        .stdout(file("stdout"))
        .stderr(file("stderr"));
    change(&mut command);
    Launching {
        child: command.spawn().unwrap(),
        folder,
    }
}

/// Waits for a condition.
pub fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !condition() {
        assert!(
            begin.elapsed() < DEADLINE,
            "{what}: not within {DEADLINE:?}"
        );
        std::thread::sleep(Duration::from_millis(10));
    }
}

impl Launching {
    pub fn pid(&self) -> Pid {
        Pid::from_raw(self.child.id() as i32)
    }

    /// A file in the folder where the ranks run.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Waits until the ranks made these files.
    pub fn await_files(&self, names: &[&str]) {
        for name in names {
            wait_until(name, || self.path(name).exists());
        }
    }

    /// Its stdin, which otherwise stays open as long as this value.
    pub fn take_stdin(&mut self) -> std::process::ChildStdin {
        self.child.stdin.take().unwrap()
    }

    pub fn signal(&self, signal: Signal) {
        kill(self.pid(), signal).unwrap();
    }

    /// Waits for its end; all its processes must be gone then.
    pub fn wait(mut self) -> Ended {
        let begin = Instant::now();
        while self.child.try_wait().unwrap().is_none() {
            if begin.elapsed() > DEADLINE {
                let err = std::fs::read_to_string(self.path("stderr"));
                panic!(
                    "no end after {DEADLINE:?} of {:#?}; stderr: {err:?}",
                    self.processes()
                );
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        let left = self.processes();
        let code = self.child.wait().unwrap().code();
        let read = |name| std::fs::read(self.path(name)).unwrap();
        let (out, err) = (
            read("stdout"),
            String::from_utf8_lossy(&read("stderr")).into_owned(),
        );
        assert!(left.is_empty(), "left behind: {left:?}; stderr: {err}");
        let folder = std::mem::replace(&mut self.folder, TempDir::new().unwrap());
        Ended {
            code,
            out,
            err,
            folder,
        }
    }

    /// [`Self::wait`], with this exit code.
    #[track_caller]
    pub fn exits(self, code: i32) -> Ended {
        self.wait().exited(code)
    }

    /// Waits until the launcher and all that it started are gone, which the launcher, killed, cannot promise at once.
    pub fn wait_until_nobody_left(&mut self) {
        self.child.wait().unwrap();
        wait_until("the end of all processes", || self.processes().is_empty());
    }

    /// The living processes of this run with the commands they run, wherever they moved to.
    pub fn processes(&self) -> Vec<(Pid, String)> {
        let mark = format!("{MARK}={}", self.folder.path().display());
        let mut found = Vec::new();
        for entry in std::fs::read_dir("/proc").unwrap().flatten() {
            let pid = entry
                .file_name()
                .to_str()
                .and_then(|name| name.parse().ok());
            let environ = std::fs::read(entry.path().join("environ")).unwrap_or_default();
            let is_ours = environ
                .split(|byte| *byte == 0)
                .any(|var| var == mark.as_bytes());
            if let Some(pid) = pid.filter(|_| is_ours) {
                let command = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
                let command = String::from_utf8_lossy(&command).replace('\0', " ");
                found.push((Pid::from_raw(pid), command));
            }
        }
        found
    }
}

impl Drop for Launching {
    fn drop(&mut self) {
        for (pid, _) in self.processes() {
            let _ = kill(pid, Signal::SIGKILL);
        }
        let _ = self.child.wait();
    }
}

impl Ended {
    /// It must have ended with this exit code.
    #[track_caller]
    pub fn exited(self, code: i32) -> Self {
        assert_eq!(self.code, Some(code), "{}", self.err);
        self
    }

    /// All of `parts` are on stderr.
    #[track_caller]
    pub fn says(&self, parts: &[&str]) {
        self.err.assert_has(parts);
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Stdout as text, its lines in order of their text: ranks write as they like.
    pub fn sorted_lines(&self) -> Vec<String> {
        let text = String::from_utf8(self.out.clone()).unwrap();
        let mut lines: Vec<String> = text.lines().map(String::from).collect();
        lines.sort();
        lines
    }

    /// The launcher's own last words.
    pub fn sentence(&self) -> &str {
        let start = self.err.rmatch_indices("candle-train: ").find(|(at, _)| {
            let before = &self.err[..*at];
            before.is_empty() || before.ends_with('\n')
        });
        match start {
            Some((at, _)) => &self.err[at..],
            None => panic!("no sentence in {:?}", self.err),
        }
    }
}

/// Writes an executable shell script.
pub fn write_script(path: &Path, text: &str) {
    use std::os::unix::fs::PermissionsExt;
    std::fs::write(path, format!("#!/bin/sh\n{text}\n")).unwrap();
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
}
