//! A safetensors file that is written tensor by tensor: that of a model, and that of a rank.

use std::collections::HashMap;
use std::fs::File;
use std::hash::Hasher;
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytemuck::Pod;
use candle_core::{CpuStorage, Error, Result, Storage, Tensor, bail};
use half::{bf16, f16};
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use twox_hash::XxHash64;

/// Bytes that are checksummed and written at a time.
const CHUNK: usize = 1 << 20;

/// What stands before the tensors, which are given by name, type and shape: the length of a JSON object, and that with these and offsets.
pub(super) fn header(
    tensors: impl Iterator<Item = (String, Dtype, Vec<usize>)>,
    metadata: HashMap<String, String>,
) -> Result<Vec<u8>> {
    let mut end = 0;
    let info = |(name, dtype, shape): (String, Dtype, Vec<usize>)| {
        let start = end;
        end += shape.iter().product::<usize>() * dtype.bitsize() / 8;
        let data_offsets = (start, end);
        let info = TensorInfo {
            dtype,
            shape,
            data_offsets,
        };
        (name, info)
    };
    let header = Metadata::new(Some(metadata), tensors.map(info).collect())?;
    let mut header = serde_json::to_vec(&header).map_err(Error::wrap)?;
    header.resize(header.len().next_multiple_of(8), b' ');
    let len = (header.len() as u64).to_le_bytes();
    Ok([len.as_slice(), &header].concat())
}

/// A new file, and the checksum of what was written to it.
pub(super) struct TensorFile {
    out: BufWriter<File>,
    hash: XxHash64,
    num_bytes: Arc<AtomicU64>,
}

impl TensorFile {
    /// Begins the file with its header; `num_bytes` counts what is written.
    pub fn create(path: &Path, header: &[u8], num_bytes: Arc<AtomicU64>) -> io::Result<Self> {
        let mut file = Self {
            out: BufWriter::with_capacity(CHUNK, File::create_new(path)?),
            hash: XxHash64::default(),
            num_bytes,
        };
        file.write(header)?;
        Ok(file)
    }

    /// Adds bytes of the next tensor.
    pub fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        for chunk in bytes.chunks(CHUNK) {
            self.hash.write(chunk);
            self.out.write_all(chunk)?;
            let len = chunk.len() as u64;
            self.num_bytes.fetch_add(len, Ordering::Relaxed);
        }
        Ok(())
    }

    /// As [`Self::write`], of bytes in a mapped file. If that is cut meanwhile, to read it here tells so ([`MappedFile`](crate::files::MappedFile));
    /// to have it written would be an error of the file that is written.
    pub fn write_mapped(&mut self, bytes: &[u8]) -> io::Result<()> {
        let mut own = Vec::with_capacity(CHUNK.min(bytes.len()));
        for chunk in bytes.chunks(CHUNK) {
            own.clear();
            own.extend_from_slice(chunk);
            self.write(&own)?;
        }
        Ok(())
    }

    /// Adds the values of a tensor in the host's memory; whether all are finite.
    ///
    /// # Errors
    /// A tensor of another type than f32, f16 and bf16.
    pub fn write_values(&mut self, values: &Tensor) -> Result<io::Result<bool>> {
        let values = values.contiguous()?;
        let (storage, layout) = values.storage_and_layout();
        let own = match layout.contiguous_offsets() {
            Some((start, end)) => start..end,
            None => bail!("cannot save a tensor that is not contiguous"),
        };
        Ok(match &*storage {
            Storage::Cpu(CpuStorage::F32(all)) => self.write_all(&all[own], f32::is_finite),
            Storage::Cpu(CpuStorage::F16(all)) => self.write_all(&all[own], f16::is_finite),
            Storage::Cpu(CpuStorage::BF16(all)) => self.write_all(&all[own], bf16::is_finite),
            _ => bail!(
                "cannot save a tensor of type {:?} on {:?}; expected f32, f16 or bf16 on the host",
                values.dtype(),
                values.device().location()
            ),
        })
    }

    fn write_all<T: Pod>(
        &mut self,
        values: &[T],
        is_finite: impl Fn(T) -> bool,
    ) -> io::Result<bool> {
        self.write(bytemuck::cast_slice(values))?;
        Ok(values.iter().all(|&value| is_finite(value)))
    }

    /// The whole file, and the checksum of its bytes.
    pub fn finish(self) -> io::Result<(File, u64)> {
        let file = self.out.into_inner().map_err(|err| err.into_error())?;
        Ok((file, self.hash.finish()))
    }
}
