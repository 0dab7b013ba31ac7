//! The element types that ranks exchange, and how their values are combined.

use std::alloc::{Layout as MemoryLayout, handle_alloc_error};

use bytemuck::{Pod, try_zeroed_vec};
use candle_core::{
    CpuStorage, DType, Device, InplaceOp1, Layout, Result, Storage, Tensor, WithDType, bail,
};
use half::{bf16, f16};

use crate::error::argument;
use crate::memory::device::name as device_name;
use crate::{Operation, ReduceOp};

/// An element type that ranks exchange.
pub(crate) trait Element: WithDType + Pod {
    /// What sums are accumulated in.
    type Acc: Element<Acc = Self::Acc>;
    /// Zeroed memory, lazily where the system can. The process ends, as by `vec!`, where there is none: a panic would end
    /// one thread alone, for which others wait.
    fn zeros(len: usize) -> Vec<Self> {
        try_zeroed_vec(len).unwrap_or_else(|()| {
            let layout = MemoryLayout::array::<Self>(len);
            handle_alloc_error(layout.unwrap_or(MemoryLayout::new::<Self>()))
        })
    }
    fn slice_mut(storage: &mut CpuStorage) -> Option<&mut [Self]>;
    fn widen(self) -> Self::Acc;
    fn round(acc: Self::Acc) -> Self;
    fn plus(a: Self::Acc, b: Self::Acc) -> Self::Acc;
    fn times(a: Self::Acc, b: Self::Acc) -> Self::Acc;
    fn larger(a: Self::Acc, b: Self::Acc) -> Self::Acc;
    fn smaller(a: Self::Acc, b: Self::Acc) -> Self::Acc;
    /// A sum of so many values, divided by their number; of integers [none](check_reduces).
    fn average(sum: Self::Acc, count: usize) -> Self::Acc;
}

macro_rules! element {
    ($ty:ty, $variant:ident, $acc:ty, $widen:expr, $round:expr, $sum:expr, $prod:expr, $max:expr, $min:expr, $avg:expr) => {
        impl Element for $ty {
            type Acc = $acc;
            fn slice_mut(storage: &mut CpuStorage) -> Option<&mut [Self]> {
                match storage {
                    CpuStorage::$variant(values) => Some(values),
                    _ => None,
                }
            }
            #[inline(always)]
            fn widen(self) -> $acc {
                $widen(self)
            }
            #[inline(always)]
            fn round(acc: $acc) -> Self {
                $round(acc)
            }
            #[inline(always)]
            fn plus(a: $acc, b: $acc) -> $acc {
                $sum(a, b)
            }
            #[inline(always)]
            fn times(a: $acc, b: $acc) -> $acc {
                $prod(a, b)
            }
            #[inline(always)]
            fn larger(a: $acc, b: $acc) -> $acc {
                $max(a, b)
            }
            #[inline(always)]
            fn smaller(a: $acc, b: $acc) -> $acc {
                $min(a, b)
            }
            #[inline(always)]
            fn average(sum: $acc, count: usize) -> $acc {
                $avg(sum, count)
            }
        }
    };
    (float $ty:ident $variant:ident, in $acc:ident by $widen:expr, $round:expr) => {
        element!(
            $ty,
            $variant,
            $acc,
            $widen,
            $round,
            |a, b| a + b,
            |a, b| a * b,
            first_or_nan!($acc, >),
            first_or_nan!($acc, <),
            |sum, count| sum / count as $acc
        );
    };
    (integer $($ty:ident $variant:ident),*) => {
        $(element!(
            $ty,
            $variant,
            $ty,
            |x| x,
            |x| x,
            $ty::wrapping_add,
            $ty::wrapping_mul,
            Ord::max,
            Ord::min,
            |sum, _| sum
        );)*
    };
}

/// `f32::max` and `min` would drop a NaN, and a NaN on one rank must be seen by all.
macro_rules! first_or_nan {
    ($ty:ident, $compare:tt) => {
        |a: $ty, b: $ty| if a $compare b || a.is_nan() { a } else { b }
    };
}

element!(float f32 F32, in f32 by |x| x, |x| x);
element!(float f64 F64, in f64 by |x| x, |x| x);
element!(float bf16 BF16, in f32 by bf16::to_f32, bf16::from_f32);
element!(float f16 F16, in f32 by f16::to_f32, f16::from_f32);
element!(integer u8 U8, u32 U32, i16 I16, i32 I32, i64 I64);

/// Calls `$run::<T>($arg, ..)` with the element type of `$dtype`.
macro_rules! with_element {
    ($dtype:expr, $($run:ident)::+($($arg:expr),*)) => {
        match $dtype {
            candle_core::DType::F32 => $($run)::+::<f32>($($arg),*),
            candle_core::DType::F64 => $($run)::+::<f64>($($arg),*),
            candle_core::DType::BF16 => $($run)::+::<half::bf16>($($arg),*),
            candle_core::DType::F16 => $($run)::+::<half::f16>($($arg),*),
            candle_core::DType::U8 => $($run)::+::<u8>($($arg),*),
            candle_core::DType::U32 => $($run)::+::<u32>($($arg),*),
            candle_core::DType::I16 => $($run)::+::<i16>($($arg),*),
            candle_core::DType::I32 => $($run)::+::<i32>($($arg),*),
            candle_core::DType::I64 => $($run)::+::<i64>($($arg),*),
            dtype => Err($crate::reduction::element::unsupported(dtype).into()),
        }
    };
}
pub(crate) use with_element;

