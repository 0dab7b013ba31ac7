//! How a process ends when another rank is gone.

use std::io::Write;
use std::time::Duration;

use crate::PEER_FAILED_EXIT_CODE;

/// What the main thread gets to end by itself.
const GRACE: Duration = Duration::from_secs(1);

/// Prints `text` and calls `printed`, on a thread of its own, since standard error may be locked or its pipe full; ends
/// the process after a moment if `ends_process`.
pub(super) fn end(text: String, ends_process: bool, printed: impl FnOnce() + Send + 'static) {
    let print = move || {
        // In one piece, so that lines of ranks do not mix. There is nowhere else to say that it failed.
        let _ = std::io::stderr().write_all(text.as_bytes());
        printed();
    };
    let spawn = |name: &str| std::thread::Builder::new().name(name.to_string());
    if let Err(error) = spawn("control-print").spawn(print) {
        tracing::error!("no thread to say why the run ends: {error}");
    }
    if !ends_process {
        return;
    }
    let exit = || {
        std::thread::sleep(GRACE);
        exit_at_once();
    };
    if spawn("control-exit").spawn(exit).is_err() {
        exit_at_once();
    }
}

/// Ends the process without running exit handlers: those of MPI and CUDA may wait for the rank that is gone.
#[allow(unsafe_code)]
fn exit_at_once() -> ! {
    // SAFETY: `_exit` has no preconditions; it runs no code of this process.
    unsafe { nix::libc::_exit(i32::from(PEER_FAILED_EXIT_CODE)) }
}
