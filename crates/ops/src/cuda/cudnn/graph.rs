//! A graph of tensors and operations as cuDNN wants it, built one operation at a time.
//!
//! Dimensions are (sequence, head, row, column), whatever the order in memory. Tensors that only lie between operations are
//! virtual: never in memory.

use super::descriptor::{Descriptor, Value};
use super::library::{Library, Opaque};
use super::sizes::Sizes;
use candle_core::{DType, Result};
use std::ffi::c_int;

/// Types of values.
pub(super) const FLOAT: c_int = 0;
const HALF: c_int = 2;
pub(super) const INT32: c_int = 4;
const BFLOAT16: c_int = 9;
pub(super) const BOOLEAN: c_int = 11;

/// Elementwise functions.
pub(super) const ADD: c_int = 0;
pub(super) const MUL: c_int = 1;
pub(super) const DIV: c_int = 6;
pub(super) const SUB: c_int = 9;
pub(super) const EXP: c_int = 13;
pub(super) const LOG: c_int = 15;
pub(super) const IDENTITY: c_int = 21;
const CMP_GT: c_int = 302;
const CMP_GE: c_int = 303;
const GEN_INDEX: c_int = 501;
const BINARY_SELECT: c_int = 601;

/// Reductions.
pub(super) const SUM: c_int = 0;
pub(super) const MAX: c_int = 3;

/// Numbers by which a call names its tensors. Virtual ones have numbers from `FIRST_VIRTUAL` on.
pub(super) const Q: i64 = 1;
pub(super) const K: i64 = 2;
pub(super) const V: i64 = 3;
pub(super) const OUT: i64 = 4;
pub(super) const LOG_SUM_EXP: i64 = 5;
pub(super) const GRAD: i64 = 6;
pub(super) const Q_GRAD: i64 = 7;
pub(super) const K_GRAD: i64 = 8;
pub(super) const V_GRAD: i64 = 9;
pub(super) const DELTA: i64 = 10;
/// Numbers that the call brings along: the scale of the scores, 1, and the score of a key that is not seen.
pub(super) const SCALE: i64 = 11;
pub(super) const ONE: i64 = 12;
pub(super) const UNSEEN: i64 = 13;
/// The queries' gradient in f32, where it is added up in memory.
pub(super) const Q_SUMS: i64 = 14;
/// One more of those numbers: how many positions a query sees.
pub(super) const WINDOW: i64 = 15;
const FIRST_VIRTUAL: i64 = 100;

/// Bytes to whose multiples tensors in memory are aligned.
pub(super) const ALIGNMENT: u64 = 16;

/// A tensor of the graph.
#[derive(Clone, Copy)]
pub(super) struct Node {
    raw: Opaque,
    dims: [i64; 4],
}

/// Strides of rows without gaps.
pub(super) fn packed([_, heads, rows, columns]: [i64; 4]) -> [i64; 4] {
    [heads * rows * columns, rows * columns, columns, 1]
}

/// Strides of packed matrices, stored column by column.
pub(super) fn by_column([_, heads, rows, columns]: [i64; 4]) -> [i64; 4] {
    [heads * rows * columns, rows * columns, 1, rows]
}

/// The graph so far.
pub(super) struct Graph {
    library: &'static Library,
    /// All of them, alive as long as others refer to them.
    descriptors: Vec<Descriptor>,
    operations: Vec<Opaque>,
    num_virtual: i64,
    sizes: Sizes,
}

impl Graph {
    pub(super) fn new(library: &'static Library, sizes: Sizes) -> Self {
        Self {
            library,
            descriptors: Vec::new(),
            operations: Vec::new(),
            num_virtual: 0,
            sizes,
        }
    }

    /// The type of the call's queries, keys and values.
    pub(super) fn narrow(&self) -> c_int {
        match self.sizes.dtype {
            DType::F16 => HALF,
            _ => BFLOAT16,
        }
    }

    /// A tensor of the call's with heads of queries, `(b, t, heads, d)` in memory.
    pub(super) fn of_queries(&mut self, number: i64) -> Result<Node> {
        let [b, t, d] = self.counts();
        let heads = self.sizes.heads as i64;
        let strides = [t * heads * d, d, heads * d, 1];
        self.tensor(number, self.narrow(), [b, heads, t, d], strides, &[])
    }

    /// A tensor of the call's with heads of keys and values, `(b, t, kv_heads, d)` in memory.
    pub(super) fn of_keys(&mut self, number: i64) -> Result<Node> {
        let [b, t, d] = self.counts();
        let heads = self.sizes.kv_heads as i64;
        let strides = [t * heads * d, d, heads * d, 1];
        self.tensor(number, self.narrow(), [b, heads, t, d], strides, &[])
    }

