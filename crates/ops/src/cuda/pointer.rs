//! Arguments of a kernel: scalars, and pointers to values on the GPU that live at least as long as the borrow they carry.

use candle_core::cuda_backend::cudarc::driver::DeviceRepr;
use candle_core::cuda_backend::cudarc::driver::sys::CUdeviceptr;
use std::marker::PhantomData;

/// Values that a kernel reads.
#[derive(Clone, Copy)]
pub(crate) struct In<'a, T>(CUdeviceptr, PhantomData<&'a T>);

/// Values that a kernel writes, and may read.
#[derive(Clone, Copy)]
pub(crate) struct Out<'a, T>(CUdeviceptr, PhantomData<&'a T>);

/// An input that may be absent.
pub(crate) type OptIn<'a, T> = Option<In<'a, T>>;

/// An output that may be absent.
pub(crate) type OptOut<'a, T> = Option<Out<'a, T>>;

impl<T> In<'_, T> {
    pub(crate) fn new(address: CUdeviceptr) -> Self {
        Self(address, PhantomData)
    }

    pub(crate) fn address(&self) -> CUdeviceptr {
        self.0
    }
}

impl<'a, T> Out<'a, T> {
    pub(crate) fn new(address: CUdeviceptr) -> Self {
        Self(address, PhantomData)
    }

    pub(crate) fn address(&self) -> CUdeviceptr {
        self.0
    }

    /// The same values as an input: of the next launch, or of this one where the kernel says that it may be.
    pub(crate) fn read(&self) -> In<'a, T> {
        In(self.0, PhantomData)
    }
}

/// What a kernel receives for an argument.
pub(crate) trait Argument {
    type Raw: DeviceRepr;

    fn raw(&self) -> Self::Raw;
}

impl<T> Argument for In<'_, T> {
    type Raw = CUdeviceptr;

    fn raw(&self) -> CUdeviceptr {
        self.0
    }
}

impl<T> Argument for Out<'_, T> {
    type Raw = CUdeviceptr;

    fn raw(&self) -> CUdeviceptr {
        self.0
    }
}

impl<P: Argument<Raw = CUdeviceptr>> Argument for Option<P> {
    type Raw = CUdeviceptr;

    fn raw(&self) -> CUdeviceptr {
        self.as_ref().map_or(0, Argument::raw)
    }
}

macro_rules! scalars {
    ($($scalar:ty)*) => {
        $(impl Argument for $scalar {
            type Raw = Self;

            fn raw(&self) -> Self {
                *self
            }
        })*
    };
}

scalars!(f32 f64 i32 i64 u32);
