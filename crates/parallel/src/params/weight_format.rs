//! Forms in which frozen weights are held, and how they become values again: rows at a time, when they are used.

use std::borrow::Cow;
use std::ops::Range;

use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{CpuStorage, DType, Device, Result, Tensor, bail};
use candle_ops::{HeldRows, round_into};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

use crate::placement::Shard;

/// The form in which the frozen weights of linear layers, embedding and head are held, whatever the type that the model computes in.
///
/// In 16 bits or in blocks a weight is unpacked to that type when a layer uses it, some rows at a time. Blocks are those of GGUF files
/// (`candle_core::quantized`), along the rows. A weight whose rows no block divides is held in the next wider form. The weights of
/// the model's first and last block, the embedding and the head, are in bf16 where others are in blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
#[non_exhaustive]
pub enum WeightFormat {
    /// 32-bit floats.
    #[cfg_attr(feature = "clap", value(aliases = ["fp32", "float32", "float"]))]
    F32,
    /// 16-bit floats with the range of f32.
    #[cfg_attr(feature = "clap", value(name = "bf16", alias = "bfloat16"))]
    BF16,
    /// 16-bit floats of a small range and three bits more.
    #[cfg_attr(feature = "clap", value(aliases = ["fp16", "float16", "half"]))]
    F16,
    /// Blocks of 32 values, 8 bits each and a scale.
    #[cfg_attr(feature = "clap", value(name = "q8_0", aliases = ["q8", "int8", "8bit"]))]
    Q8_0,
    /// Blocks of 256 values, 4 bits each with scales and minima of groups of 32.
    #[cfg_attr(feature = "clap", value(name = "q4k", aliases = ["q4_k", "q4", "4bit"]))]
    Q4K,
}

/// How one weight is held; written by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "&'static str")]
pub(crate) enum Form {
    Floats(DType),
    Blocks(GgmlDType),
}

impl Form {
    /// What it is called.
    pub fn name(self) -> &'static str {
        match self {
            Self::Floats(dtype) => dtype.as_str(),
            Self::Blocks(GgmlDType::Q4K) => "q4k",
            Self::Blocks(_) => "q8_0",
        }
    }

    /// Bits of a value.
    pub fn bits(self) -> f64 {
        match self {
            Self::Floats(dtype) => 8.0 * dtype.size_in_bytes() as f64,
            Self::Blocks(blocks) => 8.0 * blocks.type_size() as f64 / blocks.block_size() as f64,
        }
    }

    /// Type of what is held.
    pub fn held_dtype(self) -> DType {
        match self {
            Self::Floats(dtype) => dtype,
            Self::Blocks(_) => DType::U8,
        }
    }

    /// How many of these are held of values of shape `dims`, which in blocks is (rows, columns).
    pub fn num_held(self, dims: &[usize]) -> usize {
        match (self, dims) {
            (Self::Blocks(blocks), &[rows, columns]) => rows * row_bytes(blocks, columns),
            _ => dims.iter().product(),
        }
    }
}

impl From<Form> for &'static str {
    fn from(form: Form) -> Self {
        form.name()
    }
}

impl TryFrom<String> for Form {
    type Error = String;

    fn try_from(name: String) -> std::result::Result<Self, String> {
        match name.as_str() {
            "q4k" => Ok(Self::Blocks(GgmlDType::Q4K)),
            "q8_0" => Ok(Self::Blocks(GgmlDType::Q8_0)),
            name => match name.parse() {
                Ok(dtype) => Ok(Self::Floats(dtype)),
                Err(_) => Err(format!("{name} is no form of weights")),
            },
        }
    }
}

/// How this rank's part (rows, columns) of a weight is held and what becomes of it.
#[derive(Clone, Debug)]
pub(crate) struct Packing {
    form: Form,
    /// Type of the values that layers get.
    dtype: DType,
    dims: [usize; 2],
}

/// Rows that one thread packs or unpacks at a time.
const CHUNK_ROWS: usize = 32;
/// Values that are unpacked at a time, at most, but for one row.
const TILE_VALUES: usize = 1 << 22;

impl WeightFormat {
    /// The form of a weight whose whole rows have `num_columns` values; `is_inner`: it is neither of the first block nor of the last.
    fn form(self, num_columns: usize, is_inner: bool) -> Form {
        let blocks = |dtype: GgmlDType| num_columns.is_multiple_of(dtype.block_size());
        match self {
            Self::F32 => Form::Floats(DType::F32),
            Self::F16 => Form::Floats(DType::F16),
            Self::BF16 => Form::Floats(DType::BF16),
            Self::Q4K if is_inner && blocks(GgmlDType::Q4K) => Form::Blocks(GgmlDType::Q4K),
            Self::Q8_0 | Self::Q4K if is_inner && blocks(GgmlDType::Q8_0) => {
                Form::Blocks(GgmlDType::Q8_0)
            }
            Self::Q8_0 | Self::Q4K => Form::Floats(DType::BF16),
        }
    }
}

