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
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use candle_comm::{allocate_for, allocated_of_rank, message_of};
use candle_core::{CpuStorage, DType, Device, Error, Result, Storage, Tensor, bail};
use half::{bf16, f16};
use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use nix::sys::statfs::{TMPFS_MAGIC, statfs};

use super::store::{Fetched, Kept};
use crate::checkpoint::{SpaceNeed, size_in_words};
use crate::memory::{MemoryGuard, MemoryMeter};

/// Bytes that are converted at a time.
const CHUNK: usize = 1 << 20;

/// The items of one rank.
pub(super) struct FileStore {
    device: Device,
    meter: MemoryMeter,
    kept: Arc<Kept>,
    io: Mutex<Io>,
}

/// The rank's end of its thread.
struct Io {
    /// Until the end.
    requests: Option<Sender<Request>>,
    replies: Receiver<Result<Fetched>>,
    written: Receiver<Result<()>>,
    /// What is being written.
    behind: Option<MemoryGuard>,
    /// Items that are being read, in this order.
    asked: VecDeque<usize>,
    /// Items that are here and that nobody has asked for yet, on the host.
    here: HashMap<usize, Fetched>,
    /// What was taken back last, until another one is asked for.
    kept: Option<(usize, Fetched)>,
    thread: Option<JoinHandle<()>>,
}

enum Request {
    Read(usize, Room),
    Write(usize, Vec<Tensor>),
}

/// For an item that is read.
struct Room {
    tensors: Vec<Values>,
    held: MemoryGuard,
}

