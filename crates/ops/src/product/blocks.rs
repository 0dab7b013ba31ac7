//! A product cut into blocks: of columns and of `k` whose part of the right matrix stays in the last-level cache, of rows whose
//! part of the left one stays in the second level, and of `k` that is summed in registers.

use super::caches::second_level;
use super::factors::Factors;
use super::kernel::{COLS, Kernel, ROW_LINES};
use super::matrix::{Addend, MatrixMut, PARALLEL_MULTIPLICATIONS};
use super::packing::{Format, Layout, Panel};
use super::store::{Pending, Target};
use super::sum::{Sum, sums};
use crate::cpu::element::Element;
use crate::cpu::lines::{LANES, Line, Lines};
use rayon::prelude::*;
use std::ops::Range;

/// Bytes of the right matrix that are packed at a time, of the last-level cache.
const RHS_BYTES: usize = 1 << 22;
/// Most lanes along `k`, of all parts, that are packed at a time: so that many rows of the left matrix fit the second-level cache, and a
/// panel of the right one is read from the last level only once for all of them. The order of sums depends on it, so it is the same on all
/// machines.
const MAX_LANES: usize = 1 << 10;
/// Panels of the right matrix that a task packs: their columns are read together.
const RHS_PANELS: usize = 8;

/// `out = addend + sum of lhs * rhs`.
///
/// # Safety
/// The processor has the kernel's instructions, the shapes fit, there is at least one value along `k`, and nobody else uses the elements
/// of `out` meanwhile.
pub(super) unsafe fn multiply<K: Kernel, T: Element, Out: Element>(
    out: &MatrixMut<'_, Out>,
    addend: Addend<'_, Out>,
    factors: &[Factors<'_, T>],
) {
    for Factors { rhs, panels, .. } in factors {
        assert!(panels.is_none_or(|panels| panels.fit::<K>(rhs.rows, rhs.cols)));
    }
    let lane_bytes = size_of::<u32>() * K::Format::PARTS;
    let num_k: Vec<usize> = factors.iter().map(|factors| factors.lhs.cols).collect();
    let sums = sums::<K>(&num_k, MAX_LANES / K::Format::PARTS);
    let passes: Vec<&[Sum]> = sums.chunk_by(|_, next| next.first_lane > 0).collect();
    let pass_lanes = |sums: &[Sum]| sums.iter().map(|sum| sum.lanes).sum::<usize>();
    let most_lanes = passes.iter().map(|sums| pass_lanes(sums)).max();
    let block_cols = RHS_BYTES / (most_lanes.unwrap_or_default().max(1) * lane_bytes);
    let block_cols = (block_cols / COLS * COLS).max(COLS);
    let multiplications = (out.rows * out.cols).saturating_mul(num_k.iter().sum());
    let is_parallel = multiplications > PARALLEL_MULTIPLICATIONS;
    for col in (0..out.cols).step_by(block_cols) {
        let cols = col..out.cols.min(col + block_cols);
        let target = Target::new(out, addend, cols.clone(), passes.len());
        for (i, sums) in passes.iter().enumerate() {
            let block = ColumnBlock {
                factors,
                target: &target,
                cols: cols.clone(),
                sums,
                lanes: pass_lanes(sums),
                is_first_and_last: (i == 0, i + 1 == passes.len()),
                is_parallel,
            };
            block.multiply::<K>();
        }
    }
}

/// On all threads. Not generic: what divides work among threads is long, and would be compiled for each kernel.
fn for_each_task(num_tasks: usize, work: &(dyn Fn(usize) + Sync)) {
    let tasks = (0..num_tasks).into_par_iter();
    tasks.with_max_len(1).for_each(work);
}

/// As [`for_each_task`], with some lines for each.
fn for_each_chunk(lines: &mut [Line], len: usize, f: &(dyn Fn(usize, &mut [Line]) + Sync)) {
    let tasks = lines.par_chunks_mut(len).enumerate();
    tasks.with_max_len(1).for_each(|(i, lines)| f(i, lines));
}

/// The part of a product that takes one packing of the right matrix.
struct ColumnBlock<'a, T, Out> {
    factors: &'a [Factors<'a, T>],
    target: &'a Target<'a, Out>,
    cols: Range<usize>,
    /// Those of this packing.
    sums: &'a [Sum],
    /// Lanes along `k` of all of them.
    lanes: usize,
    /// Whether these are the first sums of the columns, and the last.
    is_first_and_last: (bool, bool),
    is_parallel: bool,
}

