//! State and masters in a file, streamed through memory bucket by bucket (arXiv:2104.07857).
//!
//! ```text
//! update    .. bucket 1            .. bucket 2            .. bucket 3
//! thread    write 0, read 2        write 1, read 3        write 2, read 4
//! ```
//! One thread works on requests in their order, so what is read was written before, and at most two buckets are in memory. The file
//! has no name: it is gone when it is closed, or with its process, whatever ends that.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use candle_core::{CpuStorage, DType, Device, Error, Result, Storage, Tensor, bail};

use super::state_store::{BucketShape, BucketState};
use crate::memory::{MemoryCategory, MemoryGuard, MemoryMeter};

/// Bytes that are converted at a time.
const CHUNK: usize = 1 << 20;

/// The buckets of one rank.
pub(super) struct StateFile {
    device: Device,
    shapes: Arc<[BucketShape]>,
    /// Of each bucket, the one that is updated after it.
    next: Vec<usize>,
    io: Mutex<Io>,
}

/// The rank's end of its thread.
struct Io {
    /// Until the end.
    requests: Option<Sender<Request>>,
    replies: Receiver<Result<HostBucket>>,
    ahead: Ahead,
    thread: Option<JoinHandle<()>>,
}

/// A bucket that nobody has asked for yet.
#[derive(Default)]
enum Ahead {
    #[default]
    Nothing,
    Requested(usize),
    Here(usize, HostBucket),
}

enum Request {
    Read(usize),
    Write(usize, HostBucket),
}

/// A bucket's tensors on the host.
struct HostBucket {
    tensors: Vec<Tensor>,
    held: MemoryGuard,
}

impl StateFile {
    /// A file in `dir` with all buckets, as `make` gives them, on the disk; `next` is the bucket that is updated after each.
    pub fn create(
        dir: &Path,
        shapes: Vec<BucketShape>,
        next: Vec<usize>,
        device: &Device,
        meter: &MemoryMeter,
        mut make: impl FnMut(usize) -> Result<BucketState>,
    ) -> Result<Self> {
        let num_bytes: usize = shapes.iter().map(BucketShape::num_bytes).sum();
        let fail = |err: std::io::Error| {
            Error::msg(format!(
                "cannot keep {num_bytes} bytes of this rank's optimizer state in a file in {}: {err}\nhint: expected a folder \
                 that exists, may be written to and has that much space for each rank",
                dir.display()
            ))
        };
        let mut file = tempfile::tempfile_in(dir).map_err(fail)?;
        for index in 0..shapes.len() {
            for values in make(index)?.tensors() {
                write_tensor(&mut file, &values.to_device(&Device::Cpu)?)?.map_err(fail)?;
            }
        }
        file.sync_data().map_err(fail)?;
        let shapes: Arc<[BucketShape]> = Arc::from(shapes);
        let ((requests, received), (sent, replies)) = (channel(), channel());
        let worker = Worker {
            dir: dir.to_path_buf(),
            file,
            shapes: Arc::clone(&shapes),
            meter: meter.clone(),
            failed: None,
        };
        let thread = std::thread::Builder::new().name("optimizer-state".into());
        let thread = thread
            .spawn(move || worker.run(&received, &sent))
            .map_err(fail)?;
        Ok(Self {
            device: device.clone(),
            shapes,
            next,
            io: Mutex::new(Io {
                requests: Some(requests),
                replies,
                ahead: Ahead::Nothing,
                thread: Some(thread),
            }),
        })
    }

    /// Lets `look` read bucket `index`, which stays in memory until another one is asked for.
    pub fn read<T>(&self, index: usize, look: impl FnOnce(&BucketState) -> Result<T>) -> Result<T> {
        let mut io = self.io.lock().unwrap_or_else(PoisonError::into_inner);
        let bucket = io.fetch(index)?;
        let seen = look(&self.shapes[index].assemble(&bucket.tensors, &self.device)?);
        io.ahead = Ahead::Here(index, bucket);
        seen
    }

    /// Lets `change` write to bucket `index`, and writes it to the file after the return; `reads_ahead`: the one that is updated next
    /// is read meanwhile.
    pub fn change<T>(
        &self,
        index: usize,
        reads_ahead: bool,
        change: impl FnOnce(&BucketState) -> Result<T>,
    ) -> Result<T> {
        let mut io = self.io.lock().unwrap_or_else(PoisonError::into_inner);
        let HostBucket { tensors, held } = io.fetch(index)?;
        let next = self.next[index];
        if reads_ahead && next != index {
            io.send(Request::Read(next))?;
            io.ahead = Ahead::Requested(next);
        }
        let bucket = self.shapes[index].assemble(&tensors, &self.device)?;
        drop(tensors);
        let changed = change(&bucket)?;
        let tensors = bucket
            .tensors()
            .map(|values| values.to_device(&Device::Cpu));
        let tensors = tensors.collect::<Result<_>>()?;
        io.send(Request::Write(index, HostBucket { tensors, held }))?;
        Ok(changed)
    }
}

impl Io {
    fn fetch(&mut self, index: usize) -> Result<HostBucket> {
        match std::mem::take(&mut self.ahead) {
            Ahead::Here(ahead, bucket) if ahead == index => return Ok(bucket),
            Ahead::Requested(ahead) => {
                let bucket = self.receive()?;
                if ahead == index {
                    return Ok(bucket);
                }
            }
            _ => {}
        }
        self.send(Request::Read(index))?;
        self.receive()
    }

