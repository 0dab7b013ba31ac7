//! A graph of tensors and operations as cuDNN wants it, built one operation at a time.
//!
//! Dimensions are (sequence, head, row, column), whatever the order in memory. Tensors that only lie between operations are
//! virtual: never in memory.
//!
//! Packed documents are sequences of different lengths, one after the other in memory (cuDNN's "ragged" tensors, "THD"): two tensors
//! of the call's give the length of each, and each tensor of data refers to one of 64-bit numbers that say where the values of each
//! begin, and end. Statistics and sums are among them but on GPUs where cuDNN's backward passes want them with a place for each row of
//! a document's, up to the longest's. There are fewer rows and columns of scores than the graph's sizes say; those beyond are masked.

use super::descriptor::{Descriptor, Value};
use super::sizes::Sizes;
use crate::attention::rectangle::Mask;
use crate::cuda::cudnn_library::{Library, Opaque};
use candle_core::{DType, Result};
use std::ffi::c_int;

/// Types of values.
pub(super) const FLOAT: c_int = 0;
const HALF: c_int = 2;
const INT32: c_int = 4;
const BFLOAT16: c_int = 9;
const BOOLEAN: c_int = 11;
const INT64: c_int = 10;

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
const CMP_LT: c_int = 304;
const LOGICAL_AND: c_int = 400;
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
/// Of packed documents: where each begins in tensors with heads of queries, with heads of keys, and with a number for each row of
/// scores; how many queries and keys each has.
pub(super) const Q_OFFSETS: i64 = 16;
pub(super) const K_OFFSETS: i64 = 17;
pub(super) const ROW_OFFSETS: i64 = 18;
pub(super) const Q_LENS: i64 = 19;
pub(super) const K_LENS: i64 = 20;
/// Of packed documents: the gradients of keys and values, of each head of queries.
pub(super) const K_HEAD_GRADS: i64 = 21;
pub(super) const V_HEAD_GRADS: i64 = 22;
const FIRST_VIRTUAL: i64 = 100;

/// Bytes to whose multiples a tensor of this number is aligned in memory: those of one number for each document may begin with
/// any of them.
pub(super) fn alignment(number: i64) -> u64 {
    match number {
        Q_OFFSETS | K_OFFSETS | ROW_OFFSETS => 8,
        Q_LENS | K_LENS => 4,
        _ => 16,
    }
}

/// A tensor of the graph.
#[derive(Clone, Copy)]
pub(super) struct Node {
    raw: Opaque,
    dims: [i64; 4],
}

/// What a product goes over: rows, and columns or what is summed over, are queries and keys.
#[derive(Clone, Copy)]
pub(super) enum Over {
    /// A row for each query, a column for each key.
    Scores,
    /// A row for each query, summed over keys.
    Queries,
    /// A row for each key, summed over queries.
    Keys,
}

/// Tensors that say where packed documents are.
struct Documents {
    q_offsets: Opaque,
    k_offsets: Opaque,
    row_offsets: Opaque,
    q_lens: Node,
    k_lens: Node,
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
    pub(super) descriptors: Vec<Descriptor>,
    operations: Vec<Opaque>,
    num_virtual: i64,
    /// What a call must bring along, and nothing else: tensors in memory and numbers, by their numbers.
    pub(super) arguments: Vec<i64>,
    sizes: Sizes,
    documents: Option<Documents>,
}

impl Graph {
    pub(super) fn new(library: &'static Library, sizes: Sizes) -> Result<Self> {
        let mut graph = Self {
            library,
            descriptors: Vec::new(),
            operations: Vec::new(),
            num_virtual: 0,
            arguments: Vec::new(),
            sizes,
            documents: None,
        };
        if sizes.packed.is_some() {
            let b = sizes.b as i64;
            let lens = [(Q_LENS, INT32, b), (K_LENS, INT32, b)];
            let offsets = [Q_OFFSETS, K_OFFSETS, ROW_OFFSETS].map(|number| (number, INT64, b + 1));
            let mut column =
                |(number, kind, len)| graph.tensor(number, kind, [len, 1, 1, 1], [1; 4], None);
            let [q_lens, k_lens] = lens.map(&mut column);
            let [q_offsets, k_offsets, row_offsets] = offsets.map(column);
            graph.documents = Some(Documents {
                q_offsets: q_offsets?.raw,
                k_offsets: k_offsets?.raw,
                row_offsets: row_offsets?.raw,
                q_lens: q_lens?,
                k_lens: k_lens?,
            });
        }
        Ok(graph)
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
        let (dims, strides) = (self.query_dims(), self.by_token(self.query_dims()));
        let offsets = self.offsets(|documents| documents.q_offsets);
        self.tensor(number, self.narrow(), dims, strides, offsets)
    }