pub(crate) fn unsupported(dtype: DType) -> candle_core::Error {
    argument(format!(
        "ranks exchange f32, f64, bf16, f16, u8, u32, i16, i32 and i64, not {}",
        dtype.as_str()
    ))
}

/// An error unless a rank on `device` can exchange `xs`.
pub(crate) fn check(xs: &Tensor, rank: usize, device: &Device) -> Result<()> {
    if !xs.device().same_device(device) {
        let (own, got) = (device_name(device), device_name(xs.device()));
        let other = match own == got {
            true => " opened a second time, with another stream",
            false => "",
        };
        return Err(argument(format!(
            "rank {rank} exchanges tensors on {own}, its device, got one on {got}{other}\n\
             hint: make tensors on the group's `device()`, or move them there by `to_device`"
        )));
    }
    if !xs.is_contiguous() {
        return Err(argument(format!(
            "a communicator needs contiguous tensors, got shape {:?} with strides {:?}",
            xs.dims(),
            xs.stride()
        )));
    }
    check_dtype(xs.dtype())
}

/// An error unless ranks exchange `dtype`.
pub(crate) fn check_dtype(dtype: DType) -> Result<()> {
    fn known<T: Element>() -> Result<()> {
        Ok(())
    }
    with_element!(dtype, known())
}

/// What values of `dtype` are accumulated in.
#[cfg(feature = "mpi")]
pub(crate) fn accumulated(dtype: DType) -> DType {
    match dtype {
        DType::BF16 | DType::F16 => DType::F32,
        dtype => dtype,
    }
}

/// An error unless `dtype` can be reduced on `device`, if that is what `operation` does.
pub(crate) fn check_reduces(operation: &Operation, dtype: DType, device: &Device) -> Result<()> {
    if operation.reduce_op() == Some(ReduceOp::Avg) && dtype.is_int() {
        return Err(argument(format!(
            "{operation} of {}: an average of integers is none\nhint: take the sum, or averages of f32 or f64",
            dtype.as_str()
        )));
    }
    if operation.reduce_op().is_some()
        && !device.is_cpu()
        && matches!(dtype, DType::I16 | DType::I32)
    {
        return Err(argument(format!(
            "{operation} of {} works on the CPU only: candle adds and compares no such integers on GPUs\n\
             hint: use i64 or u32",
            dtype.as_str()
        )));
    }
    Ok(())
}

/// Sums on a GPU divided by the number of summands, as on the CPU: `Tensor / f64` would multiply by a rounded reciprocal.
#[cfg(feature = "cuda")]
pub(crate) fn divide(xs: &Tensor, count: usize) -> Result<Tensor> {
    let count = Tensor::new(count as f64, &Device::Cpu)?.to_dtype(xs.dtype())?;
    xs.broadcast_div(&count.to_device(xs.device())?)
}

/// What `read` makes of `len` elements of the contiguous `xs`, from element `first` on.
pub(crate) fn read<T: Element, R>(
    xs: &Tensor,
    part: (usize, usize),
    read: impl FnOnce(&[T]) -> R,
) -> Result<R> {
    read_all([xs], Some(part), |all| read(all[0]))
}

/// What `read` makes of `len` elements of each of these contiguous tensors, from element `first` on; of all of each if there is no `part`.
pub(crate) fn read_all<'a, T: Element, R>(
    tensors: impl IntoIterator<Item = &'a Tensor>,
    part: Option<(usize, usize)>,
    read: impl FnOnce(&[&[T]]) -> R,
) -> Result<R> {
    let tensors = tensors.into_iter();
    let locked: Vec<_> = tensors.map(Tensor::storage_and_layout).collect();
    let slices = locked.iter().map(|(storage, layout)| {
        let Storage::Cpu(storage) = &**storage else {
            bail!("a tensor is not in host memory");
        };
        let Some((start, end)) = layout.contiguous_offsets() else {
            bail!("a tensor is not contiguous");
        };
        let (first, len) = part.unwrap_or((0, end - start));
        match storage.as_slice::<T>()?[start..end].get(first..first + len) {
            Some(elements) => Ok(elements),
            None => bail!("a tensor is shorter than its shape"),
        }
    });
    Ok(read(&slices.collect::<Result<Vec<_>>>()?))
}

/// Overwrites the elements of `xs` from `first` on. The storage is locked only meanwhile: it may be part of a larger one, which
/// others use.
pub(crate) fn write<T: Element>(xs: &Tensor, first: usize, values: &[T]) -> Result<()> {
    xs.inplace_op1(&Write { first, values })
}

struct Write<'a, T> {
    first: usize,
    values: &'a [T],
}

impl<T: Element> InplaceOp1 for Write<'_, T> {
    fn name(&self) -> &'static str {
        "write"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        let start = layout.start_offset() + self.first;
        let all = T::slice_mut(storage);
        match all.and_then(|all| all.get_mut(start..start + self.values.len())) {
            Some(place) => place.copy_from_slice(self.values),
            None => bail!("a result does not fit into the tensor that it is to be in"),
        }
        Ok(())
    }
}
