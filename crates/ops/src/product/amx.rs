//! Tiles of AMX: 32 rows by 32 columns in four tile registers, with two more for each of the matrices. Each step of 16 lanes of `k`, pairs of
//! bf16, loads these four and multiplies each of the left ones with each of the right ones.
//!
//! What `tdpbf16ps` computes (Intel, "Intel 64 and IA-32 Architectures Software Developer's Manual", volume 2): two sums of 16 products,
//! one of the first and one of the second numbers of the pairs, by multiply-adds from 0; the sum of the two is added to the
//! element. Numbers below 2^-126 count as 0.

use super::kernel::{COLS, Kernel, tile_lines};
use super::packing::{Pairs, Panel};
use crate::cpu::lines::{LANES, Line};
use std::arch::asm;

/// Rows of a tile of sums.
pub(super) const ROWS: usize = 32;
/// Values along `k` that are summed before the sums leave the registers: the panels for them stay in the first-level cache.
pub(super) const SUM_LEN: usize = 512;
/// Lines that a step reads of each matrix.
pub(super) const STEP_LINES: usize = 2 * LANES;

/// Products of sums of `PARTS` bf16: all pairs of parts but those that are smaller than the error, the smallest first.
pub(crate) struct Amx<const PARTS: usize>;

/// The parts of the left and the right matrix that are multiplied, in the order in which they are added.
pub(super) const fn products(parts: usize) -> &'static [(usize, usize)] {
    match parts {
        1 => &[(0, 0)],
        2 => &[(0, 1), (1, 0), (0, 0)],
        _ => &[(1, 1), (0, 2), (2, 0), (0, 1), (1, 0), (0, 0)],
    }
}

/// Eight tiles of 16 rows of 64 bytes.
#[repr(C, align(64))]
struct TileConfig {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

static CONFIG: TileConfig = TileConfig {
    palette: 1,
    start_row: 0,
    reserved: [0; 14],
    row_bytes: [64, 64, 64, 64, 64, 64, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0],
    rows: [16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0],
};

/// A step: `$left` and `$right` load tiles of either side, `tileloaddt1` what is not read again soon and is not to drive the other side's panel out of the
/// first-level cache.
macro_rules! step {
    ($left:literal, $right:literal, $lhs:expr, $rhs:expr, $lhs_row:expr) => {
        asm!(
            concat!($right, " tmm6, [{rhs} + 2 * {line}]"),
            concat!($left, " tmm4, [{lhs} + {lhs_row}]"),
            "tdpbf16ps tmm0, tmm4, tmm6",
            concat!($right, " tmm7, [{rhs} + 2 * {line} + 64]"),
            "tdpbf16ps tmm1, tmm4, tmm7",
            concat!($left, " tmm5, [{lower_lhs} + {lhs_row}]"),
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            lhs = in(reg) $lhs,
            lower_lhs = in(reg) $lhs.wrapping_add(LANES * $lhs_row),
            rhs = in(reg) $rhs,
            line = in(reg) size_of::<Line>(),
            lhs_row = in(reg) $lhs_row * size_of::<Line>(),
            options(nostack, readonly, preserves_flags)
        )
    };
}

impl<const PARTS: usize> Kernel for Amx<PARTS> {
    type Format = Pairs<PARTS>;

    const ROWS: usize = ROWS;
    const BY_ROWS: bool = true;
    const READS_ROWS: bool = PARTS == 1;
    const LANES_STEP: usize = LANES;
    const SUM_LEN: usize = SUM_LEN;

    unsafe fn begin() {
        // SAFETY: the processor can; no compiler uses tiles of its own.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const CONFIG, options(nostack, readonly)) }
    }

    unsafe fn end() {
        // SAFETY: as above.
        unsafe { asm!("tilerelease", options(nostack, nomem)) }
    }

    unsafe fn multiply<const STAYS_LEFT: bool>(
        sums: &mut [Line],
        row_lines: usize,
        _extent: (usize, usize),
        add: bool,
        lhs: Panel<'_>,
        rhs: Panel<'_>,
        mut aside: impl FnMut(usize, usize),
    ) {
        let len = rhs.part(0).len();
        assert!(len > 0 && len.is_multiple_of(STEP_LINES));
        let steps = len / STEP_LINES;
        let (lhs_row, lhs_step) = lhs.steps();
        let last_line = (ROWS - 1) * lhs_row + (steps - 1) * lhs_step;
        assert!(sums.len() >= tile_lines(ROWS, row_lines));
        let sums = sums.as_mut_ptr();
        let lower_sums = sums.wrapping_add(LANES * row_lines);
        let row = row_lines * size_of::<Line>();
        // SAFETY: the tiles are configured as promised by the caller, and read and written nowhere else. The sums have 32 rows, `row`
        // bytes apart.
        unsafe {
            match add {
                true => asm!(
                    "tileloadd tmm0, [{sums} + {row}]",
                    "tileloadd tmm1, [{sums} + {row} + 64]",
                    "tileloadd tmm2, [{lower} + {row}]",
                    "tileloadd tmm3, [{lower} + {row} + 64]",
                    sums = in(reg) sums,
                    lower = in(reg) lower_sums,
                    row = in(reg) row,
                    options(nostack, readonly, preserves_flags)
                ),
                false => asm!(
                    "tilezero tmm0",
                    "tilezero tmm1",
                    "tilezero tmm2",
                    "tilezero tmm3",
                    options(nostack, nomem, preserves_flags)
                ),
            }
        }
        let products = products(PARTS);
        let num_steps = steps * products.len();
        let mut done = 0;
        for (left, right) in products {
            let (lhs, rhs) = (lhs.part(*left), rhs.part(*right));
            assert!(rhs.len() == len && lhs.len() > last_line);
            for step in 0..steps {
                let lhs = lhs.as_ptr().wrapping_add(step * lhs_step);
                let rhs = rhs.as_ptr().wrapping_add(step * STEP_LINES);
                // SAFETY: as above; a step reads as many lines of the right part, and the last step the left part's last line.
                unsafe {
                    match STAYS_LEFT {
                        true => step!("tileloadd", "tileloaddt1", lhs, rhs, lhs_row),
                        false => step!("tileloaddt1", "tileloadd", lhs, rhs, lhs_row),
                    }
                }
                done += 1;
                aside(done, num_steps);
            }
        }
        // SAFETY: as above.
        unsafe {
            asm!(
                "tilestored [{sums} + {row}], tmm0",
                "tilestored [{sums} + {row} + 64], tmm1",
                "tilestored [{lower} + {row}], tmm2",
                "tilestored [{lower} + {row} + 64], tmm3",
                sums = in(reg) sums,
                lower = in(reg) lower_sums,
                row = in(reg) row,
                options(nostack, preserves_flags)
            );
        }
    }
}

const _: () = assert!(ROWS == 2 * LANES && COLS == 2 * LANES && size_of::<TileConfig>() == 64);
