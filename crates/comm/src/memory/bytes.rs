//! Elements as bytes and back.
#![allow(unsafe_code)]

use crate::reduction::element::Element;

/// The bytes of these elements.
pub(crate) fn of<T: Element>(elements: &[T]) -> &[u8] {
    // SAFETY: every element type is a plain number, so all its bytes are initialised and a byte needs no alignment.
    unsafe { std::slice::from_raw_parts(elements.as_ptr().cast(), size_of_val(elements)) }
}

/// The bytes of these elements, to be written to.
pub(crate) fn of_mut<T: Element>(elements: &mut [T]) -> &mut [u8] {
    let len = size_of_val(elements);
    // SAFETY: as in `of`; all bit patterns are numbers, and the elements are borrowed mutably.
    unsafe { std::slice::from_raw_parts_mut(elements.as_mut_ptr().cast(), len) }
}

/// The elements that these aligned bytes are.
#[cfg(feature = "mpi")]
pub(crate) fn elements<T: Element>(bytes: &[u8]) -> &[T] {
    // SAFETY: all bit patterns are numbers.
    let (before, elements, after) = unsafe { bytes.align_to() };
    debug_assert!(before.is_empty() && after.is_empty());
    elements
}

/// As [`elements`], to be written to.
#[cfg(feature = "mpi")]
pub(crate) fn elements_mut<T: Element>(bytes: &mut [u8]) -> &mut [T] {
    // SAFETY: as in `elements`, and as in `of` the other way round; the bytes are borrowed mutably.
    let (before, elements, after) = unsafe { bytes.align_to_mut() };
    debug_assert!(before.is_empty() && after.is_empty());
    elements
}

#[cfg(any(feature = "mpi", test))]
/// The elements that these bytes are; `None` unless there are exactly `len`.
pub(crate) fn to_elements<T: Element>(bytes: &[u8], len: usize) -> Option<Vec<T>> {
    if bytes.len() != len * size_of::<T>() {
        return None;
    }
    let mut elements = T::zeros(len);
    of_mut(&mut elements).copy_from_slice(bytes);
    Some(elements)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_and_back() {
        let elements = [1.5f64, -0.0, f64::NAN];
        let back = to_elements::<f64>(of(&elements), 3).unwrap();
        assert_eq!(back.map_bits(), elements.to_vec().map_bits());
        assert!(to_elements::<f64>(of(&elements), 2).is_none());
        assert!(to_elements::<u8>(&[], 0).unwrap().is_empty());
    }

    trait MapBits {
        fn map_bits(&self) -> Vec<u64>;
    }

    impl MapBits for Vec<f64> {
        fn map_bits(&self) -> Vec<u64> {
            self.iter().map(|x| x.to_bits()).collect()
        }
    }
}