    /// A tensor of the call's with heads of keys and values, `(b, keys, kv_heads, d)` in memory.
    pub(super) fn of_keys(&mut self, number: i64) -> Result<Node> {
        let dims = self.key_dims(self.sizes.kv_heads);
        let strides = self.by_token(dims);
        let offsets = self.offsets(|documents| documents.k_offsets);
        self.tensor(number, self.narrow(), dims, strides, offsets)
    }

    /// The same memory with rows as columns.
    pub(super) fn of_keys_transposed(&mut self, number: i64) -> Result<Node> {
        let [b, heads, keys, d] = self.key_dims(self.sizes.kv_heads);
        let [all, head, row, column] = self.by_token([b, heads, keys, d]);
        let (dims, strides) = ([b, heads, d, keys], [all, head, column, row]);
        let offsets = self.offsets(|documents| documents.k_offsets);
        self.tensor(number, self.narrow(), dims, strides, offsets)
    }

    /// A number for each row of scores, f32: `(b, heads, t)` in memory, or by token `(tokens, heads)`.
    pub(super) fn of_rows(&mut self, number: i64) -> Result<Node> {
        let dims = self.row_dims();
        let [_, heads, rows, _] = dims;
        match self.by_token_at(|documents| documents.row_offsets) {
            None => self.tensor(number, FLOAT, dims, packed(dims), None),
            offsets => self.tensor(number, FLOAT, dims, [heads * rows, 1, heads, 1], offsets),
        }
    }

    /// Sums for each value of the queries, f32: `(b, heads, t, d)` in memory, or by token `(tokens, heads, d)`.
    pub(super) fn of_sums(&mut self, number: i64) -> Result<Node> {
        let dims = self.query_dims();
        match self.by_token_at(|documents| documents.q_offsets) {
            None => self.tensor(number, FLOAT, dims, packed(dims), None),
            offsets => self.tensor(number, FLOAT, dims, self.by_token(dims), offsets),
        }
    }

    /// The gradient of keys or values, of each head of queries apart: by token `(tokens, heads, d)` in memory, else never there.
    /// cuDNN multiplies the offsets of the keys, to which it refers, with the number of heads in a group (cudnn-frontend 1.32,
    /// `scaled_dot_product_flash_attention.h`).
    pub(super) fn of_key_heads(&mut self, number: i64) -> Result<Node> {
        let (kind, dims) = (self.narrow(), self.key_dims(self.sizes.heads));
        match self.by_token_at(|documents| documents.k_offsets) {
            None => self.between(kind, dims),
            offsets => self.tensor(number, kind, dims, self.by_token(dims), offsets),
        }
    }

    /// Offsets of statistics and sums that have a place for each token.
    fn by_token_at(&self, offsets: impl Fn(&Documents) -> Opaque) -> Option<Opaque> {
        self.sizes.packed_by_token()?;
        self.offsets(offsets)
    }

    fn offsets(&self, of: impl Fn(&Documents) -> Opaque) -> Option<Opaque> {
        self.documents.as_ref().map(of)
    }

    /// Strides of a tensor whose heads lie side by side for each token.
    fn by_token(&self, [_, heads, rows, d]: [i64; 4]) -> [i64; 4] {
        [rows * heads * d, d, heads * d, 1]
    }

    /// A number that the call brings along.
    pub(super) fn number(&mut self, number: i64) -> Result<Node> {
        self.tensor(number, FLOAT, [1; 4], [1; 4], None)
    }

