//! SwiGLU feed-forward layer (arXiv:2002.05202): down(silu(gate(x)) · up(x)).

use candle_comm::ProcessGroup;
use candle_core::{Module, Result, Tensor};
use candle_ops::swiglu;
use candle_parallel::regions::copy_to_tensor_parallel_region;
use candle_parallel::{
    ColumnParallelLinear, ParamBuilder, RowParallelLinear, column_parallel_linear,
    row_parallel_linear,
};

use super::config::LlamaConfig;

pub(super) struct Mlp {
    gate_proj: ColumnParallelLinear,
    up_proj: ColumnParallelLinear,
    down_proj: RowParallelLinear,
    tp: ProcessGroup,
}

impl Mlp {
    pub fn new(config: &LlamaConfig, tp: &ProcessGroup, vb: ParamBuilder) -> Result<Self> {
        let (hidden, intermediate, bias) = (
            config.hidden_size,
            config.intermediate_size,
            config.mlp_bias,
        );
        let column = |name: &str| {
            column_parallel_linear(hidden, intermediate, bias, tp, vb.pp(name))
                .map(ColumnParallelLinear::inside_region)
        };
        Ok(Self {
            gate_proj: column("gate_proj")?,
            up_proj: column("up_proj")?,
            down_proj: row_parallel_linear(intermediate, hidden, bias, tp, vb.pp("down_proj"))?,
            tp: tp.clone(),
        })
    }

    /// (b, t, hidden) -> (b, t, hidden)
    pub fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        let xs = copy_to_tensor_parallel_region(xs, &self.tp)?;
        let (gate, up) = (self.gate_proj.forward(&xs)?, self.up_proj.forward(&xs)?);
        self.down_proj.forward(&swiglu(&gate, &up)?)
    }
}
