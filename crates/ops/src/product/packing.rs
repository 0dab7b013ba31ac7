//! Copying the parts of two matrices that are about to be multiplied into the order in which they are read.
//!
//! A panel is a few vectors, rows of the left matrix or columns of the right one, over a range of `k`. Its lines have the lanes
//! of 16 vectors at one place of `k`, or, if the panel is packed by vectors, 16 lanes along `k` of one vector. Lanes beyond the last `k`
//! are 0. In the place of vectors that a group of 16 lacks there may be anything: it goes to sums that nobody reads.

use super::matrix::Matrix;
use super::transpose::transposed;
use crate::cpu::avx512::Lanes;
use crate::cpu::element::Element;
use crate::cpu::lines::{LANES, Line, prefetch};
use candle_core::DType;
use std::arch::x86_64::{
    __m512i, _MM_HINT_T1, _mm_prefetch, _mm512_setzero_si512, _mm512_store_si512,
};
use std::array::from_fn;
use std::ops::Range;

/// How panels of a block of `k` lie in memory.
#[derive(Clone, Copy)]
pub(super) struct Layout {
    /// Vectors of a panel, a multiple of 16 if it is packed by vectors.
    pub(super) width: usize,
    /// Whether a line has lanes of one vector.
    pub(super) by_vectors: bool,
    /// Lanes of each vector along `k`, a multiple of 16 if packed by vectors.
    pub(super) lanes: usize,
    /// Lines from one panel to the next.
    pub(super) stride: usize,
}

/// How values become lanes, and these panels.
pub(super) trait Format {
    /// Values of a lane, along `k`.
    const TERMS: usize;
    /// Lanes for each value.
    const PARTS: usize;

    /// Writes panels of the rows `vectors` of `source` over `k` to `lines`. The right matrix is to be given transposed.
    ///
    /// # Safety
    /// The processor can make such lanes.
    unsafe fn pack<T: Element>(
        source: Matrix<'_, T>,
        vectors: Range<usize>,
        k: Range<usize>,
        layout: Layout,
        lines: &mut [Line],
    );
}

/// f32.
pub(super) struct Terms;

/// Two bf16, of sums of `PARTS` of them.
pub(super) struct Pairs<const PARTS: usize>;

impl Layout {
    /// Panels of all parts of so many lanes, one after the other.
    pub(super) fn new<F: Format>(lanes: usize, width: usize, by_vectors: bool) -> Self {
        Self {
            width,
            by_vectors,
            lanes,
            stride: lanes * width.div_ceil(LANES) * F::PARTS,
        }
    }

    /// Lines of a panel for each part of the values.
    pub(super) fn part_lines(&self) -> usize {
        self.lanes * self.width.div_ceil(LANES)
    }

    /// Some of the lanes of a panel, from a multiple of 16 on if it is packed by vectors.
    pub(super) fn lanes_of<'a>(&self, panel: &'a [Line], first: usize, count: usize) -> Panel<'a> {
        let lines_per_lane = self.width.div_ceil(LANES);
        Panel {
            lines: &panel[first * lines_per_lane..],
            len: count * lines_per_lane,
            part_stride: self.part_lines(),
            vector_step: 1,
            lane_step: lines_per_lane * LANES,
            run: count * lines_per_lane,
            num_runs: 1,
        }
    }

    /// The line from which, and the step by which, the block of 16 vectors by 16 lanes is stored.
    pub(super) fn place(&self, vector: usize, lane: usize) -> (usize, usize) {
        let (sub, subs) = (vector % self.width / LANES, self.width.div_ceil(LANES));
        let panel = vector / self.width * self.stride;
        match self.by_vectors {
            true => (panel + lane * subs + sub * LANES, 1),
            false => (panel + lane * subs + sub, subs),
        }
    }
}

/// Lanes of a packed panel.
#[derive(Clone, Copy)]
pub(super) struct Panel<'a> {
    lines: &'a [Line],
    len: usize,
    part_stride: usize,
    vector_step: usize,
    lane_step: usize,
    /// Lines of each part that follow each other, and how many times as many there are, `vector_step` apart.
    run: usize,
    num_runs: usize,
}

/// Rows that are a multiple of so many bytes apart are all in the same few places of the first-level cache.
const SAME_PLACE: usize = 1 << 12;

impl<'a> Panel<'a> {
    /// `num_rows` rows of a matrix of bf16 from `row` on as they lie there, as a panel that is packed by vectors has them, if these are whole
    /// lines.
    pub(super) fn of_rows<T: Element>(
        source: Matrix<'a, T>,
        row: usize,
        num_rows: usize,
        k: &Range<usize>,
    ) -> Option<Self> {
        let values = size_of::<Line>() / size_of::<T>();
        let row_bytes = source.row_stride * size_of::<T>();
        let is_whole = T::DTYPE == DType::BF16
            && source.col_stride == 1
            && row + num_rows <= source.rows
            && k.end <= source.cols
            && k.len().is_multiple_of(values)
            && row_bytes.is_multiple_of(size_of::<Line>())
            && !row_bytes.is_multiple_of(SAME_PLACE);
        if !is_whole || k.is_empty() || num_rows == 0 {
            return None;
        }
        let first = row * source.row_stride + k.start;
        let rows = &source.data[first..first + (num_rows - 1) * source.row_stride + k.len()];
        // SAFETY: a line is 16 lanes without padding, and any two bf16 are one of them.
        let (before, lines, after) = unsafe { rows.align_to::<Line>() };
        let is_aligned = before.is_empty() && after.is_empty();
        is_aligned.then_some(Self {
            lines,
            len: lines.len(),
            part_stride: 0,
            vector_step: row_bytes / size_of::<Line>(),
            lane_step: 1,
            run: k.len() / values,
            num_runs: num_rows,
        })
    }

