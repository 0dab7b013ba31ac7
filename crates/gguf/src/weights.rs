//! Where the weights of a file to be written come from.

use std::ops::Range;

use candle_core::{DType, Result};

/// Weights that are read by rows.
pub trait Weights: Sync {
    /// What there is.
    fn names(&self) -> Vec<String>;

    /// The type in which the weight of this name is stored.
    ///
    /// # Errors
    /// There is no such weight.
    fn dtype(&self, name: &str) -> Result<DType>;

    /// These rows of the weight of this name and shape in f32; of a vector all of it is one row.
    ///
    /// # Errors
    /// There is no such weight; it cannot be read.
    fn rows(&self, name: &str, shape: &[usize], rows: Range<usize>) -> Result<Vec<f32>>;
}
