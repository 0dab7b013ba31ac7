//! A token embedding times a number.

use candle_core::{Result, Tensor};
use candle_parallel::{GradientSink, Layer, VocabParallelEmbedding};

/// A [`Layer`] from (b, t) u32 to (b, t, hidden).
#[derive(Clone)]
pub(crate) struct ScaledEmbedding {
    pub embedding: VocabParallelEmbedding,
    /// Rounded to the type of the weight, as candle's `affine` does.
    pub scale: f64,
}

impl Layer for ScaledEmbedding {
    type Saved = <VocabParallelEmbedding as Layer>::Saved;

    fn forward_saving(&self, tokens: &Tensor) -> Result<(Tensor, Self::Saved)> {
        let (ys, saved) = self.embedding.forward_saving(tokens)?;
        Ok((ys.affine(self.scale, 0.0)?, saved))
    }

    fn backward(
        &self,
        saved: Self::Saved,
        dy: &Tensor,
        gradients: &mut dyn GradientSink,
    ) -> Result<Option<Tensor>> {
        let dy = dy.affine(self.scale, 0.0)?;
        self.embedding.backward(saved, &dy, gradients)
    }

    fn weights(&self) -> Vec<&Tensor> {
        self.embedding.weights()
    }
}
