//! Grouped-query self-attention, its heads divided over tensor-parallel ranks, with an explicit backward pass. Families differ in
//! which projections have biases, in norms of each query and key head, and in windows.

use std::sync::Arc;

use candle_core::{Result, Tensor, bail};
use candle_ops::{AttentionSpec, RopeDirection, Runs, rope_in_place};
use candle_parallel::{
    ColumnParallelLinear, ContextParallel, Gradient, GradientSink, HeadPartition, KeptAttention,
    Layer, LayerRanks, ParamBuilder, Pass, RowParallelLinear, Tape, column_parallel_backward,
    column_parallel_forward, column_parallel_linear_shard, column_parallel_tape,
    row_parallel_linear_shard,
};

use crate::config::ModelConfig;
use crate::norm::Norm;
use crate::rotary::RotaryTable;

#[derive(Clone)]
pub(crate) struct Attention {
    /// Index of its layer.
    layer: usize,
    q_proj: ColumnParallelLinear,
    k_proj: ColumnParallelLinear,
    v_proj: ColumnParallelLinear,
    o_proj: RowParallelLinear,
    /// Norms of the heads of q and k.
    head_norms: Option<(Norm, Norm)>,
    rotary: Arc<RotaryTable>,
    num_heads: usize,
    num_kv_heads: usize,
    head_dim: usize,
    spec: AttentionSpec,
    context: ContextParallel,
}

/// What the backward pass needs beside the input: the heads' output and what attention kept; if that has not q, k and v already, those after
/// rotation, and where norms come before it, q and k as the projections gave them.
#[derive(Clone)]
pub(crate) struct SavedAttention {
    qk: Option<(Tensor, Tensor)>,
    v: Option<Tensor>,
    ys: Tensor,
    kept: KeptAttention,
}

impl Attention {
    pub fn new(
        config: &ModelConfig,
        layer: usize,
        rotary: Arc<RotaryTable>,
        ranks: &LayerRanks,
        vb: ParamBuilder,
    ) -> Result<Self> {
        let region = &ranks.region;
        let (num_heads, num_kv_heads) = (config.num_attention_heads, config.num_key_value_heads);
        let heads = HeadPartition::new(num_heads, num_kv_heads, region.tp())?;
        let (hidden, head_dim) = (config.hidden_size, config.head_dim);
        let column = |name: &str, shard| {
            column_parallel_linear_shard(hidden, shard, config.qkv_bias, region, vb.pp(name))
        };
        // Ranks have different heads.
        let norm = |name: &str| Norm::new(head_dim, config, Gradient::Partial, vb.pp(name));
        let head_norms = match config.qk_norm {
            true => Some((norm("q_norm")?, norm("k_norm")?)),
            false => None,
        };
        let query = heads.query.scaled(head_dim);
        let key_value = heads.key_value.scaled(head_dim);
        Ok(Self {
            layer,
            o_proj: row_parallel_linear_shard(
                query.clone(),
                hidden,
                config.o_bias,
                region,
                vb.pp("o_proj"),
            )?,
            q_proj: column("q_proj", query)?,
            k_proj: column("k_proj", key_value.clone())?,
            v_proj: column("v_proj", key_value)?,
            head_norms,
            rotary,
            num_heads: heads.query.len(),
            num_kv_heads: heads.key_value.len(),
            head_dim,
            spec: AttentionSpec {
                scale: 1.0 / (head_dim as f32).sqrt(),
                groups: heads.groups,
                window: config.window(layer),
                rows: None,
            },
            context: ranks.context.clone(),
        })
    }

    /// What the projections make of xs, (b, t, hidden) outside of the region: q, k and v, (b, t, heads, head_dim) each.
    fn projected(&self, xs: &Tensor, pass: &Pass) -> Result<(Tensor, Tensor, Tensor)> {
        let layers = [&self.q_proj, &self.k_proj, &self.v_proj];
        let outputs = column_parallel_forward(&layers, xs, pass)?; // (b, t, num_heads * head_dim) each
        let [q, k, v] = outputs.as_slice() else {
            bail!("attention has three projections")
        };
        let heads = |ys: &Tensor, num_heads: usize| {
            let (b, t, _) = ys.dims3()?;
            ys.reshape((b, t, num_heads, self.head_dim))
        };
        let (k, v) = (heads(k, self.num_kv_heads)?, heads(v, self.num_kv_heads)?);
        Ok((heads(q, self.num_heads)?, k, v))
    }

    /// q and k, normed if the family does that.
    fn normed(&self, q: Tensor, k: Tensor) -> Result<(Tensor, Tensor)> {
        Ok(match &self.head_norms {
            Some((q_norm, k_norm)) => (q_norm.forward(&q)?, k_norm.forward(&k)?),
            None => (q, k),
        })
    }

    /// q and k, (b, t, heads, head_dim) each, as attention takes them: normed if the family does that, and rotated.
    fn rotated(&self, q: Tensor, k: Tensor, runs: &Runs) -> Result<(Tensor, Tensor)> {
        let (q, k) = self.normed(q, k)?;
        let (cos, sin) = self.rotary.of(runs)?;
        let rope = |xs| rope_in_place(xs, &cos, &sin, RopeDirection::Forward);
        Ok((rope(q)?, rope(k)?))
    }