    /// Keys that were taken with rows as columns, as rows again.
    pub(super) fn keys_by_row(&mut self, keys: Node) -> Result<Node> {
        let dims = self.key_dims(self.sizes.kv_heads);
        let strides = self.by_token(dims);
        let offsets = self.offsets(|documents| documents.k_offsets);
        let rows = self.between_with_strides(FLOAT, dims, strides, offsets)?;
        self.reordered(keys, rows)
    }

    pub(super) fn has_groups(&self) -> bool {
        self.sizes.heads != self.sizes.kv_heads
    }

    pub(super) fn score_dims(&self) -> [i64; 4] {
        let [b, heads, t, _] = self.query_dims();
        [b, heads, t, self.sizes.num_keys as i64]
    }

    pub(super) fn row_dims(&self) -> [i64; 4] {
        let [b, heads, t, _] = self.query_dims();
        [b, heads, t, 1]
    }

    pub(super) fn query_dims(&self) -> [i64; 4] {
        let Sizes { b, t, heads, d, .. } = self.sizes;
        [b, heads, t, d].map(|count| count as i64)
    }

    fn key_dims(&self, heads: usize) -> [i64; 4] {
        let Sizes { b, num_keys, d, .. } = self.sizes;
        [b, heads, num_keys, d].map(|count| count as i64)
    }

    /// A tensor that is never in memory.
    pub(super) fn between(&mut self, kind: c_int, dims: [i64; 4]) -> Result<Node> {
        self.between_with_strides(kind, dims, packed(dims), None)
    }

    pub(super) fn between_with_strides(
        &mut self,
        kind: c_int,
        dims: [i64; 4],
        strides: [i64; 4],
        offsets: Option<Opaque>,
    ) -> Result<Node> {
        let number = FIRST_VIRTUAL + self.num_virtual;
        self.num_virtual += 1;
        self.tensor(number, kind, dims, strides, offsets)
    }

    /// A tensor; `offsets` says where the values of each document begin, if documents differ in length.
    fn tensor(
        &mut self,
        number: i64,
        kind: c_int,
        dims: [i64; 4],
        strides: [i64; 4],
        offsets: Option<Opaque>,
    ) -> Result<Node> {
        let alignment = alignment(number) as i64;
        let mut attributes = vec![
            (901, Value::DataType(kind)),
            (902, Value::Ints(&dims)),
            (903, Value::Ints(&strides)),
            (906, Value::Ints(std::slice::from_ref(&number))),
            (900, Value::Ints(std::slice::from_ref(&alignment))),
        ];
        match number {
            SCALE | ONE | UNSEEN | WINDOW => attributes.push((908, Value::Bool(true))),
            FIRST_VIRTUAL.. => attributes.push((907, Value::Bool(true))),
            _ => (),
        }
        if let Some(raw) = &offsets {
            attributes.push((913, Value::Descriptors(std::slice::from_ref(raw))));
        }
        let raw = self.keep(17, &attributes)?;
        if number < FIRST_VIRTUAL && !self.arguments.contains(&number) {
            self.arguments.push(number);
        }
        Ok(Node { raw, dims })
    }

    /// `y = left * right`, matrix by matrix.
    pub(super) fn product(
        &mut self,
        over: Over,
        [left, right]: [Node; 2],
        y: Node,
    ) -> Result<Node> {
        let how = self.keep(18, &[(1500, Value::DataType(FLOAT))])?;
        let mut descriptors = vec![(1520, left.raw), (1521, right.raw), (1522, y.raw)];
        if let Some(Documents { q_lens, k_lens, .. }) = &self.documents {
            // Of rows (1525), of columns (1526) and of what is summed over (1527).
            descriptors.extend(match over {
                Over::Scores => [(1525, q_lens.raw), (1526, k_lens.raw)],
                Over::Queries => [(1525, q_lens.raw), (1527, k_lens.raw)],
                Over::Keys => [(1525, k_lens.raw), (1527, q_lens.raw)],
            });
        }
        descriptors.push((1523, how));
        self.operation(19, &descriptors)?;
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
        self.mapped(mode, &[(751, x.raw)], y)
    }

    /// `mode(x, other)`, in f32, of the shape of x.
    pub(super) fn map2(&mut self, mode: c_int, x: Node, other: Node) -> Result<Node> {
        let y = self.between(FLOAT, x.dims)?;
        self.map2_into(mode, x, other, y)
    }

