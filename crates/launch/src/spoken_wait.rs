//! Waits that are not silent.

use std::io::{Write, stderr};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::control::spawn;
use crate::lock::lock;

/// When those who wait for others say so.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WaitNotices {
    /// After this time for the first time. Default: 10 seconds.
    pub first: Duration,
    /// And then each time after so long. Default: a minute.
    pub interval: Duration,
}

impl Default for WaitNotices {
    fn default() -> Self {
        Self {
            first: Duration::from_secs(10),
            interval: Duration::from_secs(60),
        }
    }
}

/// A wait for others, of which lines on standard error say how long it has lasted, until this is dropped.
pub struct SpokenWait {
    what: Arc<Mutex<String>>,
    /// Says that it begins anew, and by its end that it is over.
    anew: Sender<()>,
}

impl SpokenWait {
    /// A wait of `who` that begins now, for nothing yet.
    pub fn begin(notices: WaitNotices, who: &str) -> Self {
        let (anew, begins) = channel::<()>();
        let what = Arc::<Mutex<String>>::default();
        let (who, waits) = (who.to_string(), what.clone());
        let speak = move || {
            let mut begun = Instant::now();
            let mut pause = notices.first;
            loop {
                match begins.recv_timeout(pause) {
                    Ok(()) => {
                        (begun, pause) = (Instant::now(), notices.first);
                        continue;
                    }
                    Err(RecvTimeoutError::Timeout) => pause = notices.interval,
                    Err(RecvTimeoutError::Disconnected) => return,
                }
                let what = lock(&waits).clone();
                if !what.is_empty() {
                    let secs = begun.elapsed().as_secs();
                    // There is nowhere else to say that it failed.
                    let _ = writeln!(stderr(), "{who} waits {what}, for {secs} s now");
                }
            }
        };
        if let Err(error) = spawn("waiting", speak) {
            tracing::warn!("no thread to say who is waited for: {error}");
        }
        Self { what, anew }
    }

    /// What it waits for has come, and it waits for the next one from now on.
    pub fn restart(&self) {
        // Without the thread nothing is said.
        let _ = self.anew.send(());
    }

    /// From now on it waits so: "at node1:29500 for ranks 1, 3". Nothing is said of a wait for nothing.
    pub fn say(&self, what: String) {
        *lock(&self.what) = what;
    }
}
