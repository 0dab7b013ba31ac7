//! Where the data of a message go.

use std::collections::VecDeque;
use std::sync::Arc;

use candle_core::{DType, Device, Shape, Tensor};

use super::context::Context;
use super::part::{Part, Region};
use super::sys::Comm;
use super::tags;
use super::transfer::Transfer;
use crate::Error;
use crate::bytes;
use crate::element::{Element, with_element};

type Result<T> = std::result::Result<T, Error>;

/// The data of one message are sent in parts of this size: MPI counts to 2^31 only.
const PART_BYTES: usize = 256 << 20;

/// The lengths of the parts of `len` elements.
fn part_lens<T>(len: usize) -> Vec<usize> {
    let longest = PART_BYTES / size_of::<T>();
    let starts = (0..len).step_by(longest);
    starts.map(|start| longest.min(len - start)).collect()
}

/// Starts to send `data`, in parts.
pub(super) fn send(
    (ctx, comm): (&Context, Comm),
    to: usize,
    data: Vec<u8>,
) -> Result<Vec<Transfer<Part<u8>>>> {
    let lens = part_lens::<u8>(data.len());
    let cut = Region::cut(data, &lens).ok_or_else(cut_is_wrong)?;
    let tag = tags::MESSAGE_DATA;
    let parts = cut.1.into_iter();
    parts
        .map(|part| Transfer::send(&ctx.mpi, comm, to, tag, part))
        .collect()
}

/// A place for a message's data, of whatever element type.
pub(super) trait Inbox: Send {
    /// How many bytes it takes.
    fn num_bytes(&self) -> usize;

    /// Takes the data from here.
    fn fill(&mut self, data: &[u8]) -> Result<()>;

    /// Starts to receive the data, in parts.
    fn receive(&mut self, ctx: &Context, comm: Comm, from: usize) -> Result<()>;

    /// Whether all data are here.
    fn poll(&mut self, ctx: &Context) -> Result<bool>;

    /// The data as a tensor.
    fn take(self: Box<Self>) -> Result<Tensor>;
}

/// A place for a tensor.
pub(super) fn inbox(shape: &Shape, dtype: DType) -> candle_core::Result<Box<dyn Inbox>> {
    fn typed<T: Element>(shape: &Shape) -> candle_core::Result<Box<dyn Inbox>> {
        Ok(Box::new(Typed::<T> {
            dims: shape.dims().to_vec(),
            elements: None,
            region: None,
            transfers: VecDeque::new(),
        }))
    }
    with_element!(dtype, typed(shape))
}

/// A place for data that nobody wants.
pub(super) fn discard(num_bytes: usize) -> Result<Box<dyn Inbox>> {
    inbox(&Shape::from(num_bytes), DType::U8).map_err(Error::of_backend)
}

struct Typed<T> {
    dims: Vec<usize>,
    elements: Option<Vec<T>>,
    region: Option<Arc<Region<T>>>,
    transfers: VecDeque<Transfer<Part<T>>>,
}

impl<T> Typed<T> {
    fn len(&self) -> usize {
        self.dims.iter().product()
    }
}

impl<T: Element> Inbox for Typed<T> {
    fn num_bytes(&self) -> usize {
        self.len() * size_of::<T>()
    }

    fn fill(&mut self, data: &[u8]) -> Result<()> {
        match bytes::to_elements(data, self.len()) {
            Some(elements) => self.elements = Some(elements),
            None => return Err(wrong_size(data.len(), self.num_bytes())),
        }
        Ok(())
    }

    fn receive(&mut self, ctx: &Context, comm: Comm, from: usize) -> Result<()> {
        let len = self.len();
        let cut = Region::cut(T::zeros(len), &part_lens::<T>(len));
        let (region, parts) = cut.ok_or_else(cut_is_wrong)?;
        self.region = Some(region);
        for part in parts {
            let tag = tags::MESSAGE_DATA;
            let transfer = Transfer::receive(&ctx.mpi, comm, from, tag, part)?;
            self.transfers.push_back(transfer);
        }
        Ok(())
    }

    fn poll(&mut self, ctx: &Context) -> Result<bool> {
        while let Some(transfer) = self.transfers.front_mut() {
            if !transfer.poll(&ctx.mpi)? {
                return Ok(false);
            }
            if let Some((part, got)) = self.transfers.pop_front().and_then(Transfer::take)
                && got != size_of_val(&*part)
            {
                return Err(wrong_size(got, size_of_val(&*part)));
            }
        }
        Ok(true)
    }

    fn take(self: Box<Self>) -> Result<Tensor> {
        let received = self.region.and_then(Region::into_vec);
        let elements = self.elements.or(received).ok_or_else(cut_is_wrong)?;
        Tensor::from_vec(elements, self.dims, &Device::Cpu).map_err(Error::of_backend)
    }
}

fn wrong_size(got: usize, expected: usize) -> Error {
    Error::Backend(format!(
        "a message has {got} bytes, expected {expected}\n\
         hint: all ranks must run the same version of the program"
    ))
}

fn cut_is_wrong() -> Error {
    Error::Backend("a message's parts do not make up the message".into())
}
