//! A hub on loopback, with just what a client of model files needs, and faults.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

/// One file's content.
type Files = BTreeMap<String, Vec<u8>>;

/// What the server holds and how it misbehaves.
#[derive(Default)]
pub struct State {
    /// Files of each repository and revision, with the revision's commit: `(repo, revision) -> (commit, files)`.
    pub revisions: BTreeMap<(String, String), (String, Files)>,
    /// Without this token every request gets this status.
    pub gate: Option<(String, u16)>,
    /// The body of this file ends after so many bytes of each answer, the length header notwithstanding.
    pub cut: Option<(String, usize)>,
    /// Answers with the whole file whatever range is asked for, after the first byte.
    pub ignores_ranges: bool,
    /// Sends clients to another address for the weights, as the hub does.
    pub redirects: bool,
    /// Every request so far: method, path and range.
    pub log: Vec<String>,
}

/// A running server; it stops when dropped.
pub struct HubServer {
    pub state: Arc<Mutex<State>>,
    port: u16,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl HubServer {
    pub fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let (state, stop) = (
            Arc::new(Mutex::new(State::default())),
            Arc::new(AtomicBool::new(false)),
        );
        let (shared, stopped) = (state.clone(), stop.clone());
        let thread = std::thread::spawn(move || {
            for stream in listener.incoming() {
                if stopped.load(Ordering::SeqCst) {
                    return;
                }
                // A client may hang up early: the faults of this server make it.
                let _ = answer(stream.unwrap(), &mut shared.lock().unwrap());
            }
        });
        Self {
            state,
            port,
            stop,
            thread: Some(thread),
        }
    }

    pub fn endpoint(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// Publishes `files` as `commit`, which `revision` names from now on.
    pub fn publish(&self, repo: &str, revision: &str, commit: &str, files: &[(&str, &[u8])]) {
        let files: Files = files
            .iter()
            .map(|(name, bytes)| (name.to_string(), bytes.to_vec()))
            .collect();
        let mut state = self.state.lock().unwrap();
        for name in [revision, commit] {
            state.revisions.insert(
                (repo.to_string(), name.to_string()),
                (commit.to_string(), files.clone()),
            );
        }
    }

    /// Requests since the last call that asked for more than a first byte of a file.
    pub fn take_downloads(&self) -> Vec<String> {
        let log = std::mem::take(&mut self.state.lock().unwrap().log);
        log.into_iter()
            .filter(|request| !request.ends_with("bytes=0-0") && !request.contains(" /api/"))
            .collect()
    }
}

impl Drop for HubServer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect(("127.0.0.1", self.port));
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Request {
    method: String,
    path: String,
    range: String,
    token: String,
}

fn read_request(stream: &TcpStream) -> std::io::Result<Request> {
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line)?;
    let mut words = line.split_whitespace().map(String::from);
    let mut request = Request {
        method: words.next().unwrap_or_default(),
        path: words.next().unwrap_or_default(),
        range: String::new(),
        token: String::new(),
    };
    loop {
        let mut header = String::new();
        reader.read_line(&mut header)?;
        let Some((name, value)) = header.trim().split_once(':') else {
            return Ok(request);
        };
        let value = value.trim().trim_start_matches("Bearer ").to_string();
        match name.to_ascii_lowercase().as_str() {
            "range" => request.range = value,
            "authorization" => request.token = value,
            _ => {}
        }
    }
}

fn answer(mut stream: TcpStream, state: &mut State) -> std::io::Result<()> {
    let Request {
        method,
        path,
        range,
        token,
    } = read_request(&stream)?;
    state.log.push(format!("{method} {path} {range}"));
    if let Some((wanted, status)) = &state.gate
        && *wanted != token
    {
        return refuse(&mut stream, *status);
    }
    if let Some(listed) = path.strip_prefix("/api/") {
        return list(&mut stream, state, listed);
    }
    let found = path.split_once("/resolve/").and_then(|(repo, rest)| {
        let (revision, file) = rest.split_once('/')?;
        let repo = repo.trim_start_matches("/cdn").trim_start_matches('/');
        let key = (repo.to_string(), revision.replace("%2F", "/"));
        let (commit, files) = state.revisions.get(&key)?;
        Some((commit, file.to_string(), files.get(file)?))
    });
    let Some((commit, file, bytes)) = found else {
        return refuse(&mut stream, 404);
    };
    let etag = bytes.iter().fold(7, |sum: u64, b| {
        sum.wrapping_mul(31).wrapping_add(u64::from(*b))
    });
    if state.redirects && file.ends_with(".safetensors") && !path.starts_with("/cdn") {
        let to = stream.local_addr()?;
        return write!(
            stream,
            "HTTP/1.1 302 Found\r\nLocation: http://{to}/cdn{path}\r\nX-Linked-ETag: \"{etag:016x}\"\r\nX-Repo-Commit: {commit}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        );
    }
    let mut bounds = range
        .trim_start_matches("bytes=")
        .split('-')
        .map(|n| n.parse::<usize>().ok());
    let mut start = bounds.next().flatten().unwrap_or(0);
    let end = bounds
        .next()
        .flatten()
        .map_or(bytes.len(), |last| last + 1)
        .min(bytes.len());
    if state.ignores_ranges && end != 1 {
        start = 0;
    }
    if start >= end {
        return refuse(&mut stream, 416);
    }
    let mut body = &bytes[start..end];
    write!(
        stream,
        "HTTP/1.1 206 Partial Content\r\nContent-Length: {}\r\nContent-Range: bytes {start}-{}/{}\r\nETag: \"{etag:016x}\"\r\nX-Repo-Commit: {commit}\r\nConnection: close\r\n\r\n",
        body.len(),
        end - 1,
        bytes.len()
    )?;
    if let Some((cut_file, len)) = &state.cut
        && *cut_file == file
    {
        body = &body[..body.len().min(*len)];
    }
    stream.write_all(if method == "HEAD" { &[] } else { body })
}

/// The commit and the files of `REPO/revision/REVISION`.
fn list(stream: &mut TcpStream, state: &State, path: &str) -> std::io::Result<()> {
    let found = path.split_once("/revision/").and_then(|(repo, revision)| {
        let repo = repo.strip_prefix("models/").unwrap_or(repo);
        let key = (repo.to_string(), revision.replace("%2F", "/"));
        state.revisions.get(&key)
    });
    let Some((commit, files)) = found else {
        return refuse(stream, 404);
    };
    let files = files
        .keys()
        .map(|name| serde_json::json!({"rfilename": name}));
    let json =
        serde_json::json!({"sha": commit, "siblings": files.collect::<Vec<_>>()}).to_string();
    write!(
        stream,
        "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{json}",
        json.len()
    )
}

fn refuse(stream: &mut TcpStream, status: u16) -> std::io::Result<()> {
    write!(
        stream,
        "HTTP/1.1 {status} Refused\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    )
}