impl<T: Element, Out: Element> ColumnBlock<'_, T, Out> {
    /// Lines of a panel, for each of the [`LANES`] vectors it has.
    fn panel_lines<K: Kernel>(&self, width: usize) -> usize {
        self.lanes * width.div_ceil(LANES) * K::Format::PARTS
    }

    /// Where the lanes of a sum begin in a panel.
    fn first_line<K: Kernel>(&self, sum: &Sum, width: usize) -> usize {
        sum.first_lane * width.div_ceil(LANES) * K::Format::PARTS
    }

    fn layout<K: Kernel>(&self, sum: &Sum, width: usize, by_vectors: bool) -> Layout {
        Layout {
            stride: self.panel_lines::<K>(width),
            ..Layout::new::<K::Format>(sum.lanes, width, by_vectors)
        }
    }

    fn multiply<K: Kernel>(&self) {
        let panel_lines = self.panel_lines::<K>(COLS);
        let num_panels = self.cols.len().div_ceil(COLS);
        let num_threads = rayon::current_num_threads();
        if self.is_parallel && num_panels >= 2 * num_threads && self.reads_rows::<K>() {
            return self.multiply_by_columns::<K>(num_panels, num_threads);
        }
        let mut rhs = Lines::new(self.num_to_pack(num_panels) * panel_lines);
        self.for_each_chunk(&mut rhs, RHS_PANELS * panel_lines, |group, lines| {
            let start = self.cols.start + group * RHS_PANELS * COLS;
            let cols = start..self.cols.end.min(start + RHS_PANELS * COLS);
            self.pack_rhs::<K>(cols, lines);
        });
        let rhs = &*rhs;
        let num_panels = self.target.out.rows.div_ceil(K::ROWS);
        let num_tasks = self.num_tasks::<K>(num_panels);
        self.for_each(num_tasks, |task| {
            let start = task * num_panels / num_tasks * K::ROWS;
            let end = (task + 1) * num_panels / num_tasks * K::ROWS;
            let rows = start..end.min(self.target.out.rows);
            self.multiply_rows::<K, false>(rows, self.cols.clone(), rhs);
        });
    }

    /// Each task packs columns of the right matrix, which then stay in the second-level cache of its core, and multiplies all rows with them: no thread
    /// waits for what another one packs. Of the left matrix only rows that fill no panel are packed, by each task.
    fn multiply_by_columns<K: Kernel>(&self, num_panels: usize, num_threads: usize) {
        let panel_lines = self.panel_lines::<K>(COLS);
        let panel_bytes = panel_lines * size_of::<Line>();
        let most_panels = (second_level() / 4 / panel_bytes).max(1);
        let num_tasks = num_panels.div_ceil(most_panels).max(num_threads);
        let num_tasks = num_tasks.next_multiple_of(num_threads).min(num_panels);
        self.for_each(num_tasks, |task| {
            let bound = |task: usize| task * num_panels / num_tasks;
            let panels = bound(task)..bound(task + 1);
            let column = |panel: usize| self.cols.end.min(self.cols.start + panel * COLS);
            let cols = column(panels.start)..column(panels.end);
            let mut rhs = Lines::new(self.num_to_pack(panels.len()) * panel_lines);
            self.pack_rhs::<K>(cols.clone(), &mut rhs);
            self.multiply_rows::<K, true>(0..self.target.out.rows, cols, &rhs);
        });
    }

    /// Panels of the right matrix to pack: these, or none if all sums have theirs already.
    fn num_to_pack(&self, num_panels: usize) -> usize {
        let has_panels = |sum: &Sum| self.factors[sum.factors].panels.is_some();
        match self.sums.iter().all(has_panels) {
            true => 0,
            false => num_panels,
        }
    }

    /// Packs columns of the right matrix, but for sums that have panels of their own.
    fn pack_rhs<K: Kernel>(&self, cols: Range<usize>, lines: &mut [Line]) {
        if lines.is_empty() {
            return;
        }
        for sum in self.sums {
            if self.factors[sum.factors].panels.is_some() {
                continue;
            }
            let source = self.factors[sum.factors].rhs.t();
            let layout = self.layout::<K>(sum, COLS, false);
            let lines = &mut lines[self.first_line::<K>(sum, COLS)..];
            // SAFETY: the processor has what the kernel needs.
            unsafe { K::Format::pack(source, cols.clone(), sum.k.clone(), layout, lines) };
        }
    }

    /// The rows of the left matrix from `row` on that make a panel for a sum, if they need not be packed.
    fn rows_in_place<K: Kernel>(&self, sum: &Sum, row: usize) -> Option<Panel<'_>> {
        let source = self.factors[sum.factors].lhs;
        let panel = || Panel::of_rows(source, row, K::ROWS, &sum.k);
        K::READS_ROWS.then(panel).flatten()
    }

    /// Whether whole panels of the left matrix need not be packed.
    fn reads_rows<K: Kernel>(&self) -> bool {
        let mut sums = self.sums.iter();
        sums.all(|sum| self.rows_in_place::<K>(sum, 0).is_some())
    }

    /// Tasks of rows whose part of the left matrix fits half of the second-level cache, equally many for each thread.
    fn num_tasks<K: Kernel>(&self, num_panels: usize) -> usize {
        let panel_bytes = self.panel_lines::<K>(K::ROWS) * size_of::<Line>();
        let max_panels = (second_level() / 2 / panel_bytes).max(1);
        let num_threads = match self.is_parallel {
            true => rayon::current_num_threads(),
            false => 1,
        };
        let num_tasks = num_panels.div_ceil(max_panels);
        let num_tasks = match num_threads {
            1 => num_tasks,
            _ => num_tasks.max(2 * num_threads).next_multiple_of(num_threads),
        };
        num_tasks.min(num_panels)
    }

    fn for_each(&self, num_tasks: usize, work: impl Fn(usize) + Sync) {
        match self.is_parallel {
            true => for_each_task(num_tasks, &work),
            false => (0..num_tasks).for_each(work),
        }
    }

    fn for_each_chunk(
        &self,
        lines: &mut [Line],
        len: usize,
        f: impl Fn(usize, &mut [Line]) + Sync,
    ) {
        match self.is_parallel {
            true => for_each_chunk(lines, len, &f),
            false => lines
                .chunks_mut(len)
                .enumerate()
                .for_each(|(i, lines)| f(i, lines)),
        }
    }

    /// Of these rows the columns whose panels of the right matrix are given. A panel of the left matrix stays in the first-level cache if `STAYS_LEFT`, while
    /// those of the right one come from the second level, or the other way round; what stays after it is asked for meanwhile.
    fn multiply_rows<K: Kernel, const STAYS_LEFT: bool>(
        &self,
        rows: Range<usize>,
        cols: Range<usize>,
        rhs: &[Line],
    ) {
        let panel_lines = self.panel_lines::<K>(K::ROWS);
        let starts = || rows.clone().step_by(K::ROWS);
        let sums = self.sums;
        let is_in_place = |row: &usize| {
            let mut sums = sums.iter();
            sums.all(|sum| self.rows_in_place::<K>(sum, *row).is_some())
        };
        let num_in_place = starts().take_while(is_in_place).count();
        let num_panels = rows.len().div_ceil(K::ROWS);
        let mut lhs = Lines::new((num_panels - num_in_place) * panel_lines);
        let to_pack = rows.end.min(rows.start + num_in_place * K::ROWS)..rows.end;
        for sum in sums.iter().filter(|_| !to_pack.is_empty()) {
            let source = self.factors[sum.factors].lhs;
            let layout = self.layout::<K>(sum, K::ROWS, K::BY_ROWS);
            let lines = &mut lhs[self.first_line::<K>(sum, K::ROWS)..];
            // SAFETY: the processor has what the kernel needs.
            unsafe { K::Format::pack(source, to_pack.clone(), sum.k.clone(), layout, lines) };
        }
        let packed = |sum: &Sum, index: usize| {
            let layout = self.layout::<K>(sum, K::ROWS, K::BY_ROWS);
            let panel = &lhs[index * panel_lines + self.first_line::<K>(sum, K::ROWS)..];
            layout.lanes_of(panel, 0, sum.lanes)
        };
        let panel = |sum, (index, row): (usize, usize)| match index.checked_sub(num_in_place) {
            None => self.rows_in_place::<K>(sum, row),
            Some(index) => Some(packed(sum, index)),
        };
        let panels = |sum| starts().enumerate().filter_map(move |at| panel(sum, at));
        let panels: Vec<Vec<Panel<'_>>> = sums.iter().map(|sum| panels(sum).collect()).collect();
        assert!(panels.iter().all(|panels| panels.len() == num_panels));
        let rhs = |sum: &Sum, col: usize| {
            if let Some(panels) = self.factors[sum.factors].panels {
                return panels.panel::<K>(sum, cols.start + col);
            }
            let panel = &rhs[col / COLS * self.panel_lines::<K>(COLS)..];
            let layout = self.layout::<K>(sum, COLS, false);
            layout.lanes_of(&panel[self.first_line::<K>(sum, COLS)..], 0, sum.lanes)
        };
        let lhs_starts: Vec<usize> = starts().collect();
        let rhs_starts: Vec<usize> = (0..cols.len()).step_by(COLS).collect();
        let (num_outer, num_inner) = match STAYS_LEFT {
            true => (lhs_starts.len(), rhs_starts.len()),
            false => (rhs_starts.len(), lhs_starts.len()),
        };
        // One sum is stored at once: while the next tile is computed.
        let num_tiles = match sums.len() {
            1 => 2,
            _ => num_inner.max(2),
        };
        let tile_lines = K::ROWS * ROW_LINES;
        let mut tiles = Lines::new(num_tiles * tile_lines);
        let place_of =
            |tile: usize| tile % num_tiles * tile_lines..(tile % num_tiles + 1) * tile_lines;
        let store = (self.target).storing(self.is_first_and_last);
        let mut pending: Option<Pending<'_, Out>> = None;
        // SAFETY: the processor has what the kernel needs; nothing between here and the end leaves this thread.
        unsafe { K::begin() };
        for outer in 0..num_outer {
            for (i, (sum, panels)) in sums.iter().zip(&panels).enumerate() {
                let is_last = i + 1 == sums.len();
                // What stays after this one; it comes to the second level.
                let ahead = match STAYS_LEFT {
                    true => panels.get(outer + 1).copied(),
                    false => rhs_starts.get(outer + 1).map(|col| rhs(sum, *col)),
                };
                for inner in 0..num_inner {
                    let (row, col) = match STAYS_LEFT {
                        true => (outer, inner),
                        false => (inner, outer),
                    };
                    let (lhs, rhs) = (panels[row], rhs(sum, rhs_starts[col]));
                    let (row, col) = (lhs_starts[row], cols.start + rhs_starts[col]);
                    let rows = row..rows.end.min(row + K::ROWS);
                    let cols = col..cols.end.min(col + COLS);
                    let extent = (rows.len(), cols.len());
                    let number = outer * num_inner + inner;
                    let places = [place_of(number), place_of(number + num_tiles - 1)];
                    let Ok([tile, before]) = tiles.get_disjoint_mut(places) else {
                        unreachable!("there are two tiles at least")
                    };
                    // SAFETY: the processor has what the kernel needs, and the thread is prepared; nobody else uses the rows of the columns that are
                    // stored, and passes follow each other.
                    unsafe {
                        let aside = |done, of| {
                            if let Some(pending) = &mut pending {
                                pending.store(before, done, of);
                            }
                            if let Some(panel) = &ahead {
                                let share = inner * of + done - 1..inner * of + done;
                                panel.prefetch(share, num_inner * of);
                            }
                        };
                        K::multiply::<STAYS_LEFT>(tile, ROW_LINES, extent, i > 0, lhs, rhs, aside);
                        if let Some(pending) = &mut pending {
                            pending.store(before, 1, 1);
                        }
                    }
                    pending = is_last.then(|| Pending::new(self.target, store, rows, cols));
                }
            }
        }
        if let Some(pending) = &mut pending {
            // SAFETY: as above.
            unsafe { pending.store(&tiles[place_of(num_outer * num_inner - 1)], 1, 1) };
        }
        // SAFETY: as above.
        unsafe { K::end() };
    }
}