    /// The same memory with rows as columns.
    pub(super) fn of_keys_transposed(&mut self, number: i64) -> Result<Node> {
        let [b, t, d] = self.counts();
        let heads = self.sizes.kv_heads as i64;
        let strides = [t * heads * d, d, 1, heads * d];
        self.tensor(number, self.narrow(), [b, heads, d, t], strides, &[])
    }

    /// A number for each row of scores, f32, `(b, heads, t)` in memory.
    pub(super) fn of_rows(&mut self, number: i64) -> Result<Node> {
        let dims = self.row_dims();
        self.tensor(number, FLOAT, dims, packed(dims), &[])
    }

    /// Sums for each value of the queries, f32, `(b, heads, t, d)` in memory.
    pub(super) fn of_sums(&mut self, number: i64) -> Result<Node> {
        let dims = self.query_dims();
        self.tensor(number, FLOAT, dims, packed(dims), &[])
    }

    /// A number that the call brings along.
    pub(super) fn number(&mut self, number: i64) -> Result<Node> {
        let by_value = (908, Value::Bool(true));
        self.tensor(number, FLOAT, [1; 4], [1; 4], &[by_value])
    }

    /// Keys that were taken with rows as columns, as rows again.
    pub(super) fn keys_by_row(&mut self, keys: Node) -> Result<Node> {
        let [b, t, d] = self.counts();
        let heads = self.sizes.kv_heads as i64;
        let strides = [t * heads * d, d, heads * d, 1];
        let rows = self.between_with_strides(FLOAT, [b, heads, t, d], strides)?;
        self.reordered(keys, rows)
    }

    pub(super) fn has_groups(&self) -> bool {
        self.sizes.heads != self.sizes.kv_heads
    }

    pub(super) fn score_dims(&self) -> [i64; 4] {
        let [b, t, _] = self.counts();
        [b, self.sizes.heads as i64, t, t]
    }

    pub(super) fn row_dims(&self) -> [i64; 4] {
        let [b, t, _] = self.counts();
        [b, self.sizes.heads as i64, t, 1]
    }

    pub(super) fn query_dims(&self) -> [i64; 4] {
        let [b, t, d] = self.counts();
        [b, self.sizes.heads as i64, t, d]
    }

    fn counts(&self) -> [i64; 3] {
        let Sizes { b, t, d, .. } = self.sizes;
        [b as i64, t as i64, d as i64]
    }

    /// A tensor that is never in memory.
    pub(super) fn between(&mut self, kind: c_int, dims: [i64; 4]) -> Result<Node> {
        self.between_with_strides(kind, dims, packed(dims))
    }

    pub(super) fn between_with_strides(
        &mut self,
        kind: c_int,
        dims: [i64; 4],
        strides: [i64; 4],
    ) -> Result<Node> {
        let number = FIRST_VIRTUAL + self.num_virtual;
        self.num_virtual += 1;
        self.tensor(number, kind, dims, strides, &[(907, Value::Bool(true))])
    }

