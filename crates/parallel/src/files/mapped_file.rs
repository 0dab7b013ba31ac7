//! Files as memory, and what happens when one becomes shorter while it is read.
//!
//! To read where a file does not reach any more raises SIGBUS, which ends a process without a word. Where the program has asked for it, a handler
//! looks for the address among the files that are mapped, says which one it was and ends the process.

use std::fmt::Display;
use std::io::{IsTerminal, Write, stderr};
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread::{Builder, sleep};
use std::time::Duration;

use candle_core::{Error, Result};
use candle_launch::{WOULD_FAIL_AGAIN_EXIT_CODE, end_process, print_in_time};
use memmap2::Mmap;
use nix::errno::Errno;
use nix::libc::{self, siginfo_t};
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, raise, sigaction};

use super::leftovers::remove_leftovers;
use super::plain_file::open_file;

/// A file that is mapped, as it was when it was opened.
#[derive(Debug)]
pub(crate) struct MappedFile {
    map: Mmap,
    place: Option<&'static MappedPlace>,
}

/// Where a file is in memory. It is never freed, as the handler may look at it at any time, and used again for the same file.
#[derive(Debug)]
struct MappedPlace {
    path: PathBuf,
    start: AtomicUsize,
    /// 0 while the file is not mapped.
    len: AtomicUsize,
    next: *const MappedPlace,
}

// SAFETY: `next` is another one that is never freed nor changed.
#[allow(unsafe_code)]
unsafe impl Sync for MappedPlace {}

/// The newest of all places.
static PLACES: AtomicPtr<MappedPlace> = AtomicPtr::new(null_mut());
/// Held while one is taken.
static TAKING: Mutex<()> = Mutex::new(());
/// What SIGBUS did before the handler was set.
static BEFORE: OnceLock<SigAction> = OnceLock::new();
/// Whether something was read that is not there.
static IS_ENDING: AtomicBool = AtomicBool::new(false);
/// How long it may take to say so and to remove what is not whole.
const PATIENCE: Duration = Duration::from_secs(10);

impl MappedFile {
    /// Maps the file.
    ///
    /// # Errors
    /// As [`open_file`], with its path.
    #[allow(unsafe_code)]
    pub fn open(path: &Path) -> Result<Self> {
        let fail =
            |err: std::io::Error| Error::msg(format!("cannot read {}: {err}", path.display()));
        let file = open_file(path).map_err(fail)?;
        // SAFETY: the map is read-only and its length is that of the file when it was opened. Our own writer never touches a file in place, it
        // renames a new one over it, which leaves this map intact. Where another program cuts the file, reading faults, which no value
        // survives: SIGBUS ends the process.
        let map = unsafe { Mmap::map(&file) }.map_err(fail)?;
        let is_heard = BEFORE.get().is_some() && !map.is_empty();
        let place = is_heard.then(|| MappedPlace::take(path, &map));
        Ok(Self { map, place })
    }
}

impl Deref for MappedFile {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.map
    }
}

impl Drop for MappedFile {
    fn drop(&mut self) {
        if let Some(place) = self.place {
            place.len.store(0, Ordering::Release);
        }
    }
}

impl MappedPlace {
    /// Notes where the file is.
    fn take(path: &Path, map: &[u8]) -> &'static Self {
        let _one_at_a_time = TAKING.lock().unwrap_or_else(PoisonError::into_inner);
        let is_free = |place: &&Self| place.path == path && place.len.load(Ordering::Acquire) == 0;
        let place = Self::all().find(is_free).unwrap_or_else(|| {
            let place: &'static mut Self = Box::leak(Box::new(Self {
                path: path.to_path_buf(),
                start: AtomicUsize::new(0),
                len: AtomicUsize::new(0),
                next: PLACES.load(Ordering::Acquire),
            }));
            PLACES.store(place, Ordering::Release);
            place
        });
        place.start.store(map.as_ptr() as usize, Ordering::Release);
        place.len.store(map.len(), Ordering::Release);
        place
    }

    /// All, the newest first.
    #[allow(unsafe_code)]
    fn all() -> impl Iterator<Item = &'static Self> {
        // SAFETY: it is none, or was leaked.
        let newest = unsafe { PLACES.load(Ordering::Acquire).as_ref() };
        // SAFETY: as above.
        std::iter::successors(newest, |place| unsafe { place.next.as_ref() })
    }

    fn has(&self, address: usize) -> bool {
        let (len, start) = (
            self.len.load(Ordering::Acquire),
            self.start.load(Ordering::Acquire),
        );
        address
            .checked_sub(start)
            .is_some_and(|offset| offset < len)
    }

    /// What has become of the file.
    fn tell(&self) -> String {
        let (path, expected) = (self.path.display(), self.len.load(Ordering::Acquire));
        let text = match self.path.metadata() {
            Ok(file) if (file.len() as usize) < expected => format!(
                "{path} became shorter while it was read: it has {} bytes, expected {expected}, as when it was opened\nhint: another program writes \
                 to it, such as a copy or a download: wait for its end and run this again",
                file.len()
            ),
            found => {
                let why: &dyn Display = match &found {
                    Ok(_) => &"it was changed, or its disk failed",
                    Err(err) => err,
                };
                format!(
                    "{path} could not be read to its end any more: {why}\nhint: see the kernel's log (dmesg) for errors of the disk"
                )
            }
        };
        // On a terminal not behind what is there already.
        let begin = if stderr().is_terminal() { "\n" } else { "" };
        format!("{begin}error: {text}\n")
    }
}

