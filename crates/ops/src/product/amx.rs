//! Tiles of AMX: 32 rows by 32 columns in four tile registers, with two more for each of the matrices. Each step of 16 lanes of `k`, pairs of
//! bf16, loads these four and multiplies each of the left ones with each of the right ones.
//!
//! What `tdpbf16ps` computes (Intel, "Intel 64 and IA-32 Architectures Software Developer's Manual", volume 2): two sums of 16 products,
//! one of the first and one of the second numbers of the pairs, by multiply-adds from 0; the sum of the two is added to the
//! element. Numbers below 2^-126 count as 0.

use super::emulated::{self, TilePairs};
use super::kernel::{COLS, Kernel, tile_lines};
use super::packing::Panel;
use crate::lines::{LANES, Line};
use crate::processor::has_amx;
use std::arch::asm;

/// Rows of a tile of sums.
pub(super) const ROWS: usize = 32;
/// Values along `k` that are summed before the sums leave the registers: the panels for them stay in the first-level cache.
pub(super) const SUM_LEN: usize = 512;
/// Lines that a step reads of each matrix.
pub(super) const STEP_LINES: usize = 2 * LANES;

/// Products of sums of `PARTS` bf16: all pairs of parts but those that are smaller than the error, the smallest first. Where there is no AMX it is
/// emulated.
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

/// Where a product of two parts begins, and how it goes on.
#[repr(C)]
struct Start {
    lhs: *const Line,
    /// The lower 16 rows of the left panel.
    lower_lhs: *const Line,
    rhs: *const Line,
    steps: usize,
    /// Bytes from one step of the left panel to the next.
    lhs_step: usize,
}

impl<const PARTS: usize> Kernel for Amx<PARTS> {
    type Format = TilePairs<PARTS>;

    const ROWS: usize = ROWS;
    const BY_ROWS: bool = true;
    const READS_ROWS: bool = PARTS == 1;
    const LANES_STEP: usize = LANES;
    const SUM_LEN: usize = SUM_LEN;

    unsafe fn begin() {
        if has_amx() {
            // SAFETY: the processor can; no compiler uses tiles of its own.
            unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const CONFIG, options(nostack, readonly)) }
        }
    }

    unsafe fn end() {
        if has_amx() {
            // SAFETY: as above.
            unsafe { asm!("tilerelease", options(nostack, nomem)) }
        }
    }

    unsafe fn multiply(
        sums: &mut [Line],
        row_lines: usize,
        (num_rows, _): (usize, usize),
        add: bool,
        lhs: Panel<'_>,
        rhs: Panel<'_>,
    ) {
        if !has_amx() {
            return emulated::multiply::<PARTS>(sums, row_lines, num_rows, add, lhs, rhs);
        }
        let len = rhs.part(0).len();
        assert!(len > 0 && len.is_multiple_of(STEP_LINES));
        let steps = len / STEP_LINES;
        let (lhs_row, lhs_step) = lhs.steps();
        let last_line = (ROWS - 1) * lhs_row + (steps - 1) * lhs_step;
        assert!(sums.len() >= tile_lines(ROWS, row_lines));
        let mut starts = [const {
            Start {
                lhs: std::ptr::null(),
                lower_lhs: std::ptr::null(),
                rhs: std::ptr::null(),
                steps: 0,
                lhs_step: 0,
            }
        }; 6];
        let products = products(PARTS);
        for (start, (left, right)) in starts.iter_mut().zip(products) {
            let (lhs, rhs) = (lhs.part(*left), rhs.part(*right));
            assert!(rhs.len() == len && lhs.len() > last_line);
            *start = Start {
                lhs: lhs.as_ptr(),
                lower_lhs: &raw const lhs[LANES * lhs_row],
                rhs: rhs.as_ptr(),
                steps,
                lhs_step: lhs_step * size_of::<Line>(),
            };
        }
        let sums = sums.as_mut_ptr();
        // SAFETY: the tiles are configured as promised by the caller, and read and written nowhere else. The sums have 32 rows, `row`
        // bytes apart; each product reads as many steps as the right part has, the left one's last line among them. What is read of the left matrix
        // is not read soon again: it is not to drive the right panel out of the first-level cache.
        unsafe {
            asm!(
                "test {add:e}, {add:e}",
                "jz 2f",
                "tileloadd tmm0, [{sums} + {row}]",
                "tileloadd tmm1, [{sums} + {row} + 64]",
                "tileloadd tmm2, [{lower} + {row}]",
                "tileloadd tmm3, [{lower} + {row} + 64]",
                "jmp 3f",
                "2:",
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                "3:",
                "mov {lhs}, [{starts}]",
                "mov {lower_lhs}, [{starts} + 8]",
                "mov {rhs}, [{starts} + 16]",
                "mov {left}, [{starts} + 24]",
                "4:",
                "tileloadd tmm6, [{rhs} + 2 * {line}]",
                "tileloaddt1 tmm4, [{lhs} + {lhs_row}]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm7, [{rhs} + 2 * {line} + 64]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tileloaddt1 tmm5, [{lower_lhs} + {lhs_row}]",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "add {lhs}, [{starts} + 32]",
                "add {lower_lhs}, [{starts} + 32]",
                "add {rhs}, 2048",
                "dec {left}",
                "jnz 4b",
                "add {starts}, 40",
                "dec {products}",
                "jnz 3b",
                "tilestored [{sums} + {row}], tmm0",
                "tilestored [{sums} + {row} + 64], tmm1",
                "tilestored [{lower} + {row}], tmm2",
                "tilestored [{lower} + {row} + 64], tmm3",
                add = in(reg) u32::from(add),
                sums = in(reg) sums,
                starts = inout(reg) starts.as_ptr() => _,
                products = inout(reg) products.len() => _,
                left = out(reg) _,
                lhs = out(reg) _,
                lower_lhs = out(reg) _,
                rhs = out(reg) _,
                lower = in(reg) sums.wrapping_add(LANES * row_lines),
                row = in(reg) row_lines * size_of::<Line>(),
                line = in(reg) 64usize,
                lhs_row = in(reg) lhs_row * size_of::<Line>(),
                options(nostack)
            );
        }
    }
}

const _: () = assert!(ROWS == 2 * LANES && COLS == 2 * LANES && size_of::<TileConfig>() == 64);
const _: () = assert!(STEP_LINES * size_of::<Line>() == 2048 && size_of::<Start>() == 40);