    fn send(&self, request: Request) -> Result<()> {
        match self
            .requests
            .as_ref()
            .map(|requests| requests.send(request))
        {
            Some(Ok(())) => Ok(()),
            _ => bail!("the thread that keeps the optimizer's state in a file has ended"),
        }
    }

    fn receive(&self) -> Result<HostBucket> {
        match self.replies.recv() {
            Ok(reply) => reply,
            Err(_) => bail!("the thread that keeps the optimizer's state in a file has ended"),
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
    shapes: Arc<[BucketShape]>,
    meter: MemoryMeter,
    /// Why a bucket could not be written: nothing that is read after that is right.
    failed: Option<String>,
}

impl Worker {
    fn run(mut self, requests: &Receiver<Request>, replies: &Sender<Result<HostBucket>>) {
        for request in requests {
            match request {
                Request::Read(index) => {
                    let bucket = match &self.failed {
                        Some(why) => Err(Error::msg(why)),
                        None => self.read(index),
                    };
                    if replies.send(bucket).is_err() {
                        return;
                    }
                }
                Request::Write(index, bucket) if self.failed.is_none() => {
                    self.failed = self.write(index, &bucket).err().map(|err| err.to_string());
                }
                Request::Write(..) => {}
            }
        }
    }

    fn seek_to(&mut self, index: usize) -> std::io::Result<()> {
        let before: usize = self.shapes[..index]
            .iter()
            .map(BucketShape::num_bytes)
            .sum();
        self.file.seek(SeekFrom::Start(before as u64)).map(drop)
    }

    fn read(&mut self, index: usize) -> Result<HostBucket> {
        let fail = |dir: &Path, err: std::io::Error| {
            let dir = dir.display();
            Error::msg(format!(
                "cannot read the optimizer's state from its file in {dir}: {err}"
            ))
        };
        self.seek_to(index).map_err(|err| fail(&self.dir, err))?;
        let shape = &self.shapes[index];
        let held = self
            .meter
            .hold(MemoryCategory::Optimizer, shape.num_bytes());
        let mut tensors = Vec::new();
        for (len, dtype) in shape.tensors() {
            let values = read_tensor(&mut self.file, dtype, len);
            tensors.push(values.map_err(|err| fail(&self.dir, err))??);
        }
        Ok(HostBucket { tensors, held })
    }

    fn write(&mut self, index: usize, bucket: &HostBucket) -> Result<()> {
        let fail = |dir: &Path, err: std::io::Error| {
            let dir = dir.display();
            Error::msg(format!(
                "cannot write the optimizer's state to its file in {dir}: {err}"
            ))
        };
        self.seek_to(index).map_err(|err| fail(&self.dir, err))?;
        for values in &bucket.tensors {
            write_tensor(&mut self.file, values)?.map_err(|err| fail(&self.dir, err))?;
        }
        Ok(())
    }
}

/// Reads `len` values of type `dtype` from where the file is.
fn read_tensor(file: &mut File, dtype: DType, len: usize) -> std::io::Result<Result<Tensor>> {
    let device = &Device::Cpu;
    Ok(match dtype {
        DType::I16 => Tensor::from_vec(read_values(file, len, i16::from_le_bytes)?, len, device),
        _ => Tensor::from_vec(read_values(file, len, f32::from_le_bytes)?, len, device),
    })
}

fn read_values<T, const N: usize>(
    file: &mut File,
    len: usize,
    from_bytes: impl Fn([u8; N]) -> T,
) -> std::io::Result<Vec<T>> {
    let mut values = Vec::with_capacity(len);
    let mut bytes = vec![0; CHUNK.min(len * N)];
    while values.len() < len {
        let num_bytes = bytes.len().min((len - values.len()) * N);
        file.read_exact(&mut bytes[..num_bytes])?;
        let (chunk, _) = bytes[..num_bytes].as_chunks::<N>();
        values.extend(chunk.iter().copied().map(&from_bytes));
    }
    Ok(values)
}

/// Writes flat values of the host where the file is.
fn write_tensor(file: &mut File, values: &Tensor) -> Result<std::io::Result<()>> {
    let (storage, layout) = values.storage_and_layout();
    Ok(match (&*storage, layout.contiguous_offsets()) {
        (Storage::Cpu(CpuStorage::F32(all)), Some((start, end))) => {
            write_values(file, &all[start..end], f32::to_le_bytes)
        }
        (Storage::Cpu(CpuStorage::I16(all)), Some((start, end))) => {
            write_values(file, &all[start..end], i16::to_le_bytes)
        }
        _ => {
            bail!(
                "an optimizer's state is {values:?}; expected contiguous values of type F32 or I16"
            )
        }
    })
}

fn write_values<T: Copy, const N: usize>(
    file: &mut File,
    values: &[T],
    to_bytes: impl Fn(T) -> [u8; N],
) -> std::io::Result<()> {
    let mut bytes = Vec::with_capacity(CHUNK);
    for chunk in values.chunks(CHUNK / N) {
        bytes.clear();
        bytes.extend(chunk.iter().flat_map(|value| to_bytes(*value)));
        file.write_all(&bytes)?;
    }
    Ok(())
}
