//! Causal attention on the GPU by kernels of our own, or by cuDNN where the build has it.

#![allow(unsafe_code)]

use super::spec::{AttentionSpec, NAME};
use crate::cuda::element::{Element, by_dtype};
use crate::cuda::gpu::{BLOCK, Gpu};
use crate::cuda::launch;
use crate::cuda::values::{Fresh, GpuValues};
use crate::host::op_output::OpOutput;
use crate::host::values::detached;
use crate::settings::attention_code::AttentionCode;
use candle_core::{Result, Tensor, bail};
#[cfg(feature = "cudnn")]
use {super::rectangle::Mask, candle_core::DType};

/// Rows of queries or keys that a block works on.
const TILE: usize = 16;

/// The output, in the shape and dtype of q, or in f32 if it `is_part`, and the log-sum-exp of each row of scores, `(b, heads, t)` f32.
pub(crate) fn attention_forward(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    spec: &AttentionSpec,
    is_part: bool,
) -> Result<(OpOutput, Tensor)> {
    let (q, k, v) = (detached(q)?, detached(k)?, detached(v)?);
    #[cfg(feature = "cudnn")]
    if let Some((out, log_sum_exp)) = forward_by_cudnn([&q, &k, &v], spec)? {
        AttentionCode::Cudnn.note();
        let out = match is_part {
            true => out.into_tensor().to_dtype(DType::F32)?.into(),
            false => out,
        };
        return Ok((out, log_sum_exp));
    }
    AttentionCode::Own.note();
    by_dtype!(NAME, "q", q, T => forward::<T>([&q, &k, &v], spec, is_part))
}

#[cfg(feature = "cudnn")]
fn forward_by_cudnn(qkv: [&Tensor; 3], spec: &AttentionSpec) -> Result<Option<(OpOutput, Tensor)>> {
    let rectangle = spec.rectangle().filter(|_| qkv[0].dtype() != DType::F32);
    let Some(rectangle) = rectangle else {
        return super::cudnn::attention_forward(qkv, spec, Mask::Causal);
    };
    let of_all = spec.of_all();
    let done = rectangle.forward(qkv, |qkv| {
        let done = super::cudnn::attention_forward(qkv, &of_all, rectangle.mask)?;
        Ok(done.map(|(out, log_sum_exp)| (out.into_tensor(), log_sum_exp)))
    })?;
    Ok(done.map(|(out, log_sum_exp)| (out.into(), log_sum_exp)))
}

fn forward<T: Element>(
    [q, k, v]: [&Tensor; 3],
    spec: &AttentionSpec,
    is_part: bool,
) -> Result<(OpOutput, Tensor)> {
    let gpu = Gpu::of(NAME, q)?;
    let s = Sizes::new(&gpu, q, k, spec)?;
    let (q_in, k, v) = (
        gpu.read::<T>("q", q)?,
        gpu.read::<T>("k", k)?,
        gpu.read::<T>("v", v)?,
    );
    let len = q.elem_count();
    let o = (!is_part).then(|| gpu.alloc::<T>(len)).transpose()?;
    let sums = is_part.then(|| gpu.alloc::<f32>(len)).transpose()?;
    let log_sum_exp = gpu.alloc::<f32>(s.num_rows())?;
    let ranges = ranges_on_gpu(q, spec)?;
    let ranges = read_ranges(&gpu, &ranges)?;
    if s.num_rows() > 0 {
        let launch = gpu.grid(s.blocks(s.t, s.heads), BLOCK, s.shared_bytes(2, 1))?;
        let [t, keys, heads, kv_heads, d] = s.counts(&gpu)?;
        let [group_size, group_offset, window] = s.seen(&gpu)?;
        // SAFETY: the tensors have the sizes' shapes, `ranges` what all queries and tiles of keys of theirs need; block and shared memory are what the kernel asks for.
        unsafe {
            launch::attention_forward(
                &launch,
                o.as_ref().map(Fresh::out),
                sums.as_ref().map(Fresh::out),
                log_sum_exp.out(),
                q_in.get::<T>(),
                k.get(),
                v.get(),
                ranges.as_ref().map(GpuValues::get),
                t,
                keys,
                heads,
                kv_heads,
                d,
                group_size,
                group_offset,
                window,
                spec.scale,
            )
        }?;
    }
    let log_sum_exp = log_sum_exp.into_tensor((s.b, s.heads, s.t));
    let of_type = o.map(|o| o.into_output(q.shape()));
    let output = of_type.or_else(|| sums.map(|sums| sums.into_output(q.shape())));
    match output {
        Some(output) => Ok((output, log_sum_exp)),
        None => bail!("{NAME}: neither an output nor a part of one"),
    }
}