    pub(super) fn map2_into(&mut self, mode: c_int, x: Node, other: Node, y: Node) -> Result<Node> {
        self.mapped(mode, &[(751, x.raw), (752, other.raw)], y)
    }

    /// The scores, with those of keys replaced that their query does not see: unless it sees all, of keys after it, and of those before its window; of
    /// rows and columns beyond a document's last. In two or three steps, with the window in f32, as cuDNN knows it (cudnn-frontend,
    /// `diagonal_band_mask.h` and `attn_score_modifiers.h`).
    pub(super) fn seen(&mut self, scores: Node) -> Result<Node> {
        if self.sizes.mask == Mask::Full {
            return Ok(scores);
        }
        let unseen = self.number(UNSEEN)?;
        let scores = self.within_document(scores, unseen)?;
        let (row, column) = (self.index(scores, 2, FLOAT)?, self.index(scores, 3, FLOAT)?);
        let is_past = self.compared(CMP_GE, row, column)?;
        let past = self.where_true(is_past, scores, unseen)?;
        if self.sizes.window.is_none() {
            return Ok(past);
        }
        let window = self.number(WINDOW)?;
        let (row, column) = (self.index(past, 2, FLOAT)?, self.index(past, 3, FLOAT)?);
        let window_end = self.map2(ADD, column, window)?;
        let is_in_window = self.compared(CMP_GT, window_end, row)?;
        self.where_true(is_in_window, past, unseen)
    }

    fn within_document(&mut self, scores: Node, unseen: Node) -> Result<Node> {
        let Some(Documents { q_lens, k_lens, .. }) = self.documents else {
            return Ok(scores);
        };
        let (row, column) = (self.index(scores, 2, INT32)?, self.index(scores, 3, INT32)?);
        let (is_row, is_column) = (
            self.compared(CMP_LT, row, q_lens)?,
            self.compared(CMP_LT, column, k_lens)?,
        );
        let is_both = self.compared(LOGICAL_AND, is_row, is_column)?;
        self.where_true(is_both, scores, unseen)
    }

    /// The positions of the scores along a dimension.
    fn index(&mut self, scores: Node, dim: i64, precision: c_int) -> Result<Node> {
        let y = self.between(INT32, scores.dims)?;
        let attributes = [
            (0, Value::PointwiseMode(GEN_INDEX)),
            (1, Value::DataType(precision)),
            (9, Value::Ints(std::slice::from_ref(&dim))),
        ];
        self.pointwise(&attributes, &[(751, scores.raw)], y)
    }

    /// Whether the comparison holds.
    fn compared(&mut self, comparison: c_int, left: Node, right: Node) -> Result<Node> {
        let y = self.between(BOOLEAN, left.dims)?;
        let attributes = [
            (0, Value::PointwiseMode(comparison)),
            (1, Value::DataType(BOOLEAN)),
        ];
        self.pointwise(&attributes, &[(751, left.raw), (752, right.raw)], y)
    }

    /// The scores where it is true, elsewhere `other`.
    fn where_true(&mut self, is_true: Node, scores: Node, other: Node) -> Result<Node> {
        let y = self.between(FLOAT, scores.dims)?;
        let inputs = [(751, scores.raw), (752, other.raw), (758, is_true.raw)];
        self.mapped(BINARY_SELECT, &inputs, y)
    }

    fn mapped(&mut self, mode: c_int, inputs: &[(c_int, Opaque)], y: Node) -> Result<Node> {
        let attributes = [(0, Value::PointwiseMode(mode)), (1, Value::DataType(FLOAT))];
        self.pointwise(&attributes, inputs, y)
    }

    fn pointwise(
        &mut self,
        attributes: &[(c_int, Value<'_>)],
        inputs: &[(c_int, Opaque)],
        y: Node,
    ) -> Result<Node> {
        let how = self.keep(0, attributes)?;
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

    /// The finished graph, with `more` attributes; it refers to the descriptors.
    pub(super) fn finish(&self, more: &[(c_int, Value<'_>)]) -> Result<Descriptor> {
        let mut attributes = vec![(801, Value::Descriptors(&self.operations))];
        attributes.extend_from_slice(more);
        Descriptor::of(self.library, 15, &attributes)
    }
}