/// From now on the process ends with exit code 2 when a file of weights becomes shorter while it is read, one that was opened after this, with a
/// message that names it, and without what it has not finished ([`remove_leftovers`]). Any other SIGBUS has the effect that it had before.
///
/// Without this call a library changes nothing of what the signal does. Programs call it when they start; the command `candle-train` does.
pub fn end_when_a_file_is_cut() {
    BEFORE.get_or_init(|| {
        // On the stack of the thread that reads, which is not what is full.
        let handler = SigHandler::SigAction(on_sigbus);
        let action = SigAction::new(handler, SaFlags::SA_SIGINFO, SigSet::empty());
        // It fails for signals that nobody can handle only.
        set_action(&action).unwrap_or_else(|_| default_action())
    });
}

fn default_action() -> SigAction {
    SigAction::new(SigHandler::SigDfl, SaFlags::empty(), SigSet::empty())
}

#[allow(unsafe_code)]
fn set_action(action: &SigAction) -> nix::Result<SigAction> {
    // SAFETY: the handler is `on_sigbus`, or what was there before.
    unsafe { sigaction(Signal::SIGBUS, action) }
}

/// Of files of this process that are mapped, the signal comes where they are read: in code that computes, and holds no lock of the allocator or
/// the like. So more may be done than in handlers of signals that come at any time.
#[allow(unsafe_code)]
extern "C" fn on_sigbus(_number: libc::c_int, info: *mut siginfo_t, _context: *mut libc::c_void) {
    let errno = Errno::last_raw();
    // SAFETY: the kernel passes what it says of the signal.
    let (code, address) = unsafe { ((*info).si_code, (*info).si_addr() as usize) };
    let lost = match code {
        libc::BUS_ADRERR => MappedPlace::all().find(|place| place.has(address)),
        _ => None,
    };
    if let Some(place) = lost {
        end(place);
    }
    // Somebody else's: what reads there does so again, and what was sent is sent again.
    let before = BEFORE.get().copied();
    let _ = set_action(&before.unwrap_or_else(default_action));
    if code <= 0 {
        let _ = raise(Signal::SIGBUS);
    }
    Errno::set_raw(errno);
}

/// Says which file it was, and ends the process. What is not there cannot be read, so who wanted it never goes on.
#[allow(unsafe_code)]
fn end(place: &'static MappedPlace) -> ! {
    let tell = || {
        print_in_time(place.tell());
        remove_leftovers();
        end_process(String::new(), WOULD_FAIL_AGAIN_EXIT_CODE);
    };
    // Several threads may read it. This one waits, as the file system may not answer.
    if !IS_ENDING.swap(true, Ordering::AcqRel) && Builder::new().spawn(tell).is_err() {
        // On this thread then, for all the risk that it holds a lock.
        let _ = stderr().write_all(place.tell().as_bytes());
        remove_leftovers();
    } else {
        sleep(PATIENCE);
    }
    // SAFETY: `_exit` has no preconditions; it runs no code of this process.
    unsafe { libc::_exit(i32::from(WOULD_FAIL_AGAIN_EXIT_CODE)) }
}

#[cfg(test)]
mod tests {
    use std::fs::{File, write};
    use std::os::unix::process::ExitStatusExt;
    use std::process::{Command, Output};

