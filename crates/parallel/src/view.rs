//! Which values of a parameter lie one after the other somewhere, on a rank or in a file, and what two such places have
//! in common.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::placement::{Indices, intersect};

/// Values of a parameter that lie one after the other on a rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct View {
    /// Hugging Face name of the parameter.
    pub name: String,
    /// Shape of the whole parameter.
    pub shape: Vec<usize>,
    /// The dim of which the rank holds some indices.
    pub dim: usize,
    /// Those indices: a range, or several.
    pub held: Indices,
    /// Row-major offsets into the values with these indices.
    pub range: Range<usize>,
}

/// Values that lie one after the other in a whole parameter, and in a view of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ValueRun {
    /// Row-major offsets into the whole parameter.
    pub global: Range<usize>,
    /// Places in the view.
    pub local: Range<usize>,
}

/// Values that two places have in common, by the first in each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Common {
    pub start: usize,
    pub other_start: usize,
    pub len: usize,
}

impl View {
    /// The values at row-major offsets `range` of a parameter of which all is here.
    pub fn of_whole(name: &str, shape: &[usize], range: Range<usize>) -> Self {
        Self {
            name: name.to_string(),
            shape: shape.to_vec(),
            dim: 0,
            held: (0..shape.first().copied().unwrap_or(1)).into(),
            range,
        }
    }

    pub fn len(&self) -> usize {
        self.range.len()
    }

    /// Whether the numbers fit each other.
    pub fn is_valid(&self) -> bool {
        let width = self.width();
        let mut dims = self.shape.iter();
        let Some(all) = dims.try_fold(1usize, |product, &dim| product.checked_mul(dim)) else {
            return false;
        };
        let held = all / width.max(1) * self.held.len().min(width);
        (self.dim < self.shape.len() || self.shape.is_empty() && self.dim == 0)
            && self.held.are_valid(width)
            && self.range.start <= self.range.end
            && self.range.end <= held
    }

    /// Length of the cut dim.
    fn width(&self) -> usize {
        self.shape.get(self.dim).copied().unwrap_or(1)
    }

    /// Its runs in rising order.
    pub fn runs(&self) -> impl Iterator<Item = ValueRun> + use<> {
        let (width, part) = (self.width(), self.range.clone());
        // All of the parameter is one run.
        let is_all = width > 0 && self.held.len() == width;
        let unit = if is_all {
            self.shape.iter().product::<usize>() / width
        } else {
            self.shape.iter().skip(self.dim + 1).product()
        };
        let (held, stride) = (self.held.scaled(unit), width * unit);
        let len = held.len();
        let rows = match len {
            0 => 0..0,
            _ => part.start / len..part.end.div_ceil(len),
        };
        let runs = rows.flat_map(move |row| {
            let runs = held.places().map(|(place, range)| {
                let (start, local) = (row * stride + range.start, row * len + place);
                (start, local..local + range.len())
            });
            runs.collect::<Vec<_>>()
        });
        runs.filter_map(move |(start, local)| {
            let both = intersect(&local, &part);
            let start = start + both.start - local.start;
            (!both.is_empty()).then(|| ValueRun {
                global: start..start + both.len(),
                local: both.start - part.start..both.end - part.start,
            })
        })
    }

    /// What this view and `other`, of the same parameter, have in common.
    pub fn common(&self, other: &Self) -> Vec<Common> {
        common(self.runs(), other.runs())
    }
}

/// What two lists of rising runs have in common.
pub(crate) fn common(
    one: impl Iterator<Item = ValueRun>,
    other: impl Iterator<Item = ValueRun>,
) -> Vec<Common> {
    let (mut one, mut other) = (one.peekable(), other.peekable());
    let mut common = Vec::new();
    while let (Some(a), Some(b)) = (one.peek(), other.peek()) {
        let both = intersect(&a.global, &b.global);
        if !both.is_empty() {
            common.push(Common {
                start: a.local.start + both.start - a.global.start,
                other_start: b.local.start + both.start - b.global.start,
                len: both.len(),
            });
        }
        if a.global.end <= b.global.end {
            one.next();
        } else {
            other.next();
        }
    }
    common
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use super::View;

    fn piece<const N: usize>(
        shape: &[usize],
        dim: usize,
        held: [Range<usize>; N],
        range: Range<usize>,
    ) -> View {
        View {
            name: "w".into(),
            shape: shape.to_vec(),
            dim,
            held: held.into_iter().collect(),
            range,
        }
    }

    /// Offsets into the whole parameter of the values of a piece, by counting through all indices.
    fn offsets(piece: &View) -> Vec<usize> {
        let inner: usize = piece.shape[piece.dim + 1..].iter().product();
        let all = 0..piece.shape.iter().product::<usize>();
        let index = |offset: &usize| offset / inner % piece.shape[piece.dim];
        let held = all.filter(|offset| piece.held.contains(index(offset)));
        held.collect::<Vec<_>>()[piece.range.clone()].to_vec()
    }

    #[test]
    fn what_pieces_have_in_common() {
        let shape = [3, 5, 2];
        let pieces = [
            piece(&shape, 0, [0..3], 0..30),
            piece(&shape, 0, [0..3], 7..19),
            piece(&shape, 0, [1..3], 3..20),
            piece(&shape, 0, [0..1, 2..3], 3..17),
            piece(&shape, 1, [0..2], 0..12),
            piece(&shape, 1, [0..1, 2..3, 4..5], 0..18),
            piece(&shape, 1, [1..2, 3..5], 3..16),
            piece(&shape, 1, [1..4], 5..17),
            piece(&shape, 1, [3..5], 0..0),
            piece(&shape, 2, [1..2], 2..14),
            piece(&shape, 2, [0..0], 0..0),
            piece(&shape, 2, [0..2], 1..29),
        ];
        for shape in [[0, 5, 2], [3, 0, 2], [3, 5, 0]] {
            for dim in 0..3 {
                let empty = piece(&shape, dim, [0..shape[dim]], 0..0);
                assert!(empty.common(&empty).is_empty(), "{empty:?}");
            }
        }
        for a in &pieces {
            assert!(a.is_valid(), "{a:?}");
            for b in &pieces {
                let (of_a, of_b) = (offsets(a), offsets(b));
                let found = a.common(b).into_iter().flat_map(|common| {
                    (0..common.len).map(move |i| (common.start + i, common.other_start + i))
                });
                let found: Vec<(usize, usize)> = found.collect();
                let expected = of_a.iter().enumerate().filter_map(|(i, offset)| {
                    let j = of_b.iter().position(|other| other == offset)?;
                    Some((i, j))
                });
                assert_eq!(found, expected.collect::<Vec<_>>(), "{a:?} {b:?}");
            }
        }
        let scalar = piece(&[], 0, [0..1], 0..1);
        assert!(scalar.is_valid());
        assert_eq!(scalar.common(&scalar).len(), 1);
    }

    #[test]
    fn numbers_that_do_not_fit_are_seen() {
        assert!(!piece(&[3, 5], 2, [0..1], 0..1).is_valid());
        assert!(!piece(&[3, 5], 1, [3..6], 0..1).is_valid());
        assert!(!piece(&[3, 5], 1, [3..5], 0..7).is_valid());
        assert!(!piece(&[3, 5], 1, [0..1, 4..6], 0..1).is_valid());
        assert!(!piece(&[3, 5], 0, [0..3], Range { start: 2, end: 1 }).is_valid());
    }
}
