//! Small products by the kernels.

use super::kernel::{COLS, Kernel};
use super::matrix::Matrix;
use super::packing::{Format, Layout};
use super::small::{Rows, STEP, SmallProducts};
use crate::cpu::element::Element;
use crate::cpu::lines::{LANES, Line, Lines};
use std::marker::PhantomData;
use std::ops::Range;

/// By a kernel that the processor has the instructions of.
pub(crate) struct Small<K>(PhantomData<K>);

/// Panels of a right matrix.
pub(crate) struct Rhs {
    lines: Vec<Line>,
    layout: Layout,
}

/// Lanes that `num_k` values take.
fn num_lanes<K: Kernel>(num_k: usize) -> usize {
    let lanes = num_k.div_ceil(K::Format::TERMS);
    lanes.next_multiple_of(K::LANES_STEP)
}

fn layout<K: Kernel>(num_k: usize, width: usize, by_vectors: bool) -> Layout {
    Layout::new::<K::Format>(num_lanes::<K>(num_k), width, by_vectors)
}

impl<K: Kernel> SmallProducts for Small<K> {
    type Rhs = Rhs;

    const BLOCK_ROWS: usize = STEP / K::ROWS * K::ROWS;

    fn pack<T: Element>(rhs: Matrix<'_, T>) -> Rhs {
        let layout = layout::<K>(rhs.rows, COLS, false);
        let mut lines = vec![Line::ZERO; rhs.cols.div_ceil(COLS) * layout.stride];
        // SAFETY: whoever chose the kernel has seen to it that the processor has what it needs.
        unsafe { K::Format::pack(rhs.t(), 0..rhs.cols, 0..rhs.rows, layout, &mut lines) };
        Rhs { lines, layout }
    }

    fn multiply<T: Element>(
        sums: Rows<'_>,
        add: bool,
        lhs: Matrix<'_, T>,
        rhs: &Rhs,
        k: Range<usize>,
        cols: Range<usize>,
    ) {
        assert!(k.start.is_multiple_of(STEP) && cols.start.is_multiple_of(STEP));
        assert_eq!(lhs.cols, k.len());
        let left = layout::<K>(k.len(), K::ROWS, K::BY_ROWS);
        let mut lines = Lines::new(lhs.rows.div_ceil(K::ROWS) * left.stride);
        // SAFETY: whoever chose the kernel has seen to it that the processor has what it needs; between the two ends nothing leaves
        // this thread.
        unsafe {
            K::Format::pack(lhs, 0..lhs.rows, 0..k.len(), left, &mut lines);
            K::begin();
        }
        let row_lines = sums.row_lines;
        if left.lanes == 0 && !add {
            let rows = sums.lines.chunks_mut(row_lines).take(lhs.rows);
            rows.for_each(|row| row.fill(Line::ZERO));
        }
        let step = num_lanes::<K>(K::SUM_LEN / STEP * STEP);
        for lane in (0..left.lanes).step_by(step) {
            let num_lanes = step.min(left.lanes - lane);
            for col in (0..cols.len()).step_by(COLS) {
                let panel = &rhs.lines[(cols.start + col) / COLS * rhs.layout.stride..];
                let first_lane = k.start / K::Format::TERMS + lane;
                let rhs = rhs.layout.lanes_of(panel, first_lane, num_lanes);
                for (row, panel) in (0..lhs.rows)
                    .step_by(K::ROWS)
                    .zip(lines.chunks_exact(left.stride))
                {
                    let tile = row * row_lines + col / LANES;
                    let tile = &mut sums.lines[tile..];
                    let lhs_panel = left.lanes_of(panel, lane, num_lanes);
                    let extent = ((lhs.rows - row).min(K::ROWS), (cols.len() - col).min(COLS));
                    let add = add || lane > 0;
                    // SAFETY: as above.
                    unsafe {
                        K::multiply::<false>(
                            tile,
                            row_lines,
                            extent,
                            add,
                            lhs_panel,
                            rhs,
                            |_, _| {},
                        )
                    };
                }
            }
        }
        // SAFETY: as above.
        unsafe { K::end() };
        if cfg!(debug_assertions) {
            // Tiles of AMX write all of their rows, other kernels fewer: who reads more finds it out with each of them.
            let written = lhs.rows * row_lines..lhs.rows.next_multiple_of(STEP) * row_lines;
            let end = written.end.min(sums.lines.len());
            let lost = sums.lines[..end].iter_mut().skip(written.start);
            lost.for_each(|line| *line = Line([f32::NAN.to_bits(); LANES]));
        }
    }
}
