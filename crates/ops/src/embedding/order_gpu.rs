//! The positions of a batch in the order of their ids, sorted on the GPU: a radix sort, 8 bits a pass.

#![allow(unsafe_code)]

use crate::cuda::gpu::{BLOCK, Gpu};
use crate::cuda::launch;
use crate::cuda::pointer::In;
use crate::cuda::values::Fresh;
use candle_core::Result;

/// Positions of a tile, threads of its block, and values of a digit.
const TILE: usize = 256;

/// Threads of the block that sums the counts of all tiles.
const SUM_BLOCK: u32 = 1024;

/// Rows in ascending order, and the positions they come from, of one row ascending.
pub(crate) struct Order {
    pub(crate) rows: Fresh<u32>,
    pub(crate) positions: Fresh<u32>,
}

impl Order {
    /// Of `num_ids` ids, at least one; those that are no row of the `num_rows` come last, as row `num_rows`.
    ///
    /// # Safety
    /// `ids` must hold as many.
    pub(crate) unsafe fn new(
        gpu: &Gpu,
        ids: In<u32>,
        num_ids: usize,
        num_rows: u32,
    ) -> Result<Self> {
        let num_tiles = num_ids.div_ceil(TILE);
        let counts = gpu.alloc::<u32>(TILE * num_tiles)?;
        let mut order = Self::unsorted(gpu, num_ids)?;
        let mut next = Self::unsorted(gpu, num_ids)?;
        let (count, num_counts) = (gpu.u32(num_ids)?, gpu.u32(TILE * num_tiles)?);
        let tiles = gpu.blocks(num_tiles, BLOCK, 4 * TILE)?;
        let sum = gpu.blocks(1, SUM_BLOCK, 4 * SUM_BLOCK as usize)?;
        let (rows, positions) = (order.rows.out(), order.positions.out());
        let start = gpu.elements(num_ids)?;
        // SAFETY: ids, rows and positions have num_ids values.
        unsafe { launch::order_start(&start, rows, positions, ids, count, 0, num_rows) }?;
        for shift in (0..u32::BITS - num_rows.leading_zeros()).step_by(8) {
            let (rows, positions) = (order.rows.out().read(), order.positions.out().read());
            let (rows_to, positions_to) = (next.rows.out(), next.positions.out());
            let places = counts.out();
            // SAFETY: rows and positions have num_ids values, counts one for each digit of each tile; launches follow each
            // other.
            unsafe {
                launch::order_count(&tiles, places, rows, count, shift)?;
                launch::order_sum(&sum, places, num_counts)?;
                let starts = places.read();
                launch::order_move(
                    &tiles,
                    rows_to,
                    positions_to,
                    rows,
                    positions,
                    starts,
                    count,
                    shift,
                )?;
            }
            std::mem::swap(&mut order, &mut next);
        }
        Ok(order)
    }

    fn unsorted(gpu: &Gpu, num_ids: usize) -> Result<Self> {
        Ok(Self {
            rows: gpu.alloc::<u32>(num_ids)?,
            positions: gpu.alloc::<u32>(num_ids)?,
        })
    }
}
