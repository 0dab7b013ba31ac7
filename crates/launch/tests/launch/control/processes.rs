//! Ranks that are processes: this test program again, in the role of a rank.
//!
//! `rank_process` is what such a process runs; started as a test it does nothing.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use candle_launch::{Control, ControlConfig, RankGroup, WaitNotices};

use super::ranks::{config, free_listener, operation};

/// A rank that is a process.
pub struct Rank {
    pub child: Child,
    out: BufReader<ChildStdout>,
}

impl Rank {
    /// Starts a rank that meets the others at `master` and does `what`, started by the command `wrap` if that is one.
    pub fn start(wrap: &[&str], master: &str, rank: usize, world_size: usize, what: &str) -> Self {
        let program = std::env::current_exe().unwrap();
        let program = program.to_str().unwrap();
        let words: Vec<&str> = wrap.iter().copied().chain([program]).collect();
        let mut child = Command::new(words[0])
            .args(&words[1..])
            .args([
                "--exact",
                "launch::control::processes::rank_process",
                "--nocapture",
            ])
            .env(
                "CONTROL_TEST",
                format!("{master} {rank} {world_size} {what}"),
            )
            .env("RUST_BACKTRACE", "0")
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let out = BufReader::new(child.stdout.take().unwrap());
        Self { child, out }
    }

    /// Waits until the rank has printed a line with this word.
    pub fn wait_for(&mut self, word: &str) {
        let mut line = String::new();
        while !line.contains(word) {
            line.clear();
            assert!(
                self.out.read_line(&mut line).unwrap() > 0,
                "ended before {word}"
            );
        }
    }

    pub fn signal(&self, signal: nix::sys::signal::Signal) {
        let pid = nix::unistd::Pid::from_raw(self.child.id() as i32);
        nix::sys::signal::kill(pid, signal).unwrap();
    }

    /// Waits for the end; returns its exit code, the signal that ended it, and what it said on standard error.
    pub fn end(mut self) -> End {
        use std::os::unix::process::ExitStatusExt;
        let mut said = String::new();
        self.child
            .stderr
            .take()
            .unwrap()
            .read_to_string(&mut said)
            .unwrap();
        let status = self.child.wait().unwrap();
        let (code, signal) = (status.code(), status.signal());
        End { code, signal, said }
    }
}

/// How a rank ended.
#[derive(Debug)]
pub struct End {
    pub code: Option<i32>,
    pub signal: Option<i32>,
    pub said: String,
}

impl End {
    /// It ended because of another rank, and said all of `words`.
    #[track_caller]
    pub fn because_of_another(&self, words: &[&str]) {
        assert_eq!(self.code, Some(85), "{self:?}");
        self.said_once("stops: ");
        for word in words {
            assert!(self.said.contains(word), "{word} is not in {self:?}");
        }
    }

    #[track_caller]
    pub fn said_once(&self, words: &str) {
        assert_eq!(self.said.matches(words).count(), 1, "{words} in {self:?}");
    }
}

/// Starts ranks on this host, each doing what is said, and waits until all have met.
pub fn start(what: &[&str]) -> Vec<Rank> {
    let (listener, port) = free_listener();
    drop(listener);
    let master = format!("127.0.0.1:{port}");
    let start = |(rank, doing): (usize, &&str)| Rank::start(&[], &master, rank, what.len(), doing);
    let mut ranks: Vec<Rank> = what.iter().enumerate().map(start).collect();
    ranks.iter_mut().for_each(|rank| rank.wait_for("ready"));
    ranks
}

/// What a process of these tests does, if it is one.
#[test]
fn rank_process() {
    let Ok(role) = std::env::var("CONTROL_TEST") else {
        return;
    };
    let role: Vec<&str> = role.split(' ').collect();
    let (host, port) = role[0].rsplit_once(':').unwrap();
    let (rank, world_size) = (role[1].parse().unwrap(), role[2].parse().unwrap());
    let config = ControlConfig {
        master: (host.to_string(), port.parse().unwrap()),
        deadline: Duration::from_millis(role.get(4).map_or(20_000, |ms| ms.parse().unwrap())),
        rank_timeout: Duration::from_secs(role.get(5).map_or(6, |secs| secs.parse().unwrap())),
        ends_process: true,
        wait_notices: match role[3] {
            "patient" => WaitNotices {
                first: Duration::from_millis(100),
                interval: Duration::from_millis(100),
            },
            _ => WaitNotices::default(),
        },
        ..config(rank, world_size, 0)
    };
    let control = Control::join(&config).unwrap();
    control.set_step(3, "forward");
    control.gather("all here", &[]).unwrap();
    println!("ready");
    act(role[3], control);
}

fn act(what: &str, control: Arc<Control>) {
    if matches!(what, "fail" | "panic" | "end") {
        // Until the others are past the barrier too.
        std::thread::sleep(Duration::from_millis(300));
    }
    match what {
        "work" => {
            let mut gathers = (0..).map(|_| control.gather("work", &[]));
            let error = gathers.find_map(std::result::Result::err).unwrap();
            println!("error: {error}");
            park();
        }
        "hold" => {
            let group = Arc::new(RankGroup::world(3));
            let _ticket = control.begin(operation(&group, 41, "all_reduce(sum) of f32 [8]"));
            println!("holding");
            park();
        }
        "stuck" => park(),
        "fail" => {
            control.fail("the disk is full");
            std::process::exit(1);
        }
        "panic" => panic!("index out of range"),
        "end" => std::process::exit(0),
        "leave" | "patient" => control.leave().unwrap(),
        other => panic!("{other} is no role"),
    }
}

fn park() -> ! {
    loop {
        std::thread::park();
    }
}
