//! Gated feed-forward layer (arXiv:2002.05202), down(act(gate(x)) · up(x)), with an explicit backward pass.

use candle_core::{Result, Tensor, bail};
use candle_parallel::{
    ColumnParallelLinear, GradientSink, Layer, ParamBuilder, Pass, Region, RowParallelLinear, Tape,
    column_parallel_backward, column_parallel_forward, column_parallel_linear,
    column_parallel_tape, row_parallel_linear,
};

use crate::activation::Activation;
use crate::config::ModelConfig;

#[derive(Clone)]
pub(crate) struct Mlp {
    gate_proj: ColumnParallelLinear,
    up_proj: ColumnParallelLinear,
    down_proj: RowParallelLinear,
    activation: Activation,
}

/// What the backward pass needs beside the input; the activation's output is computed again.
#[derive(Clone)]
pub(crate) struct SavedMlp {
    gate: Tensor,
    up: Tensor,
}

impl Mlp {
    pub fn new(config: &ModelConfig, region: &Region, vb: ParamBuilder) -> Result<Self> {
        let (hidden, intermediate, bias) = (
            config.hidden_size,
            config.intermediate_size,
            config.mlp_bias,
        );
        let column =
            |name: &str| column_parallel_linear(hidden, intermediate, bias, region, vb.pp(name));
        Ok(Self {
            gate_proj: column("gate_proj")?,
            up_proj: column("up_proj")?,
            down_proj: row_parallel_linear(intermediate, hidden, bias, region, vb.pp("down_proj"))?,
            activation: config.activation,
        })
    }

    /// residual + mlp(xs), all (b, t, hidden).
    pub fn forward(
        &self,
        xs: &Tensor,
        residual: &Tensor,
        pass: &Pass,
    ) -> Result<(Tensor, SavedMlp)> {
        let outputs = column_parallel_forward(&[&self.gate_proj, &self.up_proj], xs, pass)?;
        let Ok([gate, up]) = <[Tensor; 2]>::try_from(outputs) else {
            bail!("an MLP has two projections up")
        };
        let ys = self.activation.forward(&gate, &up)?;
        let (out, _) = self.down_proj.forward_add(&ys, Some(residual), pass)?;
        Ok((out, SavedMlp { gate, up }))
    }

    /// Whether [`Self::backward`] needs the input: what reads it is trained.
    pub fn reads_input(&self) -> bool {
        let layers = [&self.gate_proj, &self.up_proj];
        layers.iter().any(|layer| layer.needs_input())
    }

    /// The gradient of the input `xs` from that of the output; (b, t, hidden) all.
    pub fn backward(
        &self,
        saved: SavedMlp,
        xs: Option<Tensor>,
        dy: &Tensor,
        pass: &Pass,
        gradients: &mut dyn GradientSink,
    ) -> Result<Tensor> {
        let SavedMlp { gate, up } = saved;
        let activation = self.activation;
        let (dgate, dup) = self.down_proj.backward_with(dy, pass, gradients, |dys| {
            if !self.down_proj.needs_input() {
                return Ok((activation.backward(&gate, &up, &dys)?, None));
            }
            let (dgate, dup, ys) = activation.backward_and_output(&gate, &up, &dys)?;
            Ok(((dgate, dup), Some(ys)))
        })?;
        let layers = [(&self.gate_proj, &dgate), (&self.up_proj, &dup)];
        column_parallel_backward(&layers, xs.as_ref(), pass, gradients)
    }

    /// What stays between the passes, beside the input.
    pub fn tape(&self) -> Tape {
        let up = column_parallel_tape(&[&self.gate_proj, &self.up_proj]);
        let down = self.down_proj.tape_of(true);
        Tape {
            input: up.input,
            // Of each of the two as much as goes into the third.
            saved: 2 * down.input,
            waiting: up.waiting + down.waiting,
            ..down
        }
    }

    pub fn weights(&self) -> Vec<&Tensor> {
        let column = [&self.gate_proj, &self.up_proj];
        let column = column.into_iter().flat_map(Layer::weights);
        column.chain(self.down_proj.weights()).collect()
    }
}
