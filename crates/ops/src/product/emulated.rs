//! Tiles without AMX, for tests: on every processor with AVX-512 they show that the packing is right, on one with AMX that its tiles
//! compute what they are said to.

use super::amx::{ROWS, STEP_LINES, SUM_LEN, products};
use super::kernel::{COLS, Kernel, ROW_LINES};
use super::lanes::Pairs;
use super::packing::Panel;
use crate::lines::{LANES, Line};

/// [`Amx`] by instructions that every processor has.
pub(super) struct Emulated<const PARTS: usize>;

impl<const PARTS: usize> Kernel for Emulated<PARTS> {
    type Format = Pairs<PARTS>;

    const ROWS: usize = ROWS;
    const BY_ROWS: bool = true;
    const LANES_STEP: usize = LANES;
    const SUM_LEN: usize = SUM_LEN;

    unsafe fn multiply(
        sums: &mut [Line],
        row_lines: usize,
        _extent: (usize, usize),
        add: bool,
        lhs: Panel<'_>,
        rhs: Panel<'_>,
    ) {
        let normal = |x: f32| if x.abs() < f32::MIN_POSITIVE { 0.0 } else { x };
        let number = |lane: u32, second: bool| {
            normal(f32::from_bits(if second {
                lane & 0xffff_0000
            } else {
                lane << 16
            }))
        };
        if !add {
            for row in sums.chunks_mut(row_lines).take(ROWS) {
                row[..ROW_LINES].fill(Line::ZERO);
            }
        }
        for (left, right) in products(PARTS) {
            let lhs = lhs.part(*left).chunks_exact(STEP_LINES);
            let rhs = rhs.part(*right).chunks_exact(STEP_LINES);
            for (lhs, rhs) in lhs.zip(rhs) {
                for row in 0..ROWS {
                    for col in 0..COLS {
                        let mut dots = [0f32; 2];
                        for lane in 0..LANES {
                            let a = lhs[row].0[lane];
                            let b = rhs[lane * ROW_LINES + col / LANES].0[col % LANES];
                            for (second, dot) in [false, true].into_iter().zip(&mut dots) {
                                let (a, b) = (number(a, second), number(b, second));
                                // The product has at most 16 bits: it is not rounded.
                                *dot = normal(a * b + *dot);
                            }
                        }
                        let sum = &mut sums[row * row_lines + col / LANES].0[col % LANES];
                        let before = normal(f32::from_bits(*sum));
                        *sum = normal(before + normal(dots[0] + dots[1])).to_bits();
                    }
                }
            }
        }
    }
}
