//! Causal attention on the GPU by kernels of our own; the equations are those of the crate's `causal_attention`.

use super::launch;
use super::values::{BLOCK, Element, Gpu, by_dtype, dims_must_be, same_shape};
use crate::HeadGroups;
use candle_core::{Result, Tensor, bail};

const NAME: &str = "causal_attention";

/// Rows of queries or keys that a block works on.
const TILE: usize = 16;

/// The output, and the logarithm of the sum of the exponentials of each query's scores.
///
/// # Shapes
/// `q (b, t, heads, d)`, `k` and `v` `(b, t, kv_heads, d)`, one dtype, f32 or bf16, d at most 256 -> `(b, t, heads, d)` in
/// that dtype and `(b, heads, t)` f32.
///
/// # Errors
/// When the shapes or dtypes do not fit, or a tensor is not on the same GPU.
pub fn attention_forward(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    scale: f32,
    groups: HeadGroups,
) -> Result<(Tensor, Tensor)> {
    let (q, k, v) = (q.contiguous()?, k.contiguous()?, v.contiguous()?);
    by_dtype!(NAME, q.dtype(), T => forward::<T>([&q, &k, &v], scale, groups))
}

fn forward<T: Element>(
    [q, k, v]: [&Tensor; 3],
    scale: f32,
    groups: HeadGroups,
) -> Result<(Tensor, Tensor)> {
    let gpu = Gpu::of(NAME, q)?;
    let s = Sizes::new(&gpu, [q, k, v], groups)?;
    let (q_in, k, v) = (
        gpu.read::<T>("q", q)?,
        gpu.read::<T>("k", k)?,
        gpu.read::<T>("v", v)?,
    );
    let o = gpu.alloc::<T>(q.elem_count())?;
    let log_sum_exp = gpu.alloc::<f32>(s.num_rows())?;
    if q.elem_count() > 0 {
        let launch = gpu.grid(s.blocks(s.heads), BLOCK, s.shared_bytes(2, 1))?;
        let [t, heads, kv_heads, d] = s.counts(&gpu)?;
        let [group_size, group_offset] = s.groups(&gpu)?;
        // SAFETY: the tensors have the sizes' shapes; block and shared memory are what the kernel asks for.
        unsafe {
            launch::attention_forward(
                &launch,
                o.out(),
                log_sum_exp.out(),
                q_in.get::<T>(),
                k.get(),
                v.get(),
                t,
                heads,
                kv_heads,
                d,
                group_size,
                group_offset,
                scale,
            )
        }?;
    }
    let log_sum_exp = log_sum_exp.into_tensor((s.b, s.heads, s.t));
    Ok((o.into_tensor(q.shape()), log_sum_exp))
}

/// What the forward pass read and wrote, and the gradient of what it returned.
#[derive(Clone, Copy, Debug)]
pub struct AttentionGrad<'a> {
    /// `(b, t, heads, d)`.
    pub q: &'a Tensor,
    /// `(b, t, kv_heads, d)`.
    pub k: &'a Tensor,
    /// `(b, t, kv_heads, d)`.
    pub v: &'a Tensor,
    /// The output, of the shape of q.
    pub out: &'a Tensor,
    /// `(b, heads, t)` f32.
    pub log_sum_exp: &'a Tensor,
    /// Gradient of the output.
    pub grad: &'a Tensor,
}

/// Gradients of q, k and v, in their shapes and dtype.
///
/// # Errors
/// When the shapes or dtypes do not fit, or a tensor is not on the same GPU.
pub fn attention_backward(
    pass: AttentionGrad,
    scale: f32,
    groups: HeadGroups,
) -> Result<(Tensor, Tensor, Tensor)> {
    let contiguous = [pass.q, pass.k, pass.v, pass.out, pass.grad].map(Tensor::contiguous);
    let [q, k, v, out, grad] = contiguous;
    let (q, k, v, out, grad) = (q?, k?, v?, out?, grad?);
    let pass = AttentionGrad {
        q: &q,
        k: &k,
        v: &v,
        out: &out,
        grad: &grad,
        ..pass
    };
    by_dtype!(NAME, q.dtype(), T => backward::<T>(pass, scale, groups))
}

