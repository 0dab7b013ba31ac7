//! Named tensors in memory, and how far two sets of them are apart.

use std::collections::BTreeMap;
use std::path::Path;

use candle_core::{DType, Device};

/// Values by Hugging Face name, row-major.
pub type Tensors = BTreeMap<String, Vec<f32>>;

pub fn read_tensors(path: &Path) -> Tensors {
    let tensors = candle_core::safetensors::load(path, &Device::Cpu).unwrap();
    let values = |tensor: candle_core::Tensor| {
        let flat = tensor.to_dtype(DType::F32).unwrap().flatten_all().unwrap();
        flat.to_vec1::<f32>().unwrap()
    };
    tensors
        .into_iter()
        .map(|(name, tensor)| (name, values(tensor)))
        .collect()
}

/// ‖a − b‖ / ‖b‖, largest over all tensors, with the tensor's name.
pub fn largest_difference(ours: &Tensors, reference: &Tensors) -> (f64, String) {
    let names = |tensors: &Tensors| tensors.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(ours), names(reference));
    let mut largest = (0.0, String::new());
    for (name, expected) in reference {
        let values = &ours[name];
        assert_eq!(values.len(), expected.len(), "{name}");
        let pairs = values.iter().zip(expected);
        let difference: f64 = pairs.map(|(a, b)| f64::from(a - b).powi(2)).sum();
        let norm: f64 = expected.iter().map(|b| f64::from(*b).powi(2)).sum();
        // Where the reference is zero (queries and keys of a single position) nothing but zero will do.
        let relative = if difference == 0.0 {
            0.0
        } else {
            (difference / norm).sqrt()
        };
        assert!(relative.is_finite(), "{name}: {difference} / {norm}");
        if relative > largest.0 {
            largest = (relative, name.clone());
        }
    }
    largest
}

pub fn assert_close(ours: &Tensors, reference: &Tensors, tolerance: f64, what: &str) {
    let (difference, name) = largest_difference(ours, reference);
    assert!(
        difference <= tolerance,
        "{what}: {name} is off by {difference:e}, more than {tolerance:e}"
    );
}
