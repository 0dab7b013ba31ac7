//! Grouped-query self-attention, its heads divided over tensor-parallel ranks.

use std::sync::Arc;

use candle_comm::ProcessGroup;
use candle_core::{Module, Result, Tensor};
use candle_ops::{HeadGroups, causal_attention, rope};
use candle_parallel::regions::copy_to_tensor_parallel_region;
use candle_parallel::{
    ColumnParallelLinear, HeadPartition, ParamBuilder, RowParallelLinear,
    column_parallel_linear_shard, row_parallel_linear_shard,
};

use super::config::LlamaConfig;
use super::rotary::RotaryTable;

pub(super) struct Attention {
    q_proj: ColumnParallelLinear,
    k_proj: ColumnParallelLinear,
    v_proj: ColumnParallelLinear,
    o_proj: RowParallelLinear,
    rotary: Arc<RotaryTable>,
    num_heads: usize,
    num_kv_heads: usize,
    head_dim: usize,
    groups: HeadGroups,
    tp: ProcessGroup,
}

impl Attention {
    pub fn new(
        config: &LlamaConfig,
        rotary: Arc<RotaryTable>,
        tp: &ProcessGroup,
        vb: ParamBuilder,
    ) -> Result<Self> {
        let heads = HeadPartition::new(config.num_attention_heads, config.num_key_value_heads, tp)?;
        let (hidden, head_dim, bias) = (config.hidden_size, config.head_dim, config.attention_bias);
        let column = |name: &str, shard| {
            column_parallel_linear_shard(hidden, shard, bias, tp, vb.pp(name))
                .map(ColumnParallelLinear::inside_region)
        };
        let query = heads.query.scaled(head_dim);
        let key_value = heads.key_value.scaled(head_dim);
        Ok(Self {
            o_proj: row_parallel_linear_shard(query.clone(), hidden, bias, tp, vb.pp("o_proj"))?,
            q_proj: column("q_proj", query)?,
            k_proj: column("k_proj", key_value.clone())?,
            v_proj: column("v_proj", key_value)?,
            rotary,
            num_heads: heads.query.len(),
            num_kv_heads: heads.key_value.len(),
            head_dim,
            groups: heads.groups,
            tp: tp.clone(),
        })
    }

    /// (b, t, hidden) -> (b, t, hidden)
    pub fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        let (b, t, _hidden) = xs.dims3()?;
        let xs = copy_to_tensor_parallel_region(xs, &self.tp)?;
        let heads = |proj: &ColumnParallelLinear, num_heads: usize| {
            let ys = proj.forward(&xs)?; // (b, t, num_heads * head_dim)
            ys.reshape((b, t, num_heads, self.head_dim))
        };
        let (cos, sin) = self.rotary.get(t)?;
        let q = rope(&heads(&self.q_proj, self.num_heads)?, &cos, &sin)?;
        let k = rope(&heads(&self.k_proj, self.num_kv_heads)?, &cos, &sin)?;
        let v = heads(&self.v_proj, self.num_kv_heads)?;
        let scale = 1.0 / (self.head_dim as f32).sqrt();
        let ys = causal_attention(&q, &k, &v, scale, self.groups)?; // (b, t, num_heads, head_dim)
        self.o_proj
            .forward(&ys.reshape((b, t, self.num_heads * self.head_dim))?)
    }
}