    /// residual + attention(xs), all (b, t, hidden). While a text is generated, the cache gets the keys and values of its new tokens.
    pub fn forward(
        &self,
        xs: &Tensor,
        residual: &Tensor,
        pass: &Pass,
    ) -> Result<(Tensor, SavedAttention)> {
        let cache = pass.cache();
        let num_before = cache.map_or(Ok(0), |cache| cache.num_tokens(self.layer))?;
        let rows = pass.rows(num_before)?;
        let (q, k, v) = self.projected(xs, pass)?;
        let unnormed = self.head_norms.as_ref().map(|_| (q.clone(), k.clone()));
        let (q, k) = self.rotated(q, k, rows.queries())?;
        let (k, v) = match cache {
            Some(cache) => cache.append(self.layer, &k, &v)?,
            None => (k, v),
        };
        let (ys, kept) = self.context.forward([&q, &k, &v], &self.spec, pass, rows)?; // (b, t, num_heads, head_dim)
        let ys = ys.flatten_from(2)?; // (b, t, num_heads * head_dim)
        let (out, _) = self.o_proj.forward_add(&ys, Some(residual), pass)?;
        let is_kept = kept.has_inputs();
        let qk = unnormed.or_else(|| (!is_kept).then_some((q, k)));
        let v = (!is_kept).then_some(v);
        Ok((out, SavedAttention { qk, v, ys, kept }))
    }

    /// Whether [`Self::backward`] needs the input: what reads it is trained.
    pub fn reads_input(&self) -> bool {
        let layers = [&self.q_proj, &self.k_proj, &self.v_proj];
        layers.iter().any(|layer| layer.needs_input())
    }

    /// The gradient of the input `xs` from that of the output; (b, t, hidden) all.
    pub fn backward(
        &self,
        saved: SavedAttention,
        xs: Option<Tensor>,
        dy: &Tensor,
        pass: &Pass,
        gradients: &mut dyn GradientSink,
    ) -> Result<Tensor> {
        let SavedAttention { qk, v, ys, kept } = saved;
        let (b, t, _) = ys.dims3()?;
        let own_heads = (b, t, self.num_heads, self.head_dim);
        let rows = pass.rows(0)?;
        let inputs = match (&qk, v) {
            (Some((q, k)), Some(v)) => {
                let (q, k) = (q.clone(), k.clone());
                let (q, k) = match &self.head_norms {
                    Some(_) => self.rotated(q, k, rows.queries())?,
                    None => (q, k),
                };
                Some([q, k, v])
            }
            _ => None,
        };
        let dys = self
            .o_proj
            .backward_linear(dy, Some(&ys), pass, gradients)?
            .reshape(own_heads)?;
        let (cos, sin) = self.rotary.of(rows.queries())?;
        let inputs = inputs.as_ref().map(|[q, k, v]| [q, k, v]);
        let of_forward = (inputs, &ys.reshape(own_heads)?);
        let grads = self
            .context
            .backward(kept, of_forward, &dys, &self.spec, pass)?;
        let [dq, dk, dv] = grads;
        let unrope = |grad| rope_in_place(grad, &cos, &sin, RopeDirection::Backward);
        let (mut dq, mut dk) = (unrope(dq)?, unrope(dk)?);
        if let (Some((q_norm, k_norm)), Some((q, k))) = (&self.head_norms, qk) {
            dq = q_norm.backward(&q, &dq, None, gradients)?;
            dk = k_norm.backward(&k, &dk, None, gradients)?;
        }
        let dq = dq.flatten_from(2)?; // (b, t, num_heads * head_dim)
        let dk = dk.flatten_from(2)?;
        let dv = dv.flatten_from(2)?;
        let layers = [
            (&self.q_proj, &dq),
            (&self.k_proj, &dk),
            (&self.v_proj, &dv),
        ];
        column_parallel_backward(&layers, xs.as_ref(), pass, gradients)
    }

    /// What stays between the passes, beside the input: q, k, v and the heads' output, and of each head the log-sum-exp.
    pub fn tape(&self) -> Tape {
        let qkv = column_parallel_tape(&[&self.q_proj, &self.k_proj, &self.v_proj]);
        let out = self.o_proj.tape_of(false);
        let key_values = out.input / self.num_heads * self.num_kv_heads;
        Tape {
            input: qkv.input,
            saved: 2 * out.input + 2 * key_values + size_of::<f32>() * self.num_heads,
            waiting: qkv.waiting + out.waiting,
            ..out
        }
    }

    pub fn weights(&self) -> Vec<&Tensor> {
        let column = [&self.q_proj, &self.k_proj, &self.v_proj];
        let column = column.into_iter().flat_map(Layer::weights);
        let norms = self.head_norms.iter().flat_map(|(q, k)| [q, k]);
        let norms = norms.map(Norm::weight);
        column.chain(self.o_proj.weights()).chain(norms).collect()
    }
}