    fn tensor(
        &mut self,
        number: i64,
        kind: c_int,
        dims: [i64; 4],
        strides: [i64; 4],
        more: &[(c_int, Value<'_>)],
    ) -> Result<Node> {
        let mut attributes = vec![
            (901, Value::DataType(kind)),
            (902, Value::Ints(&dims)),
            (903, Value::Ints(&strides)),
            (906, Value::Ints(std::slice::from_ref(&number))),
            (900, Value::Ints(&[ALIGNMENT as i64])),
        ];
        attributes.extend_from_slice(more);
        let raw = self.keep(17, &attributes)?;
        Ok(Node { raw, dims })
    }

    /// `y = left * right`, matrix by matrix.
    pub(super) fn product(&mut self, left: Node, right: Node, y: Node) -> Result<Node> {
        let how = self.keep(18, &[(1500, Value::DataType(FLOAT))])?;
        self.operation(
            19,
            &[
                (1520, left.raw),
                (1521, right.raw),
                (1522, y.raw),
                (1523, how),
            ],
        )?;
        Ok(y)
    }

    /// `y` adds up, or finds the largest, over the dimensions where y has fewer than x.
    pub(super) fn reduction(&mut self, operator: c_int, x: Node, y: Node) -> Result<Node> {
        let operator = Value::ReductionOperator(operator);
        let how = self.keep(21, &[(1601, Value::DataType(FLOAT)), (1600, operator)])?;
        self.operation(22, &[(1612, how), (1610, x.raw), (1611, y.raw)])?;
        Ok(y)
    }

    /// The values of `x` as `y`, of another type or order in memory.
    pub(super) fn reordered(&mut self, x: Node, y: Node) -> Result<Node> {
        self.operation(31, &[(2200, x.raw), (2201, y.raw)])?;
        Ok(y)
    }

    /// `mode(x)`, in f32, of the shape of x.
    pub(super) fn map(&mut self, mode: c_int, x: Node) -> Result<Node> {
        let y = self.between(FLOAT, x.dims)?;
        self.map_into(mode, x, y)
    }

    pub(super) fn map_into(&mut self, mode: c_int, x: Node, y: Node) -> Result<Node> {
        self.pointwise(mode, &[], &[(751, x.raw)], y)
    }

    /// `mode(x, other)`, in f32, of the shape of x.
    pub(super) fn map2(&mut self, mode: c_int, x: Node, other: Node) -> Result<Node> {
        let y = self.between(FLOAT, x.dims)?;
        self.map2_into(mode, x, other, y)
    }

    pub(super) fn map2_into(&mut self, mode: c_int, x: Node, other: Node, y: Node) -> Result<Node> {
        self.pointwise(mode, &[], &[(751, x.raw), (752, other.raw)], y)
    }

    /// The scores, with those of keys replaced that their query does not see: of keys after it, and of those before its window.
    /// In two steps, with the window in f32, as cuDNN knows it (cudnn-frontend, `diagonal_band_mask.h`).
    pub(super) fn seen(&mut self, scores: Node) -> Result<Node> {
        let unseen = self.number(UNSEEN)?;
        let (row, column) = (self.index(scores, 2)?, self.index(scores, 3)?);
        let past = self.where_true(CMP_GE, [row, column], scores, unseen)?;
        if self.sizes.window.is_none() {
            return Ok(past);
        }
        let window = self.number(WINDOW)?;
        let (row, column) = (self.index(past, 2)?, self.index(past, 3)?);
        let window_end = self.map2(ADD, column, window)?;
        self.where_true(CMP_GT, [window_end, row], past, unseen)
    }

    /// The positions of the scores along a dimension.
    fn index(&mut self, scores: Node, dim: i64) -> Result<Node> {
        let y = self.between(INT32, scores.dims)?;
        let dim = (9, Value::Ints(std::slice::from_ref(&dim)));
        self.pointwise(GEN_INDEX, &[dim], &[(751, scores.raw)], y)
    }

    /// The scores where the comparison holds, elsewhere `other`.
    fn where_true(
        &mut self,
        comparison: c_int,
        [left, right]: [Node; 2],
        scores: Node,
        other: Node,
    ) -> Result<Node> {
        let is_true = self.between(BOOLEAN, scores.dims)?;
        let compared = [(751, left.raw), (752, right.raw)];
        self.pointwise(comparison, &[], &compared, is_true)?;
        let y = self.between(FLOAT, scores.dims)?;
        let inputs = [(751, scores.raw), (752, other.raw), (758, is_true.raw)];
        self.pointwise(BINARY_SELECT, &[], &inputs, y)
    }

    fn pointwise(
        &mut self,
        mode: c_int,
        more: &[(c_int, Value<'_>)],
        inputs: &[(c_int, Opaque)],
        y: Node,
    ) -> Result<Node> {
        let precision = match mode {
            CMP_GT | CMP_GE => BOOLEAN,
            _ => FLOAT,
        };
        let mut attributes = vec![
            (0, Value::PointwiseMode(mode)),
            (1, Value::DataType(precision)),
        ];
        attributes.extend_from_slice(more);
        let how = self.keep(0, &attributes)?;
        let mut tensors = vec![(750, how), (753, y.raw)];
        tensors.extend_from_slice(inputs);
        self.operation(13, &tensors)?;
        Ok(y)
    }

    fn operation(&mut self, kind: c_int, descriptors: &[(c_int, Opaque)]) -> Result<()> {
        let attributes: Vec<_> = descriptors
            .iter()
            .map(|(attribute, raw)| (*attribute, Value::Descriptors(std::slice::from_ref(raw))))
            .collect();
        let raw = self.keep(kind, &attributes)?;
        self.operations.push(raw);
        Ok(())
    }

    fn keep(&mut self, kind: c_int, attributes: &[(c_int, Value<'_>)]) -> Result<Opaque> {
        let descriptor = Descriptor::of(self.library, kind, attributes)?;
        let raw = descriptor.raw();
        self.descriptors.push(descriptor);
        Ok(raw)
    }

    /// The finished graph, with `more` attributes: the last of the descriptors, which it refers to.
    pub(super) fn finish(mut self, more: &[(c_int, Value<'_>)]) -> Result<Vec<Descriptor>> {
        let operations = std::mem::take(&mut self.operations);
        let mut attributes = vec![(801, Value::Descriptors(&operations))];
        attributes.extend_from_slice(more);
        self.keep(15, &attributes)?;
        Ok(self.descriptors)
    }
}
