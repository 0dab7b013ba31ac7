//! Items in a file, streamed through memory (arXiv:2104.07857).
//!
//! ```text
//! uses      .. item 1              .. item 2              .. item 3
//! thread    write 0, read 2        write 1, read 3        write 2, read 4
//! ```
//! One thread works on requests in their order, so what is read was written before. Room for what is read is asked for, and counted, when
//! that is requested; what is written counts until the next write begins, or [`FileStore::finish`]: so how fast the thread is changes no number. The file has no name: it is gone when it is closed,
//! or with its process, whatever ends that.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use bytemuck::{cast_slice, cast_slice_mut};
use candle_comm::{allocate_for, allocated_of_rank, message_of};
use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::cpu_backend::CpuDevice;
use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, DType, Device, Error, Result, Storage, Tensor, bail};
use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};

use super::store::{Fetched, Items, Kept, num_bytes_of};
use crate::files::{SpaceNeed, is_in_memory, size_in_words};
use crate::memory::{MemoryGuard, MemoryMeter, num_bytes};

/// The items of one rank.
pub(super) struct FileStore {
    dir: PathBuf,
    device: Device,
    meter: MemoryMeter,
    what: &'static str,
    io: Mutex<FileIo>,
}

/// The rank's end of its thread.
struct FileIo {
    kept: Kept,
    /// Where each item begins in the file.
    starts: Vec<u64>,
    /// Where the next one would.
    end: u64,
    /// Until the end.
    requests: Option<Sender<Request>>,
    replies: Receiver<Result<Fetched>>,
    /// With what was written, which is freed here, where it is counted.
    written: Receiver<(Vec<Tensor>, Result<()>)>,
    /// What is being written.
    behind: Option<MemoryGuard>,
    /// Items that are being read, in this order.
    asked: VecDeque<usize>,
    /// Items that are here and that nobody has asked for yet, on the host.
    here: HashMap<usize, Fetched>,
    thread: Option<JoinHandle<()>>,
}

/// Of an item that begins at this byte of the file.
enum Request {
    Read(u64, Room),
    Write(u64, Vec<Tensor>),
}

/// For an item that is read.
struct Room {
    /// Of each tensor zeros, then its values.
    tensors: Vec<CpuStorage>,
    held: MemoryGuard,
}

impl FileStore {
    /// A file in `dir` with all items, as `make` gives them, on the disk.
    pub fn create(
        dir: &Path,
        kept: Kept,
        device: &Device,
        meter: &MemoryMeter,
        mut make: impl FnMut(usize) -> Result<Vec<Tensor>>,
    ) -> Result<Self> {
        let (what, num_items) = (kept.what, kept.items.len());
        let num_bytes: usize = (0..num_items).map(|index| kept.num_bytes(index)).sum();
        let fail = |err: std::io::Error| no_room(dir, num_bytes, what, &err);
        let mut file = tempfile::tempfile_in(dir).map_err(fail)?;
        check_space(dir, num_bytes, what)?;
        warn_of_memory(dir);
        for index in 0..num_items {
            for values in make(index)? {
                let values = values.to_device(&Device::Cpu)?;
                write_tensor(&mut file, &values)?.map_err(fail)?;
            }
        }
        file.sync_data().map_err(fail)?;
        leave_cache(&file, 0, 0);
        let ((requests, received), (sent, replies)) = (channel(), channel());
        let (writes, written) = channel();
        let (mut starts, mut end) = (Vec::new(), 0);
        for index in 0..num_items {
            starts.push(end);
            end += kept.num_bytes(index) as u64;
        }
        let worker = Worker {
            dir: dir.to_path_buf(),
            file,
            what,
            failed: None,
        };
        let thread = std::thread::Builder::new().name("offload".into());
        let of_rank = allocated_of_rank();
        let run = move || {
            of_rank.into_iter().for_each(allocate_for);
            worker.run(&received, &sent, &writes);
        };
        let thread = thread.spawn(run).map_err(fail)?;
        Ok(Self {
            dir: dir.to_path_buf(),
            device: device.clone(),
            meter: meter.clone(),
            what,
            io: Mutex::new(FileIo {
                kept,
                starts,
                end,
                requests: Some(requests),
                replies,
                written,
                behind: None,
                asked: VecDeque::new(),
                here: HashMap::new(),
                thread: Some(thread),
            }),
        })
    }

    fn io(&self) -> MutexGuard<'_, FileIo> {
        self.io.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ended(&self) -> Error {
        let what = self.what;
        Error::msg(format!("the thread that keeps {what} in a file has ended"))
    }

    fn send(&self, io: &FileIo, request: Request) -> Result<()> {
        let sent = io.requests.as_ref().map(|requests| requests.send(request));
        match sent {
            Some(Ok(())) => Ok(()),
            _ => Err(self.ended()),
        }
    }

