//! Causal attention on the GPU by kernels of our own, or by cuDNN where the build has it; the equations are those of the crate's `causal_attention`.

use super::element::{Element, by_dtype};
use super::gpu::{BLOCK, Gpu};
use super::launch;
use super::values::Values;
use crate::attention_spec::NAME;
use crate::host::detached;
use crate::{AttentionCode, AttentionSpec, OpOutput};
use candle_core::{Result, Tensor, bail};

/// Rows of queries or keys that a block works on.
const TILE: usize = 16;

/// The output, in the shape and dtype of q, and the log-sum-exp of each row of scores, `(b, heads, t)` f32.
pub(crate) fn attention_forward(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    spec: &AttentionSpec,
) -> Result<(OpOutput, Tensor)> {
    let (q, k, v) = (detached(q)?, detached(k)?, detached(v)?);
    #[cfg(feature = "cudnn")]
    if let Some(done) = super::cudnn::attention_forward([&q, &k, &v], spec)? {
        AttentionCode::Cudnn.note();
        return Ok(done);
    }
    AttentionCode::Own.note();
    by_dtype!(NAME, "q", q, T => forward::<T>([&q, &k, &v], spec))
}

fn forward<T: Element>(
    [q, k, v]: [&Tensor; 3],
    spec: &AttentionSpec,
) -> Result<(OpOutput, Tensor)> {
    let gpu = Gpu::of(NAME, q)?;
    let s = Sizes::new(&gpu, q, k, spec)?;
    let (q_in, k, v) = (
        gpu.read::<T>("q", q)?,
        gpu.read::<T>("k", k)?,
        gpu.read::<T>("v", v)?,
    );
    let o = gpu.alloc::<T>(q.elem_count())?;
    let log_sum_exp = gpu.alloc::<f32>(s.num_rows())?;
    let starts = starts_on_gpu(q, spec)?;
    let starts = read_starts(&gpu, &starts)?;
    if s.num_rows() > 0 {
        let launch = gpu.grid(s.blocks(s.heads), BLOCK, s.shared_bytes(2, 1))?;
        let [t, heads, kv_heads, d] = s.counts(&gpu)?;
        let [group_size, group_offset, window] = s.seen(&gpu)?;
        // SAFETY: the tensors have the sizes' shapes; block and shared memory are what the kernel asks for.
        unsafe {
            launch::attention_forward(
                &launch,
                o.out(),
                log_sum_exp.out(),
                q_in.get::<T>(),
                k.get(),
                v.get(),
                starts.as_ref().map(Values::get),
                t,
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
    Ok((o.into_output(q.shape()), log_sum_exp))
}

/// Where the document of each position starts, on the GPU of `q`; none if each sequence is one.
pub(super) fn starts_on_gpu(q: &Tensor, spec: &AttentionSpec) -> Result<Option<Tensor>> {
    let documents = spec.documents.as_ref();
    documents
        .map(|documents| documents.on(q.device()))
        .transpose()
}

/// The values that a kernel reads of what [`starts_on_gpu`] returned.
pub(super) fn read_starts<'a>(gpu: &Gpu, starts: &'a Option<Tensor>) -> Result<Option<Values<'a>>> {
    let starts = starts.as_ref();
    let values = starts.map(|starts| gpu.read::<u32>("the documents", starts));
    values.transpose()
}

/// Shapes of an attention, which the crate's `attention` checked.
pub(super) struct Sizes<'a> {
    pub(super) b: usize,
    pub(super) t: usize,
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    d: usize,
    pub(super) spec: &'a AttentionSpec,
}

impl<'a> Sizes<'a> {
    pub(super) fn new(gpu: &Gpu, q: &Tensor, k: &Tensor, spec: &'a AttentionSpec) -> Result<Self> {
        let (b, t, heads, d) = q.dims4()?;
        let (_, _, kv_heads, _) = k.dims4()?;
        if d > 256 {
            bail!("{NAME}: expected heads of at most 256, got {d}")
        }
        gpu.i32(b * t)?;
        Ok(Self {
            b,
            t,
            heads,
            kv_heads,
            d,
            spec,
        })
    }

    pub(super) fn num_rows(&self) -> usize {
        self.b * self.t * self.heads
    }

    /// A block for each tile of positions, each head and each sequence.
    pub(super) fn blocks(&self, heads: usize) -> [usize; 3] {
        [self.t.div_ceil(TILE), heads, self.b]
    }

    /// Tiles of rows, padded to an odd width so that threads of a warp use different banks, and tiles of scores.
    pub(super) fn shared_bytes(&self, row_tiles: usize, score_tiles: usize) -> usize {
        4 * TILE * (row_tiles * (self.d | 1) + (TILE + 1) * score_tiles)
    }

    pub(super) fn counts(&self, gpu: &Gpu) -> Result<[i32; 4]> {
        let Self {
            t,
            heads,
            kv_heads,
            d,
            ..
        } = *self;
        Ok([
            gpu.i32(t)?,
            gpu.i32(heads)?,
            gpu.i32(kv_heads)?,
            gpu.i32(d)?,
        ])
    }

    /// Group size and offset, and the window.
    pub(super) fn seen(&self, gpu: &Gpu) -> Result<[i32; 3]> {
        let groups = self.spec.groups;
        Ok([
            gpu.i32(groups.size)?,
            gpu.i32(groups.offset)?,
            gpu.i32(self.spec.window_of(self.t))?,
        ])
    }
}