fn backward<T: Element>(
    pass: AttentionGrad,
    scale: f32,
    groups: HeadGroups,
) -> Result<(Tensor, Tensor, Tensor)> {
    let AttentionGrad {
        q,
        k,
        v,
        out,
        log_sum_exp,
        grad,
    } = pass;
    let gpu = Gpu::of(NAME, q)?;
    let s = Sizes::new(&gpu, [q, k, v], groups)?;
    same_shape(
        NAME,
        &[("q", q), ("the output", out), ("the gradient", grad)],
    )?;
    dims_must_be(NAME, "log_sum_exp", log_sum_exp, &[s.b, s.heads, s.t])?;
    let (dq, delta) = (
        gpu.alloc::<T>(q.elem_count())?,
        gpu.alloc::<f32>(s.num_rows())?,
    );
    let (dk, dv) = (
        gpu.alloc::<T>(k.elem_count())?,
        gpu.alloc::<T>(v.elem_count())?,
    );
    let (q_in, k_in, v_in) = (
        gpu.read::<T>("q", q)?,
        gpu.read::<T>("k", k)?,
        gpu.read::<T>("v", v)?,
    );
    let (o, grad) = (
        gpu.read::<T>("the output", out)?,
        gpu.read::<T>("the gradient", grad)?,
    );
    let log_sum_exp = gpu.read::<f32>("log_sum_exp", log_sum_exp)?;
    let [t, heads, kv_heads, d] = s.counts(&gpu)?;
    let [group_size, group_offset] = s.groups(&gpu)?;
    let delta_in = delta.out().read();
    if q.elem_count() > 0 {
        let rows = s.num_rows();
        let per_row = gpu.blocks(rows.div_ceil(8).min(2112), BLOCK, 0)?;
        let per_query = gpu.grid(s.blocks(s.heads), BLOCK, s.shared_bytes(4, 1))?;
        // SAFETY: the tensors have the sizes' shapes; block and shared memory are what the kernels ask for; the second
        // launch follows the first on one stream.
        unsafe {
            launch::attention_delta(
                &per_row,
                delta.out(),
                o.get::<T>(),
                grad.get(),
                rows as i64,
                t,
                heads,
                d,
            )?;
            launch::attention_backward_q(
                &per_query,
                dq.out(),
                q_in.get::<T>(),
                k_in.get(),
                v_in.get(),
                grad.get(),
                log_sum_exp.get(),
                delta_in,
                t,
                heads,
                kv_heads,
                d,
                group_size,
                group_offset,
                scale,
            )?;
        }
    }
    if k.elem_count() > 0 {
        let per_key = gpu.grid(s.blocks(s.kv_heads), BLOCK, s.shared_bytes(4, 2))?;
        // SAFETY: as above. Key heads that no query reads get zeros, so this runs even without queries.
        unsafe {
            launch::attention_backward_kv(
                &per_key,
                dk.out(),
                dv.out(),
                q_in.get::<T>(),
                k_in.get(),
                v_in.get(),
                grad.get(),
                log_sum_exp.get(),
                delta_in,
                t,
                heads,
                kv_heads,
                d,
                group_size,
                group_offset,
                scale,
            )
        }?;
    }
    let (dk, dv) = (dk.into_tensor(k.shape()), dv.into_tensor(v.shape()));
    Ok((dq.into_tensor(q.shape()), dk, dv))
}

struct Sizes {
    b: usize,
    t: usize,
    heads: usize,
    kv_heads: usize,
    d: usize,
    groups: HeadGroups,
}

impl Sizes {
    fn new(gpu: &Gpu, [q, k, v]: [&Tensor; 3], groups: HeadGroups) -> Result<Self> {
        let (b, t, heads, d) = q.dims4()?;
        let (_, _, kv_heads, _) = k.dims4()?;
        dims_must_be(NAME, "k", k, &[b, t, kv_heads, d])?;
        dims_must_be(NAME, "v", v, &[b, t, kv_heads, d])?;
        groups.validate(heads, kv_heads)?;
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
            groups,
        })
    }

    fn num_rows(&self) -> usize {
        self.b * self.t * self.heads
    }

    /// A block for each tile of positions, each head and each sequence.
    fn blocks(&self, heads: usize) -> [usize; 3] {
        [self.t.div_ceil(TILE), heads, self.b]
    }

    /// Tiles of rows, padded to an odd width so that threads of a warp use different banks, and tiles of scores.
    fn shared_bytes(&self, row_tiles: usize, score_tiles: usize) -> usize {
        4 * TILE * (row_tiles * (self.d | 1) + (TILE + 1) * score_tiles)
    }

    fn counts(&self, gpu: &Gpu) -> Result<[i32; 4]> {
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

    fn groups(&self, gpu: &Gpu) -> Result<[i32; 2]> {
        Ok([gpu.i32(self.groups.size)?, gpu.i32(self.groups.offset)?])
    }
}
