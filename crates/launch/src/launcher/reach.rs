//! What stands for ssh to a host that has called the front.

use std::fs::File;
use std::io::{copy, stdin, stdout};
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::process::ExitCode;

use super::call::{Caller, call};
use super::rendezvous_address::RendezvousAddress;
use crate::rank_env::given_secret;

/// Runs a command on a host that waits for the front at this address: its stdin and stdout are those of this process.
pub fn reach(front: &RendezvousAddress, host: &str, words: &[String]) -> ExitCode {
    let caller = Caller::Shell {
        host: host.to_string(),
        command: words.join(" "),
    };
    let secret = given_secret().map_err(std::io::Error::other);
    let called = secret.and_then(|secret| {
        let none = || std::io::Error::other("there is no secret");
        call(&front.to_string(), &secret.ok_or_else(none)?, &caller)
    });
    let passed = called.and_then(|call| {
        let stream = call.stream;
        let mut to = stream.try_clone()?;
        std::thread::spawn(move || {
            // Its end is the end of what the command reads.
            let _ = copy(&mut stdin(), &mut to);
            let _ = to.shutdown(Shutdown::Write);
        });
        // Without a buffer: what comes has no lines.
        copy(
            &mut &stream,
            &mut File::from(stdout().as_fd().try_clone_to_owned()?),
        )
    });
    match passed {
        Ok(_) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("candle-train: cannot reach host {host} through {front}: {error}");
            ExitCode::FAILURE
        }
    }
}
