//! Launchers that wait for each other and say so: this test program again, as a launcher.

use std::io::{BufRead, BufReader, Lines};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::process::{Child, ChildStderr, Command, Stdio};
use std::time::{Duration, Instant};

use candle_launch::WaitNotices;
use candle_launch::launcher::{LaunchConfig, launch};
use nix::sys::signal::{Signal, kill};
use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, SockaddrIn, bind, listen, socket,
};
use nix::unistd::Pid;

/// What a process of these tests does, if it is one.
#[test]
fn launcher_process() {
    let Ok(rdzv) = std::env::var("WAITING_TEST") else {
        return;
    };
    let notice = Duration::from_millis(100);
    launch(&LaunchConfig {
        nproc_per_node: Some(1),
        nnodes: Some(
            std::env::var("WAITING_TEST_NNODES")
                .unwrap()
                .parse()
                .unwrap(),
        ),
        rdzv: Some(rdzv.parse().unwrap()),
        hostfile: None,
        ssh: None,
        mpirun: None,
        env: Vec::new(),
        log_dir: None,
        may_lose: 0,
        max_restarts: 0,
        grace_secs: None,
        silence_secs: Some(3.0),
        wait_notices: WaitNotices {
            first: notice,
            interval: notice,
        },
        short_secret: false,
        dry_run: false,
        program: vec!["true".into()],
    });
}

/// A launcher that is a process, until it is dropped.
struct Launcher {
    child: Child,
    said: Lines<BufReader<ChildStderr>>,
}

impl Launcher {
    /// One on the host of this name, of `nnodes`, that is told to meet the others there.
    fn start(host: &str, nnodes: usize, rdzv: &str) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "launch::waiting::launcher_process",
                "--nocapture",
            ])
            .env("WAITING_TEST", rdzv)
            .env("WAITING_TEST_NNODES", nnodes.to_string())
            .env("CANDLE_TRAIN_RUN_TOKEN", "a secret of some length")
            .env("CANDLE_TRAIN_HOST", host)
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let said = BufReader::new(child.stderr.take().unwrap()).lines();
        Self { child, said }
    }

    /// Waits until it has said a line with these words, which comes before these seconds are over.
    #[track_caller]
    fn says(&mut self, words: &str, limit_secs: u64) {
        let begin = Instant::now();
        let mut said = self.said.by_ref().map_while(Result::ok);
        assert!(said.any(|line| line.contains(words)), "{words}");
        let time = begin.elapsed();
        assert!(time < Duration::from_secs(limit_secs), "{words}: {time:?}");
    }
}

impl Drop for Launcher {
    fn drop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

/// An address of this host where nobody listens.
fn free_address() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().to_string()
}

#[test]
fn a_launcher_that_leads_says_how_many_hosts_are_missing_and_where_it_waits() {
    let rdzv = free_address();
    let said = format!(
        "candle-train: the launcher that leads waits at {rdzv} for 1 more of at least 2 hosts; there: a, for "
    );
    Launcher::start("a", 2, &rdzv).says(&said, 10);
}

#[test]
fn a_launcher_that_finds_nobody_who_leads_says_where_it_looks() {
    // An address of nobody, RFC 5737.
    let rdzv = "192.0.2.1:29500";
    let said =
        format!("candle-train: this host waits for the launcher that leads this run at {rdzv}");
    Launcher::start("a", 2, rdzv).says(&said, 10);
}

#[test]
fn a_host_whose_leading_launcher_is_stopped_says_so() {
    let rdzv = free_address();
    let mut leads = Launcher::start("a", 3, &rdzv);
    leads.says("for 2 more of at least 3 hosts", 10);
    let mut waits = Launcher::start("b", 3, &rdzv);
    waits.says(
        &format!("until the launcher at {rdzv}, which leads this run, needs it"),
        10,
    );
    let pid = Pid::from_raw(leads.child.id() as i32);
    kill(pid, Signal::SIGSTOP).unwrap();
    // After 3 s without a word; its kernel accepts connections still.
    waits.says(
        &format!("for the launcher that leads this run at {rdzv} ("),
        20,
    );
    kill(pid, Signal::SIGCONT).unwrap();
    waits.says(
        &format!("until the launcher at {rdzv}, which leads this run, needs it"),
        20,
    );
}

/// What a firewall does, or a kernel whose queue of connections is full.
#[test]
fn a_connection_that_nobody_answers_is_given_up() {
    let socket = socket(
        AddressFamily::Inet,
        SockType::Stream,
        SockFlag::empty(),
        None,
    )
    .unwrap();
    bind(socket.as_raw_fd(), &SockaddrIn::new(127, 0, 0, 1, 0)).unwrap();
    listen(&socket, Backlog::new(0).unwrap()).unwrap();
    let listener = TcpListener::from(socket);
    let address = listener.local_addr().unwrap();
    let connect = |_| TcpStream::connect_timeout(&address, Duration::from_millis(200)).ok();
    let in_queue: Vec<_> = (0..4).map(connect).collect();
    assert!(in_queue.iter().any(Option::is_none), "the queue has no end");
    let rdzv = address.to_string();
    Launcher::start("a", 2, &rdzv).says("is taken, and not by a launcher of this run: ", 15);
}