    /// Of a panel that is packed by vectors, lines from a line of one vector to that of the next, and to the next one of the same.
    pub(super) fn steps(self) -> (usize, usize) {
        (self.vector_step, self.lane_step)
    }

    /// Asks the second-level cache for some of the lines of the first part: for these of `of` equal shares.
    pub(super) fn prefetch(&self, shares: Range<usize>, of: usize) {
        let lines = self.run * self.num_runs;
        let range = lines * shares.start / of..lines * shares.end / of;
        let (mut run, mut line) = (range.start / self.run, range.start % self.run);
        for _ in range {
            let place = self
                .lines
                .as_ptr()
                .wrapping_add(run * self.vector_step + line);
            // SAFETY: nothing is read, whatever the address.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(place.cast()) };
            line += 1;
            if line == self.run {
                (run, line) = (run + 1, 0);
            }
        }
    }

    /// Those of one part of the values.
    pub(super) fn part(self, part: usize) -> &'a [Line] {
        &self.lines[part * self.part_stride..][..self.len]
    }
}

/// `$along` makes up to 16 lanes along `k` of a place, a number of values and a part of them, `$across` those of up to 16 vectors at one
/// `k`, and at the next, or null.
macro_rules! impl_format {
    ($format:ty, [$($generics:tt)*], $terms:expr, $parts:expr, $features:literal, $along:expr, $across:expr) => {
        impl<$($generics)*> Format for $format {
            const TERMS: usize = $terms;
            const PARTS: usize = $parts;

            #[target_feature(enable = $features)]
            unsafe fn pack<T: Element>(
                source: Matrix<'_, T>,
                vectors: Range<usize>,
                k: Range<usize>,
                layout: Layout,
                lines: &mut [Line],
            ) {
                check(source, &vectors, &k);
                let is_along = source.col_stride == 1;
                let place = |vector: usize, k: usize| {
                    let offset = vector * source.row_stride + k * source.col_stride;
                    source.data.as_ptr().wrapping_add(offset)
                };
                let mut pack_block = |group: &Range<usize>, lane: usize| {
                    let first_k = k.start + lane * Self::TERMS;
                    let len = k.end.saturating_sub(first_k).min(LANES * Self::TERMS);
                    for part in 0..Self::PARTS {
                        let zeros = _mm512_setzero_si512();
                        let mut block: [__m512i; LANES] = if is_along {
                            from_fn(|i| {
                                // The last vector also stands for those that the group lacks: without a branch.
                                let vector = (group.start + i).min(group.end - 1);
                                // What is read a few blocks later.
                                prefetch(place(vector + group.len(), first_k));
                                // SAFETY: the values lie in the matrix, by the check above.
                                unsafe { $along(place(vector, first_k), len, part) }
                            })
                        } else {
                            from_fn(|i| {
                                let this_k = first_k + i * Self::TERMS;
                                if this_k >= first_k + len {
                                    return zeros;
                                }
                                for k in this_k..this_k + Self::TERMS {
                                    prefetch(place(group.start, k + LANES * Self::TERMS));
                                }
                                let next = match this_k + 1 < k.end {
                                    true => place(group.start, this_k + 1),
                                    false => std::ptr::null(),
                                };
                                // SAFETY: as above.
                                unsafe { $across(place(group.start, this_k), next, group.len(), part) }
                            })
                        };
                        if is_along != layout.by_vectors {
                            block = transposed(&block);
                        }
                        let (first, step) = layout.place(group.start - vectors.start, lane);
                        let count = match layout.by_vectors {
                            true => LANES,
                            false => LANES.min(layout.lanes - lane),
                        };
                        let lines = lines[part * layout.part_lines() + first..].iter_mut();
                        let mut lines = lines.step_by(step).take(count);
                        for register in block {
                            if let Some(line) = lines.next() {
                                // SAFETY: a line is 64 bytes, aligned.
                                unsafe { _mm512_store_si512(line.0.as_mut_ptr().cast(), register) };
                            }
                        }
                    }
                };
                // In the order in which memory is read.
                let groups = groups(vectors.clone(), layout.width);
                let lanes = (0..layout.lanes).step_by(LANES);
                if is_along {
                    groups.for_each(|group| lanes.clone().for_each(|lane| pack_block(&group, lane)));
                } else {
                    lanes.for_each(|lane| groups.clone().for_each(|group| pack_block(&group, lane)));
                }
            }
        }
    };
}

impl_format!(
    Terms,
    [],
    1,
    1,
    "avx512f,avx512bw,avx512vl,avx512dq",
    |place, len, _part| T::terms(place, len),
    |place, _next, len, _part| T::terms(place, len)
);

impl_format!(
    Pairs<PARTS>,
    [const PARTS: usize],
    2,
    PARTS,
    "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16",
    T::pairs,
    T::interleaved
);

fn check<T: Lanes>(source: Matrix<'_, T>, vectors: &Range<usize>, k: &Range<usize>) {
    assert!(vectors.end <= source.rows && k.end <= source.cols);
    let is_empty = vectors.is_empty() || k.is_empty();
    let last = || (vectors.end - 1) * source.row_stride + (k.end - 1) * source.col_stride;
    assert!(is_empty || last() < source.data.len());
    assert!(source.col_stride == 1 || source.row_stride == 1);
}

/// Groups of up to 16 of the vectors, each of one panel.
fn groups(vectors: Range<usize>, width: usize) -> impl Iterator<Item = Range<usize>> + Clone {
    let end = vectors.end;
    vectors.step_by(width).flat_map(move |panel| {
        let end = end.min(panel + width);
        (panel..end)
            .step_by(LANES)
            .map(move |first| first..end.min(first + LANES))
    })
}
