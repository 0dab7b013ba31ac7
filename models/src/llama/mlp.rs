//! SwiGLU feed-forward layer (arXiv:2002.05202), down(silu(gate(x)) · up(x)), with its backward pass by hand.

use candle_comm::ProcessGroup;
use candle_core::{Result, Tensor};
use candle_ops::{swiglu_backward, swiglu_forward};
use candle_parallel::{
    ColumnParallelLinear, Gradients, ParamBuilder, RowParallelLinear, column_parallel_backward,
    column_parallel_linear, row_parallel_linear,
};

use super::config::LlamaConfig;

#[derive(Clone)]
pub(super) struct Mlp {
    gate_proj: ColumnParallelLinear,
    up_proj: ColumnParallelLinear,
    down_proj: RowParallelLinear,
    tp: ProcessGroup,
}

/// What the backward pass needs: gate and up, and if weights that read them are trained, the input and what the last
/// projection gets.
pub(super) struct Saved {
    xs: Option<Tensor>,
    gate: Tensor,
    up: Tensor,
    ys: Option<Tensor>,
}

impl Mlp {
    pub fn new(config: &LlamaConfig, tp: &ProcessGroup, vb: ParamBuilder) -> Result<Self> {
        let (hidden, intermediate, bias) = (
            config.hidden_size,
            config.intermediate_size,
            config.mlp_bias,
        );
        let column =
            |name: &str| column_parallel_linear(hidden, intermediate, bias, tp, vb.pp(name));
        Ok(Self {
            gate_proj: column("gate_proj")?,
            up_proj: column("up_proj")?,
            down_proj: row_parallel_linear(intermediate, hidden, bias, tp, vb.pp("down_proj"))?,
            tp: tp.clone(),
        })
    }

    /// residual + mlp(xs), all (b, t, hidden).
    pub fn forward(&self, xs: Tensor, residual: &Tensor) -> Result<(Tensor, Saved)> {
        let gate = self.gate_proj.forward_detached(&xs)?;
        let up = self.up_proj.forward_detached(&xs)?;
        let ys = swiglu_forward(&gate, &up)?;
        let out = self.down_proj.forward_add_detached(&ys, residual)?;
        let reads_xs = self.gate_proj.needs_input() || self.up_proj.needs_input();
        let saved = Saved {
            xs: reads_xs.then_some(xs),
            gate,
            up,
            ys: self.down_proj.needs_input().then_some(ys),
        };
        Ok((out, saved))
    }

    /// The gradient of `xs` from that of the output; (b, t, hidden) both.
    pub fn backward(&self, saved: Saved, dy: &Tensor, gradients: &mut Gradients) -> Result<Tensor> {
        let Saved { xs, gate, up, ys } = saved;
        let dys = self.down_proj.backward(dy, ys.as_ref(), gradients)?;
        let (dgate, dup) = swiglu_backward(&gate, &up, &dys)?;
        let layers = [(&self.gate_proj, &dgate), (&self.up_proj, &dup)];
        column_parallel_backward(&layers, xs.as_ref(), &self.tp, gradients)
    }
}