/// What each query sees, on the GPU of `q`; none if that is all before it, up to the window.
pub(crate) fn ranges_on_gpu(q: &Tensor, spec: &AttentionSpec) -> Result<Option<Tensor>> {
    match (&spec.rows, spec.whole()) {
        (None, _) | (_, Some(None)) => Ok(None),
        (Some(rows), _) => rows.on_gpu(spec.window, TILE, q.device()).map(Some),
    }
}

/// The values that a kernel reads of what [`ranges_on_gpu`] returned.
pub(crate) fn read_ranges<'a>(
    gpu: &Gpu,
    ranges: &'a Option<Tensor>,
) -> Result<Option<GpuValues<'a>>> {
    let ranges = ranges.as_ref();
    let values = ranges.map(|ranges| gpu.read::<u32>("the rows", ranges));
    values.transpose()
}

/// Shapes of an attention, which the crate's `attention` checked.
pub(crate) struct Sizes<'a> {
    pub(crate) b: usize,
    pub(crate) t: usize,
    pub(crate) keys: usize,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    d: usize,
    pub(crate) spec: &'a AttentionSpec,
}

impl<'a> Sizes<'a> {
    pub(crate) fn new(gpu: &Gpu, q: &Tensor, k: &Tensor, spec: &'a AttentionSpec) -> Result<Self> {
        let (b, t, heads, d) = q.dims4()?;
        // Queries of one sequence may see keys of several.
        let (kb, keys, kv_heads, _) = k.dims4()?;
        let keys = kb * keys / b.max(1);
        if d > 256 {
            bail!("{NAME}: expected heads of at most 256, got {d}")
        }
        gpu.i32(b * t.max(keys))?;
        Ok(Self {
            b,
            t,
            keys,
            heads,
            kv_heads,
            d,
            spec,
        })
    }

    pub(crate) fn num_rows(&self) -> usize {
        self.b * self.t * self.heads
    }

    /// A block for each tile of so many positions, each head and each sequence.
    pub(crate) fn blocks(&self, positions: usize, heads: usize) -> [usize; 3] {
        [positions.div_ceil(TILE), heads, self.b]
    }

    /// Tiles of rows, padded to an odd width so that threads of a warp use different banks, and tiles of scores.
    pub(crate) fn shared_bytes(&self, row_tiles: usize, score_tiles: usize) -> usize {
        4 * TILE * (row_tiles * (self.d | 1) + (TILE + 1) * score_tiles)
    }

    pub(crate) fn counts(&self, gpu: &Gpu) -> Result<[i32; 5]> {
        let Self {
            t,
            keys,
            heads,
            kv_heads,
            d,
            ..
        } = *self;
        Ok([
            gpu.i32(t)?,
            gpu.i32(keys)?,
            gpu.i32(heads)?,
            gpu.i32(kv_heads)?,
            gpu.i32(d)?,
        ])
    }

    /// Group size and offset, and the window.
    pub(crate) fn seen(&self, gpu: &Gpu) -> Result<[i32; 3]> {
        let groups = self.spec.groups;
        Ok([
            gpu.i32(groups.size)?,
            gpu.i32(groups.offset)?,
            gpu.i32(self.spec.window_of(self.t))?,
        ])
    }
}
