//! Values in the types that files have: numbers, and candle's blocks.

use candle_core::quantized::{QStorage, QTensor};
use candle_core::{DType, Device, Error, Result, Tensor};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::GgmlDType;

/// The number by which a file names a type.
pub(super) fn type_id(dtype: GgmlDType) -> u32 {
    match dtype {
        GgmlDType::F32 => 0,
        GgmlDType::F16 => 1,
        GgmlDType::Q4_0 => 2,
        GgmlDType::Q4_1 => 3,
        GgmlDType::Q5_0 => 6,
        GgmlDType::Q5_1 => 7,
        GgmlDType::Q8_0 => 8,
        GgmlDType::Q8_1 => 9,
        GgmlDType::Q2K => 10,
        GgmlDType::Q3K => 11,
        GgmlDType::Q4K => 12,
        GgmlDType::Q5K => 13,
        GgmlDType::Q6K => 14,
        GgmlDType::Q8K => 15,
        GgmlDType::BF16 => 30,
    }
}

/// A type as llama.cpp calls it: f16, q4_k.
pub fn type_name(dtype: GgmlDType) -> String {
    let name = format!("{dtype:?}").to_lowercase();
    match name.strip_suffix('k') {
        Some(bits) => format!("{bits}_k"),
        None => name,
    }
}

/// What so many values take.
pub(super) fn num_bytes(dtype: GgmlDType, num_values: usize) -> usize {
    num_values / dtype.block_size() * dtype.type_size()
}

/// Whether values are blocks with a scale for each 32 that candle finds by their range.
fn has_ranges(dtype: GgmlDType) -> bool {
    matches!(dtype, GgmlDType::Q4K | GgmlDType::Q5K)
}

/// An error if a value is beyond what f16 holds, of which the scales of blocks are, too.
fn check_f16(values: &[f32]) -> std::result::Result<(), String> {
    let largest = f16::MAX.to_f32();
    match values.iter().find(|value| value.abs() > largest) {
        None => Ok(()),
        Some(value) => Err(format!(
            "has the value {value}, which is beyond f16's largest, {largest}"
        )),
    }
}

/// The bytes of values, whole blocks of them.
///
/// # Errors
/// Values that the type does not hold: a part of a sentence.
pub(super) fn encode(
    dtype: GgmlDType,
    mut values: Vec<f32>,
) -> std::result::Result<Vec<u8>, String> {
    if !values.iter().all(|value| value.is_finite()) {
        return Err("has values that are NaN or infinite".to_string());
    }
    match dtype {
        GgmlDType::F32 => Ok(bytemuck::cast_slice(&values).to_vec()),
        GgmlDType::F16 => {
            check_f16(&values)?;
            let mut narrow = vec![f16::ZERO; values.len()];
            narrow.convert_from_f32_slice(&values);
            Ok(bytemuck::cast_slice(&narrow).to_vec())
        }
        GgmlDType::BF16 => {
            let mut narrow = vec![bf16::ZERO; values.len()];
            narrow.convert_from_f32_slice(&values);
            Ok(bytemuck::cast_slice(&narrow).to_vec())
        }
        _ => {
            check_f16(&values)?;
            // Without a range candle would make zeros of them.
            for block in values.chunks_mut(32).filter(|_| has_ranges(dtype)) {
                if block.iter().all(|value| *value == block[0]) {
                    block[0] *= 0.999;
                }
            }
            let len = values.len();
            let quantized = Tensor::from_vec(values, len, &Device::Cpu)
                .and_then(|values| QTensor::quantize(&values, dtype)?.data().map(Into::into));
            quantized.map_err(message_of)
        }
    }
}

/// What an error says, without the way to it.
pub(super) fn message_of(err: Error) -> String {
    match err {
        Error::WithBacktrace { inner, .. } => inner.to_string(),
        err => err.to_string(),
    }
}

/// The values of bytes, whole blocks of them.
///
/// # Errors
/// A type of blocks that candle does not read.
pub(super) fn decode(dtype: GgmlDType, bytes: &[u8]) -> Result<Vec<f32>> {
    let len = bytes.len() / dtype.type_size() * dtype.block_size();
    let plain = match dtype {
        GgmlDType::F32 => DType::F32,
        GgmlDType::F16 => DType::F16,
        GgmlDType::BF16 => DType::BF16,
        _ => {
            let storage = QStorage::from_data(bytes.into(), &Device::Cpu, dtype)?;
            return QTensor::new(storage, len)?
                .dequantize(&Device::Cpu)?
                .to_vec1();
        }
    };
    let values = Tensor::from_raw_buffer(bytes, plain, &[len], &Device::Cpu)?;
    values.to_dtype(DType::F32)?.to_vec1()
}

#[cfg(test)]
mod tests {
    use super::{GgmlDType, decode, encode};

    /// Of every type: values near those that went in, equal ones and zeros too.
    #[test]
    fn values_are_near() {
        let values: Vec<f32> = (0..1024)
            .map(|place| match place / 256 {
                0 => 1.5,
                1 => -0.75,
                2 => 0.0,
                _ => ((place * 37) % 101) as f32 / 50.0 - 1.0,
            })
            .collect();
        for (dtype, most) in [
            (GgmlDType::F32, 0.0),
            (GgmlDType::F16, 1e-3),
            (GgmlDType::BF16, 1e-2),
            (GgmlDType::Q8_0, 1e-2),
            (GgmlDType::Q6K, 0.05),
            (GgmlDType::Q5_0, 0.1),
            (GgmlDType::Q5_1, 0.1),
            (GgmlDType::Q5K, 0.1),
            (GgmlDType::Q4_0, 0.2),
            (GgmlDType::Q4K, 0.2),
        ] {
            let bytes = encode(dtype, values.clone()).unwrap();
            let found = decode(dtype, &bytes).unwrap();
            let largest = found.iter().zip(&values).map(|(a, b)| (a - b).abs());
            let largest = largest.fold(0.0, f32::max);
            assert!(
                found.len() == values.len() && largest <= most,
                "{dtype:?}: {largest}"
            );
        }
        for dtype in [GgmlDType::F16, GgmlDType::Q8_0, GgmlDType::Q4K] {
            let mut large = values.clone();
            large[1000] = 1e6;
            let err = encode(dtype, large).unwrap_err();
            assert!(err.contains("1000000") && err.contains("65504"), "{err}");
        }
    }
}
