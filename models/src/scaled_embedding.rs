//! A token embedding times a number.

use candle_core::{Result, Tensor};
use candle_parallel::{GradientSink, Layer, Pass, Tape, VocabParallelEmbedding};

/// A [`Layer`] from (b, t) u32 to (b, t, hidden).
#[derive(Clone)]
pub(crate) struct ScaledEmbedding {
    pub embedding: VocabParallelEmbedding,
    /// Rounded to the type of the weight, as candle's `affine` does.
    pub scale: f64,
}

impl Layer for ScaledEmbedding {
    type Saved = <VocabParallelEmbedding as Layer>::Saved;

    fn forward(&self, tokens: &Tensor, pass: &Pass) -> Result<(Tensor, Self::Saved)> {
        let (ys, saved) = self.embedding.forward(tokens, pass)?;
        Ok((ys.affine(self.scale, 0.0)?, saved))
    }

    fn backward(
        &self,
        saved: Self::Saved,
        dy: &Tensor,
        pass: &Pass,
        gradients: &mut dyn GradientSink,
    ) -> Result<Option<Tensor>> {
        let dy = dy.affine(self.scale, 0.0)?;
        self.embedding.backward(saved, &dy, pass, gradients)
    }

    fn weights(&self) -> Vec<&Tensor> {
        self.embedding.weights()
    }

    fn tape(&self) -> Option<Tape> {
        self.embedding.tape()
    }
}
