//! Inputs that every rank can compute for every other rank, and naive references made of candle's own operations.

use candle_comm::{ProcessGroup, ReduceOp};
use candle_core::{DType, Device, Result, Tensor};

/// The dtypes that a backend must exchange.
pub const DTYPES: [DType; 7] = [
    DType::F32,
    DType::F64,
    DType::BF16,
    DType::F16,
    DType::U32,
    DType::I64,
    DType::U8,
];

/// A stream of pseudo-random bits (Knuth's 64-bit linear congruential generator, high bits).
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ 0x5DEE_CE66)
    }

    pub fn next(&mut self) -> u32 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as u32
    }
}

/// Rank `rank`'s input: floats in (-2, 2), integers in 0..40 so that five u8 fit into a u8.
pub fn input(seed: u64, rank: usize, dims: &[usize], dtype: DType) -> Result<Tensor> {
    let mut random = Random::new(seed * 1000 + rank as u64);
    let is_float = dtype.is_float();
    let values: Vec<f64> = (0..dims.iter().product())
        .map(|_| match is_float {
            true => f64::from(random.next() % 400_001) / 100_000.0 - 2.0,
            false => f64::from(random.next() % 40),
        })
        .collect();
    Tensor::from_vec(values, dims, &Device::Cpu)?.to_dtype(dtype)
}

/// `xs` on the rank's device.
pub fn on(world: &ProcessGroup, xs: &Tensor) -> Result<Tensor> {
    if xs.elem_count() > 0 {
        return xs.to_device(world.device());
    }
    // CUDA allocates no empty memory.
    Tensor::zeros(1, xs.dtype(), world.device())?
        .narrow(0, 0, 0)?
        .reshape(xs.shape())
}

pub fn inputs(seed: u64, world_size: usize, dims: &[usize], dtype: DType) -> Result<Vec<Tensor>> {
    (0..world_size)
        .map(|rank| input(seed, rank, dims, dtype))
        .collect()
}

/// The reduction pairwise by rank, half precision accumulated in f32.
pub fn reduce(inputs: &[Tensor], op: ReduceOp) -> Result<Tensor> {
    if op == ReduceOp::Prod && !inputs[0].dtype().is_float() {
        // They wrap.
        let dtype = inputs[0].dtype();
        let wide = inputs.iter().map(|xs| xs.to_dtype(DType::I64));
        return tree(&wide.collect::<Result<Vec<_>>>()?, op)?.to_dtype(dtype);
    }
    /// Cut after the largest power of two that is less than their number.
    fn tree(inputs: &[Tensor], op: ReduceOp) -> Result<Tensor> {
        if let [xs] = inputs {
            return match xs.dtype() {
                DType::BF16 | DType::F16 => xs.to_dtype(DType::F32),
                _ => Ok(xs.clone()),
            };
        }
        let (left, right) = inputs.split_at(inputs.len().next_power_of_two() / 2);
        let (left, right) = (tree(left, op)?, tree(right, op)?);
        match op {
            ReduceOp::Sum | ReduceOp::Avg => left + right,
            ReduceOp::Prod => left * right,
            ReduceOp::Max => left.maximum(&right),
            ReduceOp::Min => left.minimum(&right),
        }
    }
    let mut result = tree(inputs, op)?;
    if op == ReduceOp::Avg && inputs.len() > 1 {
        let count = Tensor::new(inputs.len() as f64, &Device::Cpu)?;
        result = result.broadcast_div(&count.to_dtype(result.dtype())?)?;
    }
    result.to_dtype(inputs[0].dtype())
}

/// Part `part` of `num_parts` along `dim`.
pub fn part(xs: &Tensor, dim: usize, part: usize, num_parts: usize) -> Result<Tensor> {
    let size = xs.dim(dim)? / num_parts;
    // The start of an empty part is out of range for candle.
    let start = if xs.elem_count() == 0 { 0 } else { part * size };
    xs.narrow(dim, start, size)
}

/// Concatenation, also of tensors without elements.
pub fn cat(parts: &[Tensor], dim: usize) -> Result<Tensor> {
    if parts[0].elem_count() > 0 {
        return Tensor::cat(parts, dim);
    }
    let mut dims = parts[0].dims().to_vec();
    dims[dim] = parts.iter().map(|part| part.dims()[dim]).sum();
    Tensor::zeros(dims, parts[0].dtype(), &Device::Cpu)
}

/// Same shape, dtype and values, to the bit, on whatever device.
#[track_caller]
pub fn assert_same(what: &str, got: &Tensor, expected: &Tensor) -> Result<()> {
    assert_eq!(got.dtype(), expected.dtype(), "{what}: dtype");
    assert_eq!(got.dims(), expected.dims(), "{what}: shape");
    // Through f64 every value of the dtypes above survives.
    assert_eq!(bits(got)?, bits(expected)?, "{what}: values");
    Ok(())
}

/// The values as the bits of f64.
pub fn bits(xs: &Tensor) -> Result<Vec<u64>> {
    let values = xs.to_device(&Device::Cpu)?.to_dtype(DType::F64)?;
    let values = values.flatten_all()?.to_vec1::<f64>()?;
    Ok(values.into_iter().map(f64::to_bits).collect())
}
