//! What the kernels have in common.

use super::packing::{Format, Panel};
use crate::cpu::lines::{LANES, Line};

/// Columns of a tile.
pub(super) const COLS: usize = 2 * LANES;
/// Lines of a row of a tile, and of a panel of the right matrix for each lane of `k`.
pub(super) const ROW_LINES: usize = COLS / LANES;

/// Computes tiles of up to `ROWS` by [`COLS`] sums.
pub(super) trait Kernel: 'static {
    /// How values are packed.
    type Format: Format;

    /// Rows of a tile.
    const ROWS: usize;
    /// Whether panels of the left matrix are packed by rows.
    const BY_ROWS: bool;
    /// Whether panels of the left matrix may be rows of bf16 as they lie in the matrix.
    const READS_ROWS: bool = false;
    /// Panels have a multiple of so many lanes along `k`.
    const LANES_STEP: usize;
    /// Most values along `k` that are summed in registers.
    const SUM_LEN: usize;

    /// Prepares the thread for [`Self::multiply`].
    ///
    /// # Safety
    /// The processor has the instructions.
    unsafe fn begin() {}

    /// Ends what [`Self::begin`] began.
    ///
    /// # Safety
    /// The processor has the instructions.
    unsafe fn end() {}

    /// `sums = lhs * rhs`, or `sums += lhs * rhs` if `add`, of packed panels: [`ROW_LINES`] of every `row_lines` lines of f32, of which the
    /// first `rows` and `cols` count. There are lines for all rows of a tile. The left panel is read again soon if `STAYS_LEFT`, else the right one.
    ///
    /// Between its steps a kernel calls `aside`, with how many of how many are done, from 1 on: for work of instructions that it leaves idle, if it does.
    ///
    /// # Safety
    /// The processor has the instructions, and [`Self::begin`] was called on this thread. `aside` uses no kernel and waits for no other thread.
    unsafe fn multiply<const STAYS_LEFT: bool>(
        sums: &mut [Line],
        row_lines: usize,
        extent: (usize, usize),
        add: bool,
        lhs: Panel<'_>,
        rhs: Panel<'_>,
        aside: impl FnMut(usize, usize),
    );
}

/// Lines of a tile of `rows` rows in sums of `row_lines`.
pub(super) const fn tile_lines(rows: usize, row_lines: usize) -> usize {
    (rows - 1) * row_lines + ROW_LINES
}