/// Room for the values of a tensor, then these.
enum Values {
    F32(Vec<f32>),
    Bf16(Vec<bf16>),
    F16(Vec<f16>),
    I16(Vec<i16>),
    U8(Vec<u8>),
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
        let fail = |err: std::io::Error| {
            Error::msg(format!(
                "cannot keep {num_bytes} bytes of {what} of this rank in a file in {}: {err}\nhint: expected a folder that exists, may be \
                 written to and has that much space for each rank",
                dir.display()
            ))
        };
        let mut file = tempfile::tempfile_in(dir).map_err(fail)?;
        let need = SpaceNeed {
            folder: dir.to_path_buf(),
            num_bytes: num_bytes as u64,
            what,
        };
        if let Some(free) = need.free_bytes().filter(|free| *free < need.num_bytes) {
            let (needed, free) = (size_in_words(need.num_bytes), size_in_words(free));
            let words = format!("there is not enough space: {needed} needed, {free} free");
            return Err(fail(std::io::Error::other(words)));
        }
        warn_of_memory(dir);
        let mut bytes = vec![0; CHUNK];
        for index in 0..num_items {
            for values in make(index)? {
                let values = values.to_device(&Device::Cpu)?;
                write_tensor(&mut file, &values, &mut bytes)?.map_err(fail)?;
            }
        }
        file.sync_data().map_err(fail)?;
        leave_cache(&file, 0, 0);
        let ((requests, received), (sent, replies)) = (channel(), channel());
        let (writes, written) = channel();
        let kept = Arc::new(kept);
        let worker = Worker {
            dir: dir.to_path_buf(),
            file,
            bytes,
            kept: Arc::clone(&kept),
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
            device: device.clone(),
            meter: meter.clone(),
            kept,
            io: Mutex::new(Io {
                requests: Some(requests),
                replies,
                written,
                behind: None,
                asked: VecDeque::new(),
                here: HashMap::new(),
                kept: None,
                thread: Some(thread),
            }),
        })
    }

    fn io(&self) -> MutexGuard<'_, Io> {
        self.io.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ended(&self) -> Error {
        let what = self.kept.what;
        Error::msg(format!("the thread that keeps {what} in a file has ended"))
    }

    fn send(&self, io: &Io, request: Request) -> Result<()> {
        let sent = io.requests.as_ref().map(|requests| requests.send(request));
        match sent {
            Some(Ok(())) => Ok(()),
            _ => Err(self.ended()),
        }
    }

    fn ask(&self, io: &mut Io, index: usize) -> Result<()> {
        let tensors = self.kept.items[index].iter();
        let room = Room {
            held: self.kept.hold(index, &self.meter),
            tensors: tensors
                .map(|&(len, dtype)| Values::with_capacity(len, dtype))
                .collect::<Result<_>>()?,
        };
        self.send(io, Request::Read(index, room))?;
        io.asked.push_back(index);
        Ok(())
    }

    /// What was asked for first.
    fn receive(&self, io: &mut Io) -> Result<(usize, Fetched)> {
        let Some(index) = io.asked.pop_front() else {
            bail!("nothing is being read of {}", self.kept.what);
        };
        let reply = io.replies.recv().map_err(|_| self.ended())?;
        Ok((index, reply?))
    }

    pub fn start_fetch(&self, index: usize) -> Result<()> {
        let mut io = self.io();
        io.use_kept(index);
        if io.here.contains_key(&index) || io.asked.contains(&index) {
            return Ok(());
        }
        self.ask(&mut io, index)
    }

    pub fn fetch(&self, index: usize) -> Result<Fetched> {
        let mut io = self.io();
        io.use_kept(index);
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

    pub fn keep(&self, index: usize, item: Fetched) {
        self.io().kept = Some((index, item));
    }

    pub fn store(&self, index: usize, item: Fetched) -> Result<()> {
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
        self.send(&io, Request::Write(index, tensors))
    }

    /// Waits until what was stored is written.
    pub fn finish(&self) -> Result<()> {
        let mut io = self.io();
        match io.behind.take() {
            Some(_held) => io.written.recv().map_err(|_| self.ended())?,
            None => Ok(()),
        }
    }

    pub fn forget(&self, index: usize) -> Result<()> {
        let mut io = self.io();
        io.kept.take_if(|(kept, _)| *kept == index);
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
    let is_in_memory = statfs(dir).is_ok_and(|status| status.filesystem_type() == TMPFS_MAGIC);
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if is_in_memory && known.insert(dir.to_path_buf()) {
        tracing::warn!(
            "the folder {} is of a file system in memory (tmpfs): what is kept there still takes memory",
            dir.display()
        );
    }
}

impl Io {
    /// Frees what was taken back, unless it is this item, which is here then.
    fn use_kept(&mut self, index: usize) {
        if let Some((kept, item)) = self.kept.take()
            && kept == index
        {
            self.here.insert(index, item);
        }
    }
}

impl Drop for Io {
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
    /// For what is converted; always there, as one for each use would count as something else.
    bytes: Vec<u8>,
    kept: Arc<Kept>,
    /// Why an item could not be written: nothing that is read after that is right.
    failed: Option<String>,
}

impl Worker {
    fn run(
        mut self,
        requests: &Receiver<Request>,
        replies: &Sender<Result<Fetched>>,
        written: &Sender<Result<()>>,
    ) {
        for request in requests {
            let failed = self.failed.as_ref().map(Error::msg);
            // Who asked may be gone.
            match request {
                Request::Read(index, room) => {
                    let item = failed.map_or_else(|| self.read(index, room), Err);
                    let _ = replies.send(item);
                }
                Request::Write(index, tensors) => {
                    let done = failed.map_or_else(|| self.write(index, &tensors), Err);
                    drop(tensors);
                    self.failed = done.as_ref().err().map(message_of);
                    let _ = written.send(done);
                }
            }
        }
    }

    /// Where an item begins in the file.
    fn start_of(&self, index: usize) -> u64 {
        let before = (0..index).map(|before| self.kept.num_bytes(before) as u64);
        before.sum()
    }

    fn fail(&self, doing: &str, index: usize, err: &std::io::Error) -> Error {
        Error::msg(format!(
            "cannot {doing} the file in {}, from byte {} on: {err}",
            self.dir.display(),
            self.start_of(index)
        ))
    }

    fn read(&mut self, index: usize, room: Room) -> Result<Fetched> {
        let doing = format!("read {} from", self.kept.what);
        let start = SeekFrom::Start(self.start_of(index));
        self.file
            .seek(start)
            .map_err(|err| self.fail(&doing, index, &err))?;
        let kept = Arc::clone(&self.kept);
        let mut tensors = Vec::new();
        for (values, (len, _)) in room.tensors.into_iter().zip(&kept.items[index]) {
            let values = values.read(*len, &mut self.file, &mut self.bytes);
            tensors.push(values.map_err(|err| self.fail(&doing, index, &err))??);
        }
        leave_cache(&self.file, self.start_of(index), self.kept.num_bytes(index));
        Ok(Fetched {
            tensors,
            held: room.held,
        })
    }

    fn write(&mut self, index: usize, tensors: &[Tensor]) -> Result<()> {
        let doing = format!("write {} to", self.kept.what);
        let start = SeekFrom::Start(self.start_of(index));
        self.file
            .seek(start)
            .map_err(|err| self.fail(&doing, index, &err))?;
        for values in tensors {
            let written = write_tensor(&mut self.file, values, &mut self.bytes)?;
            written.map_err(|err| self.fail(&doing, index, &err))?;
        }
        // What is not on the disk yet cannot leave the cache.
        let synced = self.file.sync_data();
        synced.map_err(|err| self.fail(&doing, index, &err))?;
        leave_cache(&self.file, self.start_of(index), self.kept.num_bytes(index));
        Ok(())
    }
}

/// Has the system forget what it has of a part of the file, which would push what others need out of its memory; 0 bytes are all. What it cannot
/// forget it keeps.
fn leave_cache(file: &File, start: u64, num_bytes: usize) {
    let advice = PosixFadviseAdvice::POSIX_FADV_DONTNEED;
    let _ = posix_fadvise(file, start as i64, num_bytes as i64, advice);
}

impl Values {
    fn with_capacity(len: usize, dtype: DType) -> Result<Self> {
        Ok(match dtype {
            DType::F32 => Self::F32(Vec::with_capacity(len)),
            DType::BF16 => Self::Bf16(Vec::with_capacity(len)),
            DType::F16 => Self::F16(Vec::with_capacity(len)),
            DType::I16 => Self::I16(Vec::with_capacity(len)),
            DType::U8 => Self::U8(Vec::with_capacity(len)),
            _ => return Err(not_kept(dtype)),
        })
    }

    /// So many values from where the file is, through `bytes`.
    fn read(
        self,
        len: usize,
        file: &mut File,
        bytes: &mut [u8],
    ) -> std::io::Result<Result<Tensor>> {
        macro_rules! values {
            ($values:expr, $kind:ty) => {{
                let mut values = $values;
                read_values(file, (&mut values, len), bytes, <$kind>::from_le_bytes)?;
                Tensor::from_vec(values, len, &Device::Cpu)
            }};
        }
        Ok(match self {
            Self::F32(values) => values!(values, f32),
            Self::Bf16(values) => values!(values, bf16),
            Self::F16(values) => values!(values, f16),
            Self::I16(values) => values!(values, i16),
            Self::U8(values) => values!(values, u8),
        })
    }
}

fn not_kept(dtype: DType) -> Error {
    Error::msg(format!(
        "values of type {dtype:?} cannot be kept in a file, only F32, BF16, F16, I16 and U8"
    ))
}

fn read_values<T, const N: usize>(
    file: &mut File,
    (values, len): (&mut Vec<T>, usize),
    bytes: &mut [u8],
    from_bytes: impl Fn([u8; N]) -> T,
) -> std::io::Result<()> {
    while values.len() < len {
        let num_bytes = bytes.len().min((len - values.len()) * N);
        file.read_exact(&mut bytes[..num_bytes])?;
        let (chunk, _) = bytes[..num_bytes].as_chunks::<N>();
        values.extend(chunk.iter().copied().map(&from_bytes));
    }
    Ok(())
}

/// Writes flat values of the host where the file is, through `bytes`.
fn write_tensor(file: &mut File, values: &Tensor, bytes: &mut [u8]) -> Result<std::io::Result<()>> {
    let (storage, layout) = values.storage_and_layout();
    let (Storage::Cpu(storage), Some((start, end))) = (&*storage, layout.contiguous_offsets())
    else {
        bail!("{values:?} cannot be kept in a file; expected contiguous values of the host");
    };
    let part = start..end;
    Ok(match storage {
        CpuStorage::F32(all) => write_values(file, &all[part], bytes, f32::to_le_bytes),
        CpuStorage::BF16(all) => write_values(file, &all[part], bytes, bf16::to_le_bytes),
        CpuStorage::F16(all) => write_values(file, &all[part], bytes, f16::to_le_bytes),
        CpuStorage::I16(all) => write_values(file, &all[part], bytes, i16::to_le_bytes),
        CpuStorage::U8(all) => write_values(file, &all[part], bytes, u8::to_le_bytes),
        _ => return Err(not_kept(values.dtype())),
    })
}

fn write_values<T: Copy, const N: usize>(
    file: &mut File,
    values: &[T],
    bytes: &mut [u8],
    to_bytes: impl Fn(T) -> [u8; N],
) -> std::io::Result<()> {
    for chunk in values.chunks(bytes.len() / N) {
        let (places, _) = bytes.as_chunks_mut::<N>();
        for (place, value) in places.iter_mut().zip(chunk) {
            *place = to_bytes(*value);
        }
        file.write_all(&bytes[..N * chunk.len()])?;
    }
    Ok(())
}