impl Packing {
    /// Of weight `name`, of whose columns this rank may have a part, `shard`, and of whose values it has `dims`; `None` if the form
    /// is that of the values.
    pub fn new(
        format: WeightFormat,
        is_inner: bool,
        name: &str,
        dims: [usize; 2],
        shard: Option<&Shard>,
        dtype: DType,
    ) -> Result<Option<Self>> {
        let columns = shard.filter(|shard| shard.dim() == 1);
        let form = format.form(
            columns.map_or(dims[1], |columns| columns.global()),
            is_inner,
        );
        if let (Form::Blocks(blocks), Some(columns)) = (form, columns) {
            let size = blocks.block_size();
            let cuts = |range: &&Range<usize>| {
                !(range.start.is_multiple_of(size) && range.end.is_multiple_of(size))
            };
            // Those of other ranks too: all refuse alike.
            if let Some(range) = columns.partition().ranges().find(cuts) {
                bail!(
                    "parameter {name}: a rank has the columns {range:?} of {}, which cuts blocks of {size} values, as \
                     {blocks:?} has them\nhint: use another tensor-parallel degree, or weights in 16 bits",
                    columns.global()
                );
            }
        }
        let is_packed = form != Form::Floats(dtype);
        Ok(is_packed.then_some(Self { form, dtype, dims }))
    }

    /// Type of what is held.
    pub fn held_dtype(&self) -> DType {
        self.form.held_dtype()
    }

    pub fn form(&self) -> Form {
        self.form
    }

    /// Shape of what is held.
    pub fn held_dims(&self) -> [usize; 2] {
        let [rows, columns] = self.dims;
        match self.form {
            Form::Floats(_) => self.dims,
            Form::Blocks(blocks) => [rows, row_bytes(blocks, columns)],
        }
    }

    /// Type of the values.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Shape of the values.
    pub fn dims(&self) -> [usize; 2] {
        self.dims
    }

    /// Whether what is held are numbers, only of another type.
    pub fn is_float(&self) -> bool {
        matches!(self.form, Form::Floats(_))
    }

    /// How its rows lie in what is held.
    pub fn rows(&self) -> HeldRows {
        match self.form {
            Form::Floats(_) => HeldRows::Floats,
            Form::Blocks(GgmlDType::Q4K) => HeldRows::Q4K,
            Form::Blocks(_) => HeldRows::Q8_0,
        }
    }

    /// Rows to be unpacked at a time.
    pub fn tile_rows(&self) -> usize {
        (TILE_VALUES / self.dims[1].max(1)).max(1)
    }

    /// What is to be held, on the CPU, of these values (rows, columns), row-major.
    fn pack(&self, values: Vec<f32>) -> Result<Tensor> {
        let Form::Blocks(blocks) = self.form else {
            let values = Tensor::from_vec(values, &self.dims, &Device::Cpu)?;
            return in_dtype(values, self.held_dtype());
        };
        let columns = self.dims[1];
        let chunks = values.par_chunks((CHUNK_ROWS * columns).max(1));
        let chunks = chunks.map(|values| {
            let shape = (values.len() / columns, columns);
            let values = Tensor::from_slice(values, shape, &Device::Cpu)?;
            Ok(QTensor::quantize(&values, blocks)?.data()?.into_owned())
        });
        let bytes = chunks.collect::<Result<Vec<_>>>()?.concat();
        Tensor::from_vec(bytes, &self.held_dims(), &Device::Cpu)
    }

    /// The values (rows, columns) of rows that are held.
    pub fn unpack(&self, held: &Tensor) -> Result<Tensor> {
        let Form::Blocks(blocks) = self.form else {
            return held.to_dtype(self.dtype);
        };
        let (rows, _) = held.dims2()?;
        let columns = self.dims[1];
        let bytes = held.flatten_all()?.to_vec1::<u8>()?;
        let mut values = vec![0f32; rows * columns];
        let chunks = values.par_chunks_mut((CHUNK_ROWS * columns).max(1));
        let chunk_bytes = CHUNK_ROWS * row_bytes(blocks, columns);
        let chunks = chunks.zip(bytes.par_chunks(chunk_bytes.max(1)));
        chunks.try_for_each(|(values, bytes)| {
            let blocks = blocks.from_data(Cow::Borrowed(bytes));
            match blocks.dequantize(values.len())? {
                CpuStorage::F32(unpacked) => {
                    values.copy_from_slice(&unpacked);
                    Ok(())
                }
                _ => bail!("blocks gave values of another type than f32"),
            }
        })?;
        let values = Tensor::from_vec(values, (rows, columns), &Device::Cpu)?;
        in_dtype(values, self.dtype)?.to_device(held.device())
    }
}

/// What is to be held, on the CPU, of values of shape `dims` with which a model computes in `dtype`.
pub(crate) fn hold(
    values: Vec<f32>,
    packing: Option<&Packing>,
    dims: &[usize],
    dtype: DType,
) -> Result<Tensor> {
    match packing {
        Some(packing) => packing.pack(values),
        None => in_dtype(Tensor::from_vec(values, dims, &Device::Cpu)?, dtype),
    }
}

/// f32 values in another type; on all threads if that has 16 bits, as billions of them are.
pub(crate) fn in_dtype(values: Tensor, dtype: DType) -> Result<Tensor> {
    let is_narrow = matches!(dtype, DType::BF16 | DType::F16);
    if !is_narrow || values.elem_count() == 0 {
        return values.to_dtype(dtype);
    }
    let rounded = Tensor::zeros(values.shape(), dtype, values.device())?;
    round_into(&rounded, &values)?;
    Ok(rounded)
}

/// Bytes of a row, which is a number of whole blocks.
fn row_bytes(blocks: GgmlDType, num_columns: usize) -> usize {
    num_columns / blocks.block_size() * blocks.type_size()
}
