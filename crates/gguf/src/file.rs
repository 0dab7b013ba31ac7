//! Writes a file: what stands before the tensors, and these in blocks of rows, which all cores make while others are
//! written.

use std::io::Write;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::sync_channel;
use std::thread::{Builder, scope};

use candle_core::{Error, Result, bail};
use rayon::prelude::*;

use super::blocks::{encode, type_id};
use super::metadata::{GgufMetadata, put_text};
use super::tensor::{GgufContent, GgufTensor};
use super::weights::Weights;

/// Where tensors may begin.
const ALIGNMENT: usize = 32;
/// Values that all cores together have in their hands.
const VALUES_AT_ONCE: usize = 1 << 20;
/// Those of one, at least, so that a row's way through the pool costs nothing.
const MIN_VALUES: usize = 32 << 10;

/// A GGUF file to be written, of version 3.
#[derive(Clone, Debug, Default)]
pub struct GgufFile {
    /// What it says.
    pub metadata: GgufMetadata,
    /// Its tensors, in their order.
    pub tensors: Vec<GgufTensor>,
    /// Counts the bytes that are written: to show how far a file is.
    pub num_written_bytes: Arc<AtomicU64>,
}

/// A block of rows of a tensor.
struct RowBlock<'a> {
    tensor: &'a GgufTensor,
    rows: Range<usize>,
}

impl GgufFile {
    /// The size of the file.
    pub fn num_bytes(&self) -> u64 {
        let tensors = self.tensors.iter().map(|tensor| padded(tensor.num_bytes()));
        self.head().len() as u64 + tensors.sum::<u64>()
    }

    /// What stands before the tensors.
    fn head(&self) -> Vec<u8> {
        let mut bytes = b"GGUF".to_vec();
        bytes.extend(3u32.to_le_bytes());
        bytes.extend((self.tensors.len() as u64).to_le_bytes());
        bytes.extend((self.metadata.len() as u64).to_le_bytes());
        bytes.extend(self.metadata.to_bytes());
        let mut offset = 0u64;
        for tensor in &self.tensors {
            put_text(&mut bytes, &tensor.name);
            bytes.extend((tensor.shape.len() as u32).to_le_bytes());
            // The dim whose values are neighbours comes first.
            let dims = tensor.shape.iter().rev();
            dims.for_each(|dim| bytes.extend((*dim as u64).to_le_bytes()));
            bytes.extend(type_id(tensor.dtype).to_le_bytes());
            bytes.extend(offset.to_le_bytes());
            offset += padded(tensor.num_bytes());
        }
        bytes.resize(bytes.len().next_multiple_of(ALIGNMENT), 0);
        bytes
    }

    /// Writes the file, on rayon's threads. A few MiB of values are in memory at a time, whatever the sizes of tensors.
    ///
    /// # Errors
    /// Weights that cannot be read, are NaN or infinite, or do not fit their type, by name; what `out` says.
    pub fn write(&self, weights: &dyn Weights, out: &mut (impl Write + Send)) -> Result<()> {
        // Two runs of blocks wait while a third is made.
        let (sender, receiver) = sync_channel::<Vec<Vec<u8>>>(1);
        let written = &self.num_written_bytes;
        scope(|scope| {
            let head = self.head();
            let writer = Builder::new().spawn_scoped(scope, move || -> std::io::Result<()> {
                let mut write = |bytes: &[u8]| {
                    written.fetch_add(bytes.len() as u64, Ordering::Relaxed);
                    out.write_all(bytes)
                };
                write(&head)?;
                let mut blocks = receiver.into_iter().flatten();
                blocks.try_for_each(|bytes| write(&bytes))?;
                out.flush()
            })?;
            let num_threads = rayon::current_num_threads();
            let blocks: Vec<RowBlock<'_>> = self.blocks(num_threads).collect();
            let mut made = Ok(());
            for blocks in blocks.chunks(num_threads) {
                let bytes = blocks.par_iter().map(|block| block.bytes(weights));
                match bytes.collect::<Result<Vec<_>>>() {
                    // Of a writer that has stopped the error is told below.
                    Ok(bytes) => {
                        if sender.send(bytes).is_err() {
                            break;
                        }
                    }
                    Err(err) => {
                        made = Err(err);
                        break;
                    }
                }
            }
            drop(sender);
            let written = writer.join();
            made?;
            match written {
                Ok(written) => written.map_err(Error::from),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        })
    }

    fn blocks(&self, num_threads: usize) -> impl Iterator<Item = RowBlock<'_>> {
        let num_values = (VALUES_AT_ONCE / num_threads).max(MIN_VALUES);
        self.tensors.iter().flat_map(move |tensor| {
            let group = tensor.change().group();
            let rows = (num_values / tensor.width().max(1)).max(1);
            let rows = rows.next_multiple_of(group);
            let starts = (0..tensor.num_rows()).step_by(rows);
            starts.map(move |start| RowBlock {
                tensor,
                rows: start..(start + rows).min(tensor.num_rows()),
            })
        })
    }
}

impl RowBlock<'_> {
    /// As it is in the file, with what stands behind the last one.
    fn bytes(&self, weights: &dyn Weights) -> Result<Vec<u8>> {
        let tensor = self.tensor;
        let width = tensor.width();
        let (name, values) = match &tensor.content {
            GgufContent::Values(values) => {
                let own = self.rows.start * width..self.rows.end * width;
                (&tensor.name, values[own].to_vec())
            }
            GgufContent::Weight { name, change } => {
                let mut values = weights.rows(name, &tensor.shape, self.rows.clone())?;
                change.apply(&mut values, &tensor.shape);
                (name, values)
            }
        };
        let bytes = encode(tensor.dtype, values);
        let mut bytes = match bytes {
            Ok(bytes) => bytes,
            Err(err) => bail!("tensor {name} {err}: nothing was saved"),
        };
        if self.rows.end == tensor.num_rows() {
            let rest = padded(tensor.num_bytes()) - tensor.num_bytes();
            bytes.resize(bytes.len() + rest as usize, 0);
        }
        Ok(bytes)
    }
}

fn padded(num_bytes: u64) -> u64 {
    num_bytes.next_multiple_of(ALIGNMENT as u64)
}
