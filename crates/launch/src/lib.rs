//! Processes as ranks: who am I, starting the others, meeting them, and noticing when one is gone.
#![deny(unsafe_code)]

mod circle;
mod control;
mod error;
mod fingerprint;
mod interrupts;
pub mod launcher;
mod limits;
mod lock;
mod long_words;
mod own_file;
mod rank_env;
mod secret;
mod signal_pipe;
mod spoken_wait;
mod stop_signals;
mod whole_output;

pub use circle::circle;
pub use control::{
    Control, ControlConfig, Failure, FailureKind, Operation, RankGroup, Ticket, Verdict,
    end_process, print_aside, print_in_time,
};
pub use error::{Error, Result};
pub use fingerprint::Fingerprint;
pub use interrupts::Interrupts;
pub use launcher::{
    CANNOT_GO_ON_EXIT_CODE, NEEDS_MPI_EXIT_CODE, NOT_SAVED_EXIT_CODE, PEER_FAILED_EXIT_CODE,
    WOULD_FAIL_AGAIN_EXIT_CODE,
};
pub use limits::{THREADS_HINT, at_limit, hint_of_files};
pub use long_words::without_long_words;
pub use own_file::open_own_file;
pub use rank_env::{RankEnv, StartedBy};
pub use secret::Secret;
pub use signal_pipe::ignore_file_size_signal;
pub use spoken_wait::{SpokenWait, WaitNotices};
pub use stop_signals::{StopSignals, before_ending, in_time};
pub use whole_output::{has_no_reader, write_whole};