    fn ask(&self, io: &mut FileIo, index: usize) -> Result<()> {
        let tensors = io.kept.items[index].iter();
        let room = Room {
            held: io.kept.hold(index, &self.meter),
            tensors: tensors
                .map(|&(len, dtype)| CpuDevice.zeros_impl(&len.into(), dtype))
                .collect::<Result<_>>()?,
        };
        self.send(io, Request::Read(io.starts[index], room))?;
        io.asked.push_back(index);
        Ok(())
    }

    /// What was asked for first.
    fn receive(&self, io: &mut FileIo) -> Result<(usize, Fetched)> {
        let Some(index) = io.asked.pop_front() else {
            bail!("nothing is being read of {}", self.what);
        };
        let reply = io.replies.recv().map_err(|_| self.ended())?;
        Ok((index, reply?))
    }
}

impl Items for FileStore {
    fn add(&self, item: Vec<(usize, DType)>) -> Result<usize> {
        let mut io = self.io();
        let num_bytes = num_bytes_of(item.iter().copied());
        check_space(&self.dir, num_bytes, self.what)?;
        let start = io.end;
        io.end += num_bytes as u64;
        Ok(io.push(item, start))
    }

    fn view(&self, index: usize, part: Range<usize>) -> usize {
        let mut io = self.io();
        let dtype = io.kept.items[index].first().map(|(_, dtype)| *dtype);
        let offset = part.start * dtype.map_or(0, |dtype| dtype.size_in_bytes());
        let item = dtype.map(|dtype| (part.len(), dtype));
        let start = io.starts[index] + offset as u64;
        io.push(item.into_iter().collect(), start)
    }

    fn refit(&self, index: usize, item: &[(usize, DType)]) -> Result<()> {
        self.io().kept.items[index] = item.to_vec();
        Ok(())
    }

    fn start_fetch(&self, index: usize) -> Result<()> {
        let mut io = self.io();
        if io.here.contains_key(&index) || io.asked.contains(&index) {
            return Ok(());
        }
        self.ask(&mut io, index)
    }

    fn fetch(&self, index: usize) -> Result<Fetched> {
        let mut io = self.io();
        if !io.here.contains_key(&index) && !io.asked.contains(&index) {
            while !io.asked.is_empty() {
                self.receive(&mut io)?;
            }
            io.here.clear();
            self.ask(&mut io, index)?;
        }
        let Fetched { tensors, held } = loop {
            if let Some(item) = io.here.remove(&index) {
                break item;
            }
            let (other, item) = self.receive(&mut io)?;
            io.here.insert(other, item);
        };
        let tensors = tensors
            .into_iter()
            .map(|values| values.to_device(&self.device));
        Ok(Fetched {
            tensors: tensors.collect::<Result<_>>()?,
            held,
        })
    }

    fn store(&self, index: usize, item: Fetched) -> Result<()> {
        self.forget(index)?;
        let Fetched { tensors, held } = item;
        let tensors = tensors
            .into_iter()
            .map(|values| values.to_device(&Device::Cpu));
        let tensors = tensors.collect::<Result<_>>()?;
        // What was written before this.
        self.finish()?;
        let mut io = self.io();
        io.behind = Some(held);
        self.send(&io, Request::Write(io.starts[index], tensors))
    }

    fn finish(&self) -> Result<()> {
        let mut io = self.io();
        match io.behind.take() {
            Some(_held) => {
                let (_tensors, done) = io.written.recv().map_err(|_| self.ended())?;
                done
            }
            None => Ok(()),
        }
    }

    fn forget(&self, index: usize) -> Result<()> {
        let mut io = self.io();
        while io.asked.contains(&index) {
            let (other, item) = self.receive(&mut io)?;
            io.here.insert(other, item);
        }
        io.here.remove(&index);
        Ok(())
    }
}

/// Warns, once, of a folder whose files are in memory.
fn warn_of_memory(dir: &Path) {
    static KNOWN: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if is_in_memory(dir) && known.insert(dir.to_path_buf()) {
        tracing::warn!(
            "the folder {} is of a file system in memory (tmpfs): what is kept there still takes memory",
            dir.display()
        );
    }
}

impl FileIo {
    fn push(&mut self, item: Vec<(usize, DType)>, start: u64) -> usize {
        self.starts.push(start);
        self.kept.items.push(item);
        self.starts.len() - 1
    }
}

