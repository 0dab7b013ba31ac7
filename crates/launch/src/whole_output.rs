//! Output that arrives whole, or not at all because nobody is there to read it.

use std::fs::File;
use std::io::{Error, ErrorKind, Result, Write, stdout};
use std::os::fd::AsFd;
use std::thread::sleep;
use std::time::{Duration, Instant};

use nix::libc::EIO;

/// How long a reader may leave a pipe full that does not wait by itself.
const PATIENCE: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(5);

/// Writes all of these bytes. A full pipe or terminal, of which another program may have made that writers do not wait, is waited for.
///
/// # Errors
/// As [`Write::write`], and a pipe that stays full for ten seconds.
pub fn write_whole(to: &mut impl Write, mut bytes: &[u8]) -> Result<()> {
    while !bytes.is_empty() {
        match when_ready(|| to.write(bytes))? {
            0 => return Err(ErrorKind::WriteZero.into()),
            written => bytes = &bytes[written..],
        }
    }
    when_ready(|| to.flush())
}

/// Whether an error of stdout says that nobody reads it any more: the other end of a pipe is closed, or a terminal is gone.
pub fn has_no_reader(err: &Error) -> bool {
    // A file's disk may have failed.
    let is_file = || {
        let file = stdout().as_fd().try_clone_to_owned().map(File::from);
        file.and_then(|file| file.metadata())
            .is_ok_and(|it| it.is_file())
    };
    err.kind() == ErrorKind::BrokenPipe || err.raw_os_error() == Some(EIO) && !is_file()
}

fn when_ready<T>(mut write: impl FnMut() -> Result<T>) -> Result<T> {
    let start = Instant::now();
    loop {
        match write() {
            Err(err) if err.kind() == ErrorKind::Interrupted => {}
            Err(err) if err.kind() == ErrorKind::WouldBlock && start.elapsed() < PATIENCE => {
                sleep(PAUSE);
            }
            done => return done,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Error, ErrorKind, Result, Write, write_whole};

    /// A pipe that is full each other time, takes three bytes at a time, and is closed after so many.
    struct Pipe {
        taken: Vec<u8>,
        is_full: bool,
        room: usize,
    }

    impl Write for Pipe {
        fn write(&mut self, bytes: &[u8]) -> Result<usize> {
            self.is_full = !self.is_full;
            if self.is_full {
                return Err(ErrorKind::WouldBlock.into());
            }
            let num_taken = bytes.len().min(3).min(self.room - self.taken.len());
            if num_taken == 0 {
                return Err(ErrorKind::BrokenPipe.into());
            }
            self.taken.extend_from_slice(&bytes[..num_taken]);
            Ok(num_taken)
        }

        fn flush(&mut self) -> Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_pipe_that_is_full_is_waited_for() {
        let written = |room: usize| {
            let mut pipe = Pipe {
                taken: Vec::new(),
                is_full: false,
                room,
            };
            let written = write_whole(&mut pipe, b"all of it");
            (written.map_err(|err: Error| err.kind()), pipe.taken)
        };
        assert_eq!(written(100), (Ok(()), b"all of it".to_vec()));
        let closed = Err(ErrorKind::BrokenPipe);
        assert_eq!(written(5), (closed, b"all o".to_vec()));
    }
}
