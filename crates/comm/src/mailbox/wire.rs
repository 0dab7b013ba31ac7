//! Messages on a connection between two ranks.
//!
//! A frame is `u32 kind, u32 head_len` (little endian), the head, and for a message the elements of its tensors one after the other, in
//! the byte order of the hosts, which is that of all machines that this runs on. The head of a message is its tag and, for each tensor,
//! its dtype, the number of its dims and these, all u64; that of a farewell is text.

use std::io::{Error, ErrorKind, Read, Result, Write};

use candle_core::{DType, Device, Tensor};

use crate::element::{self, Element, with_element};
use crate::{bytes, message_of};

/// The longest head.
const MAX_HEAD_BYTES: usize = 1 << 20;

/// The largest tensor, in bytes: what is longer is no tensor but noise.
const MAX_TENSOR_BYTES: u64 = 1 << 40;

const DTYPES: [DType; 9] = [
    DType::F32,
    DType::F64,
    DType::BF16,
    DType::F16,
    DType::U8,
    DType::U32,
    DType::I16,
    DType::I32,
    DType::I64,
];

const BEAT: u32 = 0;
const MAIL: u32 = 1;
const FAREWELL: u32 = 2;
const NOTED: u32 = 3;

/// What comes over a connection.
pub(super) enum Frame {
    /// "I am alive."
    Beat,
    /// A message: its tag, and its tensors, contiguous and on the CPU.
    Mail(u64, Vec<Tensor>),
    /// "I send nothing any more", because of this, or because all is done.
    Farewell(Option<String>),
    /// "I have read your farewell", and so all that came before it.
    Noted,
}

impl Frame {
    /// Writes the frame, tensors from where they are.
    pub fn write(&self, to: &mut impl Write) -> Result<()> {
        match self {
            Self::Beat => write_head(to, BEAT, &[]),
            Self::Noted => write_head(to, NOTED, &[]),
            Self::Farewell(why) => {
                let text = why.as_deref().unwrap_or_default().as_bytes();
                write_head(to, FAREWELL, &text[..text.len().min(MAX_HEAD_BYTES)])
            }
            Self::Mail(tag, tensors) => {
                write_head(to, MAIL, &head_of(*tag, tensors)?)?;
                tensors.iter().try_for_each(|xs| {
                    with_element!(xs.dtype(), write_tensor(to, xs)).map_err(io_error)
                })
            }
        }
    }

    pub fn read(from: &mut impl Read) -> Result<Self> {
        let (kind, len) = (read_u32(from)?, read_u32(from)? as usize);
        if len > MAX_HEAD_BYTES {
            return Err(invalid(format!("a head of {len} bytes")));
        }
        let mut head = vec![0; len];
        from.read_exact(&mut head)?;
        match kind {
            BEAT => Ok(Self::Beat),
            NOTED => Ok(Self::Noted),
            FAREWELL => {
                let why = String::from_utf8_lossy(&head).into_owned();
                Ok(Self::Farewell(Some(why).filter(|why| !why.is_empty())))
            }
            MAIL => read_mail(from, &head),
            kind => Err(invalid(format!("a frame of kind {kind}"))),
        }
    }
}

fn head_of(tag: u64, tensors: &[Tensor]) -> Result<Vec<u8>> {
    let mut head = vec![tag];
    for xs in tensors {
        let dtype = DTYPES.iter().position(|dtype| *dtype == xs.dtype());
        let dtype = dtype.ok_or_else(|| invalid(format!("a tensor of {:?}", xs.dtype())))?;
        head.extend([dtype as u64, xs.rank() as u64]);
        head.extend(xs.dims().iter().map(|dim| *dim as u64));
    }
    let head: Vec<u8> = head.into_iter().flat_map(u64::to_le_bytes).collect();
    match head.len() > MAX_HEAD_BYTES {
        true => Err(invalid(format!("a message of {} tensors", tensors.len()))),
        false => Ok(head),
    }
}

fn read_mail(from: &mut impl Read, head: &[u8]) -> Result<Frame> {
    let cut = || invalid("a message whose head is cut off".into());
    let mut words = head
        .as_chunks::<8>()
        .0
        .iter()
        .map(|word| u64::from_le_bytes(*word));
    let tag = words.next().ok_or_else(cut)?;
    let mut tensors = Vec::new();
    while let Some(dtype) = words.next() {
        let dtype = usize::try_from(dtype).ok().and_then(|at| DTYPES.get(at));
        let dtype = *dtype.ok_or_else(|| invalid("a tensor of no known dtype".into()))?;
        let num_dims = words.next().ok_or_else(cut)?;
        let dims = (0..num_dims).map(|_| words.next());
        let dims: Vec<u64> = dims.collect::<Option<_>>().ok_or_else(cut)?;
        let mut dims_left = dims.iter();
        let item_bytes = dtype.size_in_bytes() as u64;
        let num_bytes = dims_left.try_fold(item_bytes, |product, dim| product.checked_mul(*dim));
        if num_bytes.is_none_or(|num_bytes| num_bytes > MAX_TENSOR_BYTES) {
            return Err(invalid(format!("a tensor of shape {dims:?}")));
        }
        let dims: Vec<usize> = dims.into_iter().map(|dim| dim as usize).collect();
        tensors.push(with_element!(dtype, read_tensor(from, dims)).map_err(io_error)?);
    }
    Ok(Frame::Mail(tag, tensors))
}

fn write_tensor<T: Element>(to: &mut impl Write, xs: &Tensor) -> candle_core::Result<()> {
    let all = (0, xs.elem_count());
    Ok(element::read(xs, all, |xs: &[T]| {
        to.write_all(bytes::of(xs))
    })??)
}

/// Reads elements to where they stay. The system gives their memory as they arrive.
fn read_tensor<T: Element>(from: &mut impl Read, dims: Vec<usize>) -> candle_core::Result<Tensor> {
    let mut elements = T::zeros(dims.iter().product());
    from.read_exact(bytes::of_mut(&mut elements))?;
    Tensor::from_vec(elements, dims, &Device::Cpu)
}

fn write_head(to: &mut impl Write, kind: u32, head: &[u8]) -> Result<()> {
    let len = u32::try_from(head.len()).map_err(Error::other)?;
    to.write_all(&[&kind.to_le_bytes(), &len.to_le_bytes(), head].concat())
}

fn read_u32(from: &mut impl Read) -> Result<u32> {
    let mut bytes = [0; 4];
    from.read_exact(&mut bytes)?;
    Ok(u32::from_le_bytes(bytes))
}

fn io_error(error: candle_core::Error) -> Error {
    match error {
        candle_core::Error::Io(error) => error,
        other => Error::other(message_of(&other)),
    }
}

fn invalid(what: String) -> Error {
    Error::new(ErrorKind::InvalidData, what)
}