impl Drop for FileIo {
    fn drop(&mut self) {
        // The thread ends when there is nobody to ask it.
        self.requests = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// What the thread has.
struct Worker {
    dir: PathBuf,
    file: File,
    what: &'static str,
    /// Why an item could not be written: nothing that is read after that is right.
    failed: Option<String>,
}

impl Worker {
    fn run(
        mut self,
        requests: &Receiver<Request>,
        replies: &Sender<Result<Fetched>>,
        written: &Sender<(Vec<Tensor>, Result<()>)>,
    ) {
        for request in requests {
            let failed = self.failed.as_ref().map(Error::msg);
            // Who asked may be gone.
            match request {
                Request::Read(start, room) => {
                    let item = failed.map_or_else(|| self.read(start, room), Err);
                    let _ = replies.send(item);
                }
                Request::Write(start, tensors) => {
                    let done = failed.map_or_else(|| self.write(start, &tensors), Err);
                    self.failed = done.as_ref().err().map(message_of);
                    let _ = written.send((tensors, done));
                }
            }
        }
    }

    fn fail(&self, doing: &str, start: u64, err: &std::io::Error) -> Error {
        Error::msg(format!(
            "cannot {doing} the file in {}, from byte {start} on: {err}",
            self.dir.display(),
        ))
    }

    fn read(&mut self, start: u64, room: Room) -> Result<Fetched> {
        let doing = format!("read {} from", self.what);
        let fail = |err| self.fail(&doing, start, &err);
        let mut file = &self.file;
        file.seek(SeekFrom::Start(start)).map_err(fail)?;
        let mut tensors = Vec::new();
        let mut num_bytes = 0;
        for mut values in room.tensors {
            let bytes = bytes_of(&mut values)?;
            file.read_exact(bytes).map_err(fail)?;
            num_bytes += bytes.len();
            let len = bytes.len() / values.dtype().size_in_bytes();
            let (values, no_op) = (Storage::Cpu(values), BackpropOp::none());
            tensors.push(Tensor::from_storage(values, len, no_op, false));
        }
        leave_cache(&self.file, start, num_bytes);
        Ok(Fetched {
            tensors,
            held: room.held,
        })
    }

    fn write(&mut self, start: u64, tensors: &[Tensor]) -> Result<()> {
        let doing = format!("write {} to", self.what);
        let fail = |err| self.fail(&doing, start, &err);
        let mut file = &self.file;
        file.seek(SeekFrom::Start(start)).map_err(fail)?;
        for values in tensors {
            write_tensor(&mut file, values)?.map_err(fail)?;
        }
        // What is not on the disk yet cannot leave the cache.
        self.file.sync_data().map_err(fail)?;
        let num_bytes = tensors.iter().map(num_bytes).sum();
        leave_cache(&self.file, start, num_bytes);
        Ok(())
    }
}

/// An error if a folder has not so many bytes free.
fn check_space(dir: &Path, num_bytes: usize, what: &'static str) -> Result<()> {
    let need = SpaceNeed {
        folder: dir.to_path_buf(),
        num_bytes: num_bytes as u64,
        what,
    };
    match need.free_bytes().filter(|free| *free < need.num_bytes) {
        None => Ok(()),
        Some(free) => {
            let (needed, free) = (size_in_words(need.num_bytes), size_in_words(free));
            let words = format!("there is not enough space: {needed} needed, {free} free");
            Err(no_room(dir, num_bytes, what, &std::io::Error::other(words)))
        }
    }
}

fn no_room(dir: &Path, num_bytes: usize, what: &str, err: &std::io::Error) -> Error {
    Error::msg(format!(
        "cannot keep {num_bytes} bytes of {what} of this rank in a file in {}: {err}\nhint: expected a folder that exists, may be \
         written to and has that much space for each rank",
        dir.display()
    ))
}

/// Has the system forget what it has of a part of the file, which would push what others need out of its memory; 0 bytes are all. What it cannot
/// forget it keeps.
fn leave_cache(file: &File, start: u64, num_bytes: usize) {
    let advice = PosixFadviseAdvice::POSIX_FADV_DONTNEED;
    let _ = posix_fadvise(file, start as i64, num_bytes as i64, advice);
}

/// The bytes of values, as they are in memory: whoever reads them from the file is who wrote them.
fn bytes_of(values: &mut CpuStorage) -> Result<&mut [u8]> {
    Ok(match values {
        CpuStorage::F32(values) => cast_slice_mut(values),
        CpuStorage::BF16(values) => cast_slice_mut(values),
        CpuStorage::F16(values) => cast_slice_mut(values),
        CpuStorage::I16(values) => cast_slice_mut(values),
        CpuStorage::U8(values) => values,
        other => return Err(not_kept(other.dtype())),
    })
}

fn not_kept(dtype: DType) -> Error {
    Error::msg(format!(
        "values of type {dtype:?} cannot be kept in a file, only F32, BF16, F16, I16 and U8"
    ))
}

/// Writes flat values of the host where the file is.
fn write_tensor(file: &mut impl Write, values: &Tensor) -> Result<std::io::Result<()>> {
    let (storage, layout) = values.storage_and_layout();
    let (Storage::Cpu(storage), Some((start, end))) = (&*storage, layout.contiguous_offsets())
    else {
        bail!("{values:?} cannot be kept in a file; expected contiguous values of the host");
    };
    let part = start..end;
    Ok(file.write_all(match storage {
        CpuStorage::F32(all) => cast_slice(&all[part]),
        CpuStorage::BF16(all) => cast_slice(&all[part]),
        CpuStorage::F16(all) => cast_slice(&all[part]),
        CpuStorage::I16(all) => cast_slice(&all[part]),
        CpuStorage::U8(all) => &all[part],
        _ => return Err(not_kept(values.dtype())),
    }))
}
