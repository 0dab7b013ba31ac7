//! What attention keeps of the tokens before, while a text is generated.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_core::{Result, Tensor};

/// Keys and values of the tokens of a text so far, by layer, so that the next token takes the work of one token. Clones share them. Each
/// rank has one of its own, for the layers and heads that it has.
#[derive(Clone, Debug, Default)]
pub struct KeyValueCache(Arc<Mutex<BTreeMap<usize, (Tensor, Tensor)>>>);

impl KeyValueCache {
    /// Number of tokens whose keys and values layer `layer` has.
    ///
    /// # Errors
    /// Keys that are no (b, t, heads, head_dim).
    pub fn num_tokens(&self, layer: usize) -> Result<usize> {
        self.lock().get(&layer).map_or(Ok(0), |(k, _)| k.dim(1))
    }

    /// Appends the keys and values of new tokens, (b, t, heads, head_dim) each, to those of layer `layer`: all of them.
    ///
    /// # Errors
    /// Shapes that do not fit those before.
    pub fn append(&self, layer: usize, k: &Tensor, v: &Tensor) -> Result<(Tensor, Tensor)> {
        let mut layers = self.lock();
        let all = match layers.get(&layer) {
            None => (k.clone(), v.clone()),
            Some((old_k, old_v)) => (Tensor::cat(&[old_k, k], 1)?, Tensor::cat(&[old_v, v], 1)?),
        };
        layers.insert(layer, all.clone());
        Ok(all)
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<usize, (Tensor, Tensor)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
