//! What tiles of AMX compute, by instructions that every processor has: the definition that tests compare with, bit by bit.

use crate::cpu::element::Element;
use crate::cpu::lines::{LANES, Line};
use crate::cpu::processor::has_avx512_bf16;
use crate::cpu::vectorised::vectorised;
use crate::product::amx::{STEP_LINES, products};
use crate::product::kernel::{COLS, ROW_LINES};
use crate::product::matrix::Matrix;
use crate::product::packing::{Format, Layout, Pairs, Panel};
use half::bf16;
use std::ops::Range;

/// [`Pairs`], which AVX512-BF16 packs where the processor has it.
pub(super) struct TilePairs<const PARTS: usize>;

impl<const PARTS: usize> Format for TilePairs<PARTS> {
    const TERMS: usize = Pairs::<PARTS>::TERMS;
    const PARTS: usize = PARTS;

    unsafe fn pack<T: Element>(
        source: Matrix<'_, T>,
        vectors: Range<usize>,
        k: Range<usize>,
        layout: Layout,
        lines: &mut [Line],
    ) {
        if has_avx512_bf16() {
            // SAFETY: the processor can.
            return unsafe { Pairs::<PARTS>::pack(source, vectors, k, layout, lines) };
        }
        let value = |vector: usize, k: usize| {
            source.data[vector * source.row_stride + k * source.col_stride].widen()
        };
        for vector in vectors.clone() {
            for lane in 0..layout.lanes {
                let (line, place) = place_of(layout, vector - vectors.start, lane);
                let k = [0, 1]
                    .map(|term| k.start + lane * Self::TERMS + term)
                    .map(|at| k.contains(&at).then_some(at));
                for part in 0..PARTS {
                    let [first, second] = k.map(|k| {
                        let part = k.map_or(bf16::ZERO, |k| part_of(value(vector, k), part));
                        u32::from(part.to_bits())
                    });
                    lines[part * layout.part_lines() + line].0[place] = second << 16 | first;
                }
            }
        }
    }
}

/// The line of a lane of one vector, and its place there.
fn place_of(layout: Layout, vector: usize, lane: usize) -> (usize, usize) {
    let in_group = vector % layout.width % LANES;
    let (first, step) = layout.place(vector - in_group, lane / LANES * LANES);
    match layout.by_vectors {
        true => (first + in_group * step, lane % LANES),
        false => (first + lane % LANES * step, in_group),
    }
}

/// Number `part` of the bf16 that add up to a value.
fn part_of(value: f32, part: usize) -> bf16 {
    let nearest = |x: f32| bf16::from_f32(normal(x));
    let rest = (0..part).fold(value, |rest, _| rest - nearest(rest).to_f32());
    nearest(rest)
}

/// Numbers below 2^-126 count as 0.
#[inline(always)]
fn normal(x: f32) -> f32 {
    if x.abs() < f32::MIN_POSITIVE { 0.0 } else { x }
}

/// The two numbers of a lane.
#[inline(always)]
fn numbers(lane: u32) -> [f32; 2] {
    [lane << 16, lane & 0xffff_0000].map(|bits| normal(f32::from_bits(bits)))
}

/// What [`Amx`](crate::product::amx::Amx) computes, of as many rows as count.
pub(super) fn multiply<const PARTS: usize>(
    sums: &mut [Line],
    row_lines: usize,
    num_rows: usize,
    add: bool,
    lhs: Panel<'_>,
    rhs: Panel<'_>,
) {
    let mut rows: Vec<_> = sums.chunks_mut(row_lines).take(num_rows).collect();
    if !add {
        rows.iter_mut()
            .for_each(|row| row[..ROW_LINES].fill(Line::ZERO));
    }
    vectorised(
        #[inline(always)]
        || {
            for (left, right) in products(PARTS) {
                let left = lhs.part(*left);
                let (row_step, lane_step) = lhs.steps();
                for (step, rhs) in rhs.part(*right).chunks_exact(STEP_LINES).enumerate() {
                    let mut columns = [[[0f32; COLS]; 2]; LANES];
                    for (columns, lane) in columns.iter_mut().zip(rhs.as_chunks::<ROW_LINES>().0) {
                        for col in 0..COLS {
                            let [first, second] = numbers(lane[col / LANES].0[col % LANES]);
                            columns[0][col] = first;
                            columns[1][col] = second;
                        }
                    }
                    for (row, sums) in rows.iter_mut().enumerate() {
                        let line = row * row_step + step * lane_step;
                        add_dots(sums, &left[line], &columns);
                    }
                }
            }
        },
    );
}

/// Adds the products of a row of the left matrix with all columns, of one step.
#[inline(always)]
fn add_dots(sums: &mut [Line], lhs: &Line, columns: &[[[f32; COLS]; 2]; LANES]) {
    let mut dots = [[0f32; COLS]; 2];
    for (lane, columns) in lhs.0.iter().zip(columns) {
        for ((dots, a), columns) in dots.iter_mut().zip(numbers(*lane)).zip(columns) {
            for (dot, b) in dots.iter_mut().zip(columns) {
                // The product has at most 16 bits: it is not rounded.
                *dot = normal(a * b + *dot);
            }
        }
    }
    for col in 0..COLS {
        let sum = &mut sums[col / LANES].0[col % LANES];
        let dot = normal(dots[0][col] + dots[1][col]);
        *sum = normal(normal(f32::from_bits(*sum)) + dot).to_bits();
    }
}
