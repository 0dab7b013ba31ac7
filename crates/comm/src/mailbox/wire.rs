//! Messages on a connection between two ranks.
//!
//! A frame is `u32 kind, u32 head_len` (little endian), the head, and for a message the elements of its tensors one after the other, in
//! the byte order of the hosts, which is that of all machines that this runs on. Heads are text: that of a farewell says why, before that, each with a zero byte behind
//! it, because of which rank, and why that failed; that of a message has its tag and the dtype and dims of each tensor, as `7;f32 2 3;u8 5`.

use std::io::{Error, ErrorKind, Read, Result, Write};

use candle_core::{DType, Device, Tensor};

use super::Departure;
use crate::memory::bytes;
use crate::message_of;
use crate::reduction::element::{self, Element, with_element};

/// The longest head.
const MAX_HEAD_BYTES: usize = 1 << 20;

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
    /// "I send nothing any more", because of this, or because all is done; and the rank because of which that is so, if I know one.
    Farewell {
        why: Option<String>,
        because_of: Option<Departure>,
    },
    /// "I have read your farewell", and so all that came before it.
    Noted,
}

impl Frame {
    /// Writes the frame, tensors from where they are.
    pub fn write(&self, to: &mut impl Write) -> Result<()> {
        match self {
            Self::Beat => write_head(to, BEAT, b""),
            Self::Noted => write_head(to, NOTED, b""),
            Self::Farewell { why, because_of } => {
                let mut text = why.clone().unwrap_or_default().replace('\0', " ");
                if let Some(Departure { rank, why, .. }) = because_of {
                    let why = why.as_deref().unwrap_or_default().replace('\0', " ");
                    // There must be room for the words of the rank itself.
                    let why: String = why.chars().take(MAX_HEAD_BYTES / 16).collect();
                    text = format!("{rank}\0{why}\0{text}");
                }
                let text = text.as_bytes();
                write_head(to, FAREWELL, &text[..text.len().min(MAX_HEAD_BYTES)])
            }
            Self::Mail(tag, tensors) => {
                write_head(to, MAIL, head_of(*tag, tensors)?.as_bytes())?;
                tensors.iter().try_for_each(|xs| {
                    with_element!(xs.dtype(), write_tensor(to, xs)).map_err(io_error)
                })
            }
        }
    }

    /// Reads the next frame. A tensor of more bytes than the `largest` that is expected when its head has come is an error, before there is
    /// memory for any of its message.
    pub fn read(from: &mut impl Read, largest: impl Fn() -> usize) -> Result<Self> {
        let (kind, len) = (read_u32(from)?, read_u32(from)? as usize);
        if len > MAX_HEAD_BYTES {
            return Err(invalid(format!("a head of {len} bytes")));
        }
        let mut head = vec![0; len];
        from.read_exact(&mut head)?;
        let head = String::from_utf8_lossy(&head);
        match kind {
            BEAT => Ok(Self::Beat),
            NOTED => Ok(Self::Noted),
            FAREWELL => {
                let some = |words: &str| Some(words.to_string()).filter(|it| !it.is_empty());
                let parts: Vec<&str> = head.split('\0').collect();
                let because_of = match parts[..] {
                    [rank, why, _] => rank.parse().ok().map(|rank| Departure {
                        rank,
                        why: some(why),
                        because_of: None,
                    }),
                    _ => None,
                };
                Ok(Self::Farewell {
                    why: parts.last().copied().and_then(some),
                    because_of,
                })
            }
            MAIL => read_mail(from, &head, largest()),
            kind => Err(invalid(format!("a frame of kind {kind}"))),
        }
    }
}

fn head_of(tag: u64, tensors: &[Tensor]) -> Result<String> {
    let mut head = tag.to_string();
    for xs in tensors {
        head += &format!(";{}", xs.dtype().as_str());
        xs.dims().iter().for_each(|dim| head += &format!(" {dim}"));
    }
    match head.len() > MAX_HEAD_BYTES {
        true => Err(invalid(format!("a message of {} tensors", tensors.len()))),
        false => Ok(head),
    }
}

/// The dtype and dims of the tensors of a message.
type Parts = Vec<(DType, Vec<usize>)>;

/// The tag of a message, and what its tensors are.
fn parse(head: &str) -> Option<(u64, Parts)> {
    let mut parts = head.split(';');
    let tag = parts.next()?.parse().ok()?;
    let tensors = parts.map(|part| {
        let mut words = part.split(' ');
        let dtype = words.next()?.parse().ok()?;
        let dims = words.map(|dim| dim.parse().ok());
        Some((dtype, dims.collect::<Option<_>>()?))
    });
    Some((tag, tensors.collect::<Option<_>>()?))
}

fn read_mail(from: &mut impl Read, head: &str, largest: usize) -> Result<Frame> {
    let parsed = parse(head).ok_or_else(|| invalid(format!("a message with the head {head:?}")));
    let (tag, parts) = parsed?;
    for (dtype, dims) in &parts {
        let mut left = dims.iter();
        let num_bytes = left.try_fold(dtype.size_in_bytes(), |product, dim| {
            product.checked_mul(*dim)
        });
        if num_bytes.is_none_or(|num_bytes| num_bytes > largest) {
            let dtype = dtype.as_str();
            return Err(invalid(format!(
                "a tensor of shape {dims:?} in {dtype}, expected at most {largest} bytes"
            )));
        }
    }
    let mut tensors = Vec::new();
    for (dtype, dims) in parts {
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
        other => invalid(message_of(&other)),
    }
}

fn invalid(what: String) -> Error {
    Error::new(ErrorKind::InvalidData, what)
}
