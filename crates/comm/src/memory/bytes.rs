//! Elements as bytes and back.

use crate::reduction::element::Element;

/// The bytes of these elements.
pub(crate) fn of<T: Element>(elements: &[T]) -> &[u8] {
    bytemuck::cast_slice(elements)
}

/// The bytes of these elements, to be written to.
pub(crate) fn of_mut<T: Element>(elements: &mut [T]) -> &mut [u8] {
    bytemuck::cast_slice_mut(elements)
}

/// The elements that these aligned bytes are.
#[cfg(feature = "mpi")]
pub(crate) fn elements<T: Element>(bytes: &[u8]) -> &[T] {
    bytemuck::cast_slice(bytes)
}

/// As [`elements`], to be written to.
#[cfg(feature = "mpi")]
pub(crate) fn elements_mut<T: Element>(bytes: &mut [u8]) -> &mut [T] {
    bytemuck::cast_slice_mut(bytes)
}

#[cfg(any(feature = "mpi", test))]
/// The elements that these bytes are; `None` unless there are exactly `len`.
pub(crate) fn to_elements<T: Element>(bytes: &[u8], len: usize) -> Option<Vec<T>> {
    (bytes.len() == len * size_of::<T>()).then(|| bytemuck::pod_collect_to_vec(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_and_back() {
        let elements = [1.5f64, -0.0, f64::NAN];
        let back = to_elements::<f64>(of(&elements), 3).unwrap();
        let bits = |xs: &[f64]| xs.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&back), bits(&elements));
        assert!(to_elements::<f64>(of(&elements), 2).is_none());
        assert!(to_elements::<u8>(&[], 0).unwrap().is_empty());
    }
}
