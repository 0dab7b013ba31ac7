//! A descriptor of cuDNN's backend interface: an object with numbered attributes, fixed by finalizing it.

use crate::cuda::cudnn_library::{Library, Opaque};
use candle_core::Result;
use std::ffi::{c_int, c_void};

/// An attribute's value, as cuDNN's types have it; numbers of an enumeration are those of `cudnn.h`.
#[derive(Clone, Copy)]
pub(super) enum Value<'a> {
    Handle(Opaque),
    DataType(c_int),
    Bool(bool),
    Ints(&'a [i64]),
    Pointers(&'a [*mut c_void]),
    HeuristicMode(c_int),
    PointwiseMode(c_int),
    Descriptors(&'a [Opaque]),
    ReductionOperator(c_int),
    #[cfg(test)]
    Text(&'a str),
}

/// Number of the type of a descriptor as a value.
const DESCRIPTOR_TYPE: c_int = 15;
/// Number of the type of 64-bit integers.
const INT_TYPE: c_int = 3;

impl Value<'_> {
    /// Number of the type, number of values, and where they are.
    fn raw(&self) -> (c_int, usize, *const c_void) {
        fn one<T>(value: &T) -> (usize, *const c_void) {
            (1, (&raw const *value).cast())
        }
        let (kind, (len, values)) = match self {
            Self::Handle(handle) => (0, one(handle)),
            Self::DataType(number) => (1, one(number)),
            Self::Bool(value) => (2, one(value)),
            Self::Ints(values) => (INT_TYPE, (values.len(), values.as_ptr().cast())),
            Self::Pointers(values) => (6, (values.len(), values.as_ptr().cast())),
            Self::HeuristicMode(number) => (8, one(number)),
            Self::PointwiseMode(number) => (14, one(number)),
            Self::Descriptors(values) => (DESCRIPTOR_TYPE, (values.len(), values.as_ptr().cast())),
            Self::ReductionOperator(number) => (18, one(number)),
            #[cfg(test)]
            Self::Text(text) => (24, (text.len(), text.as_ptr().cast())),
        };
        (kind, len, values)
    }
}

/// Owns a descriptor.
pub(super) struct Descriptor {
    library: &'static Library,
    raw: Opaque,
}

// SAFETY: a descriptor is memory of the process, tied to no thread; it is used by one thread at a time.
unsafe impl Send for Descriptor {}

impl Descriptor {
    /// An empty one; `kind` is its number in `cudnnBackendDescriptorType_t`.
    pub(super) fn new(library: &'static Library, kind: c_int) -> Result<Self> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: cuDNN writes the new descriptor's address.
        let status = unsafe { (library.create_descriptor)(kind, &raw mut raw) };
        library.check(status, &format!("creating a descriptor of type {kind}"))?;
        Ok(Self { library, raw })
    }

    /// One with these attributes, by number, finalized.
    pub(super) fn of(
        library: &'static Library,
        kind: c_int,
        attributes: &[(c_int, Value<'_>)],
    ) -> Result<Self> {
        let descriptor = Self::new(library, kind)?;
        for (attribute, value) in attributes {
            let (value_kind, len, values) = value.raw();
            // SAFETY: the values are as many, and of the type, as said; handles and descriptors among them are alive.
            let status = unsafe {
                (library.set_attribute)(descriptor.raw, *attribute, value_kind, len as i64, values)
            };
            library.check(
                status,
                &format!("attribute {attribute} of a descriptor of type {kind}"),
            )?;
        }
        // SAFETY: the descriptor is alive.
        let status = unsafe { (library.finalize)(descriptor.raw) };
        library.check(status, &format!("finalizing a descriptor of type {kind}"))?;
        Ok(descriptor)
    }

    /// The descriptor for a call or an attribute; alive as long as `self`.
    pub(super) fn raw(&self) -> Opaque {
        self.raw
    }

    /// An attribute that is one integer.
    pub(super) fn int(&self, attribute: c_int) -> Result<i64> {
        let (mut value, mut count) = (0i64, 0i64);
        // SAFETY: cuDNN writes at most one 64-bit integer, and how many there are.
        let status = unsafe {
            (self.library.get_attribute)(
                self.raw,
                attribute,
                INT_TYPE,
                1,
                &raw mut count,
                (&raw mut value).cast(),
            )
        };
        self.library
            .check(status, &format!("reading attribute {attribute}"))?;
        Ok(value)
    }

    /// An attribute that is a list of descriptors of type `kind`.
    pub(super) fn descriptors(&self, attribute: c_int, kind: c_int) -> Result<Vec<Self>> {
        let mut count = 0i64;
        let doing = format!("reading attribute {attribute}");
        // SAFETY: cuDNN writes how many there are, and none of them.
        let status = unsafe {
            (self.library.get_attribute)(
                self.raw,
                attribute,
                DESCRIPTOR_TYPE,
                0,
                &raw mut count,
                std::ptr::null_mut(),
            )
        };
        self.library.check(status, &doing)?;
        let mut list = (0..count)
            .map(|_| Self::new(self.library, kind))
            .collect::<Result<Vec<_>>>()?;
        let mut raw: Vec<Opaque> = list.iter().map(Self::raw).collect();
        // SAFETY: cuDNN fills at most as many descriptors as there are, which are alive and not finalized.
        let status = unsafe {
            (self.library.get_attribute)(
                self.raw,
                attribute,
                DESCRIPTOR_TYPE,
                count,
                &raw mut count,
                raw.as_mut_ptr().cast(),
            )
        };
        self.library.check(status, &doing)?;
        list.truncate(usize::try_from(count).unwrap_or_default());
        Ok(list)
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: it is this value's alone. Nothing can be done about a failure.
        unsafe { (self.library.destroy_descriptor)(self.raw) };
    }
}