    use super::*;
    use crate::files::Leftover;

    const CASE: &str = "CANDLE_TRAIN_TEST_OF_CUT_FILE";
    const NUM_BYTES: usize = 100_000;

    fn map_and_cut(path: &Path) -> MappedFile {
        let mapped = MappedFile::open(path).unwrap();
        cut(path);
        mapped
    }

    fn cut(path: &Path) {
        File::options()
            .write(true)
            .open(path)
            .unwrap()
            .set_len(10)
            .unwrap();
    }

    /// Reads the last byte.
    fn read(bytes: &[u8]) {
        assert_eq!(std::hint::black_box(bytes[NUM_BYTES - 1]), 1);
    }

    /// What the child process does, in a folder with files of this name and of another one.
    fn child(case: &str, dir: &Path) {
        let (path, other) = (dir.join("weights"), dir.join("other"));
        if case != "not asked for" {
            end_when_a_file_is_cut();
            end_when_a_file_is_cut();
        }
        let _other = MappedFile::open(&other).unwrap();
        match case {
            "named" | "not asked for" => read(&map_and_cut(&path)),
            "leftover" => {
                let place = dir.join("half");
                let make = || Ok((write(&place, "half")?, place.clone()));
                let ((), _leftover) = Leftover::with_content(make).unwrap();
                read(&map_and_cut(&path));
            }
            "again" => {
                for _ in 0..3 {
                    read(&MappedFile::open(&path).unwrap());
                }
                assert_eq!(
                    MappedPlace::all()
                        .filter(|place| place.path == path)
                        .count(),
                    1
                );
                let mapped = [MappedFile::open(&path).unwrap(), map_and_cut(&path)];
                std::thread::spawn(move || read(&mapped[0])).join().unwrap();
            }
            "gone" => {
                let mapped = map_and_cut(&path);
                std::fs::remove_file(&path).unwrap();
                read(&mapped);
            }
            "several" => {
                let mapped = map_and_cut(&path);
                std::thread::scope(|scope| {
                    for _ in 0..4 {
                        scope.spawn(|| read(&mapped));
                    }
                });
            }
            "somebody else's" => {
                #[allow(unsafe_code)]
                // SAFETY: of a file in a folder of this test; that it faults is the test.
                let map = unsafe { Mmap::map(&File::open(&path).unwrap()) }.unwrap();
                cut(&path);
                read(&map);
            }
            // The handler of Rust's standard library takes the first one for nothing, and sets the default.
            "sent" => [(), ()]
                .iter()
                .for_each(|()| raise(Signal::SIGBUS).unwrap()),
            case => panic!("{case}"),
        }
    }

    fn run(case: &str, dir: &Path) -> Output {
        for name in ["weights", "other"] {
            write(dir.join(name), [1; NUM_BYTES]).unwrap();
        }
        let mut test = Command::new(std::env::current_exe().unwrap());
        test.args(["--exact", "--nocapture", "--test-threads=1"]);
        test.arg("files::mapped_file::tests::a_file_that_is_cut_is_named");
        test.env(CASE, case).env("TMPDIR", dir).output().unwrap()
    }

    #[test]
    fn a_file_that_is_cut_is_named() {
        if let Ok(case) = std::env::var(CASE) {
            return child(&case, &std::env::temp_dir());
        }
        for case in ["named", "leftover", "again", "several", "gone"] {
            let dir = tempfile::tempdir().unwrap();
            let ended = run(case, dir.path());
            let said = String::from_utf8_lossy(&ended.stderr);
            assert_eq!(ended.status.code(), Some(2), "{case}: {said}");
            let path = dir.path().join("weights");
            let why = match case {
                "gone" => "could not be read to its end any more: No such file".to_string(),
                _ => format!(
                    "became shorter while it was read: it has 10 bytes, expected {NUM_BYTES}, "
                ),
            };
            let begin = format!("error: {} {why}", path.display());
            assert!(
                said.starts_with(&begin) && said.contains("\nhint: "),
                "{case}: {said}"
            );
            assert_eq!(said.matches("error: ").count(), 1, "{said}");
            assert!(!dir.path().join("half").exists());
        }
        for case in ["somebody else's", "sent", "not asked for"] {
            let dir = tempfile::tempdir().unwrap();
            let ended = run(case, dir.path());
            assert_eq!(ended.status.signal(), Some(libc::SIGBUS), "{case}");
        }
    }
}
