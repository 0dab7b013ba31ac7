//! What a tensor of a file is, and how its rows follow from those of a weight.

use super::GgmlDType;
use super::blocks::num_bytes;

/// A tensor of a file.
#[derive(Clone, Debug)]
pub struct GgufTensor {
    /// Its name there.
    pub name: String,
    /// (rows, width), or (width).
    pub shape: Vec<usize>,
    /// Type of its values there.
    pub dtype: GgmlDType,
    /// Where they come from.
    pub content: GgufContent,
}

/// Where values come from.
#[derive(Clone, Debug)]
pub enum GgufContent {
    /// The weight of this name, changed.
    Weight {
        /// Its name in the model.
        name: String,
        /// How.
        change: RowChange,
    },
    /// These.
    Values(Vec<f32>),
}

/// How a tensor of the file differs from the model's weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowChange {
    /// Not at all.
    None,
    /// The rows of each head of `head_dim` are interleaved: those of the first half stand before their partners of the
    /// second. llama.cpp's rotary embeddings turn neighbours in some families, where transformers turns a value and the
    /// one half a head further.
    Interleaved {
        /// Rows of a head.
        head_dim: usize,
    },
    /// 1 is added, for norms that multiply by 1 + weight.
    PlusOne,
}

impl RowChange {
    /// Rows that must be changed together.
    pub(super) fn group(self) -> usize {
        match self {
            Self::Interleaved { head_dim } => head_dim,
            Self::None | Self::PlusOne => 1,
        }
    }

    /// Makes rows of the file of the weight's, whole groups of a tensor of this shape. Of a vector each value is a row.
    pub(super) fn apply(self, values: &mut Vec<f32>, shape: &[usize]) {
        let width = row_width(shape);
        match self {
            Self::None => {}
            Self::PlusOne => values.iter_mut().for_each(|value| *value += 1.0),
            Self::Interleaved { head_dim } => {
                *values = reordered(values, width, head_dim, |row| {
                    (row % 2) * (head_dim / 2) + row / 2
                });
            }
        }
    }
}

fn row_width(shape: &[usize]) -> usize {
    shape.get(1).copied().unwrap_or(1)
}

/// Rows in another order: row `i` of a head is the one that `from(i)` says.
fn reordered(
    values: &[f32],
    width: usize,
    head_dim: usize,
    from: impl Fn(usize) -> usize,
) -> Vec<f32> {
    let mut rows = Vec::with_capacity(values.len());
    for head in values.chunks(head_dim * width) {
        for row in 0..head.len() / width {
            let start = from(row) * width;
            rows.extend_from_slice(&head[start..start + width]);
        }
    }
    rows
}

impl GgufTensor {
    /// Values of a row.
    pub(super) fn width(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    pub(super) fn num_rows(&self) -> usize {
        let dims = self.shape.len().saturating_sub(1);
        self.shape[..dims].iter().product()
    }

    /// Its size in the file, without what stands between it and the next.
    pub fn num_bytes(&self) -> u64 {
        num_bytes(self.dtype, self.num_rows() * self.width()) as u64
    }

    pub(super) fn change(&self) -> RowChange {
        match &self.content {
            GgufContent::Weight { change, .. } => *change,
            GgufContent::Values(_) => RowChange::None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::RowChange;

    /// The order of llama.cpp's conversion: a head's rows as (2, head_dim / 2), those dims swapped.
    #[test]
    fn rows_of_a_head_are_interleaved() {
        let change = RowChange::Interleaved { head_dim: 6 };
        let weight: Vec<f32> = (0..24).map(|value| value as f32).collect();
        let mut rows = weight;
        change.apply(&mut rows, &[12, 2]);
        let first: Vec<f32> = rows.chunks(2).map(|row| row[0] / 2.0).collect();
        assert_eq!(first, [0., 3., 1., 4., 2., 5., 6., 9., 7., 10., 8., 11.]);
        let mut bias: Vec<f32> = (0..12).map(|value| value as f32).collect();
        change.apply(&mut bias, &[12]);
        assert_eq!(bias, first);
    }
}
