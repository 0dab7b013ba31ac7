//! The rows of a weight that is in the order of products of many rows only: as values, and in products of few rows, whose bits are those of
//! [`few_rows`](crate::few_rows::few_rows).

#![allow(unsafe_code)]

use crate::chunks::for_each_chunk;
use crate::element::Element;
use crate::few_rows::{RowsOfF32, SEGMENT, TASK_BYTES};
use crate::filled::{filled, zeros};
use crate::lines::LANES;
use crate::matrix::Matrix;
use crate::packed_weight::Panels;
use crate::vector::{Kernel, Vector, run_widest};
use std::ops::Range;
use std::sync::Arc;

/// A weight (out, in), whose rows are columns of panels.
pub(crate) struct PanelRows {
    panels: Arc<Panels>,
    num_out: usize,
    num_in: usize,
}

/// A right matrix (k, cols) to put in order.
pub(crate) enum PanelSource<'a, T> {
    Matrix(Matrix<'a, T>),
    /// Each row of the weight is one along `k`.
    Rows(&'a PanelRows),
}

impl<T> PanelSource<'_, T> {
    /// (k, cols)
    pub(crate) fn dims(&self) -> (usize, usize) {
        match self {
            Self::Matrix(matrix) => (matrix.rows, matrix.cols),
            Self::Rows(rows) => (rows.num_out, rows.num_in),
        }
    }
}

impl PanelRows {
    /// Of panels that hold each value as it is.
    pub(crate) fn new(panels: Arc<Panels>, (num_out, num_in): (usize, usize)) -> Self {
        Self {
            panels,
            num_out,
            num_in,
        }
    }

    /// The values of some rows, the first of which is a multiple of 16, row by row.
    pub(crate) fn values<T: Element>(&self, rows: Range<usize>) -> Vec<T> {
        assert!(rows.start.is_multiple_of(LANES) && rows.end <= self.num_out);
        let (len, num_in) = (rows.len() * self.num_in, self.num_in);
        filled(len, LANES * num_in, len, |group, values: &mut [T]| {
            for start in (0..num_in).step_by(LANES) {
                let block = block(&self.panels, rows.start + group * LANES, start..num_in);
                for (i, row) in values.chunks_exact_mut(num_in).enumerate() {
                    for (value, values) in row[start..].iter_mut().zip(&block) {
                        *value = T::nearest(values[i]);
                    }
                }
            }
        })
    }

    /// The products of the first rows of `xs` with each of the weight: (rows, out).
    pub(crate) fn products(&self, rows: usize, xs: &RowsOfF32) -> Vec<f32> {
        let (num_out, num_in) = (self.num_out, self.num_in);
        // Of each group of columns the sums of all rows.
        let sums_len = GROUPS * rows * LANES;
        let mut by_group = zeros(num_out.div_ceil(GROUPS * LANES) * sums_len);
        let panel_bytes = (num_in * GROUPS * LANES * size_of::<f32>()).max(1);
        let panels_of_task = (TASK_BYTES / panel_bytes).max(1);
        let (task_len, work) = (panels_of_task * sums_len, num_out * num_in * rows);
        for_each_chunk(&mut by_group, task_len, work, |task, sums| {
            for (i, sums) in sums.chunks_mut(sums_len).enumerate() {
                let first = Group {
                    panels: &self.panels,
                    col: (task * panels_of_task + i) * GROUPS * LANES,
                    num_k: num_in,
                };
                run_widest(PanelProducts { first, xs, sums });
            }
        });
        let mut products = zeros(rows * num_out);
        for (row, products) in products.chunks_mut(num_out.max(1)).enumerate() {
            let groups = by_group.chunks(rows * LANES);
            for (products, sums) in products.chunks_mut(LANES).zip(groups) {
                products.copy_from_slice(&sums[row * LANES..][..products.len()]);
            }
        }
        products
    }
}

/// Groups of 16 columns that lie beside each other in memory.
const GROUPS: usize = 2;

/// Adds the products of rows with the columns of a panel to the sums of each group and row.
struct PanelProducts<'a> {
    first: Group<'a>,
    xs: &'a RowsOfF32,
    /// 16 for each row, group after group.
    sums: &'a mut [f32],
}

/// 16 columns of panels.
#[derive(Clone, Copy)]
struct Group<'a> {
    panels: &'a Panels,
    /// The first one, a multiple of 16.
    col: usize,
    /// Values of each.
    num_k: usize,
}

impl Kernel for PanelProducts<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<V: Vector>(self) {
        let group_len = self.sums.len() / GROUPS;
        let num_k = self.first.num_k;
        for start in (0..num_k).step_by(SEGMENT) {
            let len = SEGMENT.min(num_k - start);
            for (i, sums) in self.sums.chunks_exact_mut(group_len).enumerate() {
                let group = Group {
                    col: self.first.col + i * LANES,
                    ..self.first
                };
                for (row, sums) in sums.chunks_exact_mut(LANES).enumerate() {
                    let padded = len.next_multiple_of(V::LANES);
                    let xs = self.xs.values(row, start..start + padded);
                    for (i, sums) in sums.chunks_exact_mut(V::LANES).enumerate() {
                        // SAFETY: as promised by the caller; there are as many sums as lanes.
                        unsafe {
                            let dots = group.dots::<V>(i * V::LANES, start, xs);
                            let before = V::load(sums.as_ptr());
                            dots.times_plus(V::splat(1.0), before)
                                .store(sums.as_mut_ptr());
                        }
                    }
                }
            }
        }
    }
}

impl Group<'_> {
    /// The products of the values from `start` on in as many columns as there are lanes, from number `first` on, with `xs`. Of each column there are as many
    /// sums as if a vector had values of this column alone, and these are added up as its lanes are.
    ///
    /// # Safety
    /// As for `V`.
    #[inline(always)]
    unsafe fn dots<V: Vector>(&self, first: usize, start: usize, xs: &[f32]) -> V {
        // SAFETY: as promised by the caller; lines and blocks have 16 lanes, and `first` and as many as `V` has are among them.
        unsafe {
            let mut sums = [V::splat(0.0); LANES];
            let mut done = 0;
            while done < xs.len() {
                let place = start + done;
                let in_sum = self.panels.values_left(place) / V::LANES * V::LANES;
                let len = in_sum.min(xs.len() - done);
                let xs = &xs[done..];
                if len == 0 {
                    let block = block(self.panels, self.col, place..self.num_k);
                    let mut k = 0;
                    while k < V::LANES {
                        let values = V::load(block[k].as_ptr().add(first));
                        sums[k] = values.times_plus(V::splat(xs[k]), sums[k]);
                        k += 1;
                    }
                    done += V::LANES;
                    continue;
                }
                let lanes = self.panels.lanes(self.col, place, len);
                if self.panels.has_pairs() {
                    let blocks = lanes.chunks(V::LANES).zip(xs.chunks_exact(V::LANES));
                    for (lanes, xs) in blocks {
                        let lanes = &lanes[..V::LANES - 1];
                        let mut k = 0;
                        while k < V::LANES {
                            let pairs = V::of_pairs(lanes[k].0.as_ptr().add(first));
                            sums[k] = pairs[0].times_plus(V::splat(xs[k]), sums[k]);
                            sums[k + 1] = pairs[1].times_plus(V::splat(xs[k + 1]), sums[k + 1]);
                            k += 2;
                        }
                    }
                } else {
                    let blocks = lanes.chunks(2 * V::LANES).zip(xs.chunks_exact(V::LANES));
                    for (lanes, xs) in blocks {
                        let lanes = &lanes[..2 * V::LANES - 1];
                        let mut k = 0;
                        while k < V::LANES {
                            let values = V::load(lanes[2 * k].0.as_ptr().cast::<f32>().add(first));
                            sums[k] = values.times_plus(V::splat(xs[k]), sums[k]);
                            k += 1;
                        }
                    }
                }
                done += len;
            }
            let mut half = V::LANES / 2;
            while half > 0 {
                let mut k = 0;
                while k < half {
                    sums[k] = sums[k].times_plus(V::splat(1.0), sums[k + half]);
                    k += 1;
                }
                half /= 2;
            }
            sums[0]
        }
    }
}

/// The values of 16 columns from `col` on at the first 16 of the places along `k`, then zeros.
fn block(panels: &Panels, col: usize, places: Range<usize>) -> [[f32; LANES]; LANES] {
    let mut block = [[0f32; LANES]; LANES];
    let terms = if panels.has_pairs() { 2 } else { 1 };
    for (values, start) in block.chunks_mut(terms).zip(places.clone().step_by(terms)) {
        let line = &panels.lanes(col, start, 1)[0];
        // The first bf16 of a pair is in the lower half.
        let of_pairs = [|lane: u32| lane << 16, |lane: u32| lane & 0xffff_0000];
        for (i, values) in values.iter_mut().enumerate().take(places.end - start) {
            for (value, &lane) in values.iter_mut().zip(&line.0) {
                *value = f32::from_bits(if terms == 1 { lane } else { of_pairs[i](lane) });
            }
        }
    }
    block
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::{GROUPS, Group, PanelProducts, PanelRows, PanelSource};
    use crate::element::Element;
    use crate::few_rows::{RowsOfF32, SEGMENT};
    use crate::lines::LANES;
    use crate::matrix::Matrix;
    use crate::product::{ANY_SIZE, fill_panels, panels_hold_values};
    use crate::vector::{Kernel, Vector, run_each};
    use half::{bf16, f16};

    /// The products of rows of `xs` with each column of panels, and what vectors of the values of one column give.
    struct Compare<'a, T> {
        panels: &'a PanelRows,
        xs: &'a RowsOfF32,
        rows: usize,
        /// (out, in)
        weight: &'a [T],
    }

    impl<T: Element> Kernel for Compare<'_, T> {
        type Output = [Vec<f32>; 2];

        #[inline(always)]
        unsafe fn run<V: Vector>(self) -> [Vec<f32>; 2] {
            let PanelRows {
                panels,
                num_out,
                num_in,
            } = self.panels;
            let mut results = [vec![0f32; num_out * self.rows], Vec::new()];
            for first in (0..*num_out).step_by(GROUPS * LANES) {
                let mut sums = vec![0f32; GROUPS * self.rows * LANES];
                let products = PanelProducts {
                    first: Group {
                        panels,
                        col: first,
                        num_k: *num_in,
                    },
                    xs: self.xs,
                    sums: &mut sums,
                };
                // SAFETY: as promised by the caller.
                unsafe { products.run::<V>() };
                for col in first..*num_out.min(&(first + GROUPS * LANES)) {
                    for row in 0..self.rows {
                        let in_group = (col - first) / LANES * self.rows * LANES + col % LANES;
                        results[0][col * self.rows + row] = sums[in_group + row * LANES];
                    }
                }
            }
            for weight in self.weight.chunks(*num_in) {
                for row in 0..self.rows {
                    let mut sum = 0f32;
                    for (i, weight) in weight.chunks(SEGMENT).enumerate() {
                        let xs = self.xs.values(row, i * SEGMENT..i * SEGMENT + weight.len());
                        let blocks = weight.chunks(V::LANES).zip(xs.chunks(V::LANES));
                        // SAFETY: as promised by the caller; there are as many values of both.
                        sum += unsafe {
                            blocks
                                .fold(V::splat(0.0), |sum, (weight, xs)| {
                                    let len = xs.len();
                                    let weight = match len == V::LANES {
                                        true => V::load(weight.as_ptr()),
                                        false => V::load_first(weight.as_ptr(), len),
                                    };
                                    let xs = match len == V::LANES {
                                        true => V::load(xs.as_ptr()),
                                        false => V::load_first(xs.as_ptr(), len),
                                    };
                                    weight.times_plus(xs, sum)
                                })
                                .sum()
                        };
                    }
                    results[1].push(sum);
                }
            }
            results
        }
    }

    fn check<T: Element>((num_out, num_in): (usize, usize), rows: usize) {
        let value = |i: usize| (i * 2_654_435_761 % 100_003) as f32 / 50_001.5 - 1.0;
        let weight: Vec<T> = (0..num_out * num_in)
            .map(|i| T::nearest(value(i)))
            .collect();
        let xs: Vec<f32> = (0..rows * num_in).map(|i| value(i + 7)).collect();
        let xs = RowsOfF32::new(xs.chunks(num_in), num_in);
        if !panels_hold_values::<T>() {
            return;
        }
        let matrix = Matrix::new(&weight, num_out, num_in, num_in).t();
        let panels = fill_panels(None, &PanelSource::Matrix(matrix), ANY_SIZE);
        let panels = PanelRows::new(panels, (num_out, num_in));
        let (what, values) = (
            format!("{num_out} x {num_in}"),
            panels.values::<T>(0..num_out),
        );
        assert!(values == weight, "{what}");
        let values = panels.values::<T>(16..num_out - 1);
        assert!(values == weight[16 * num_in..][..values.len()], "{what}");
        let compare = || Compare {
            panels: &panels,
            xs: &xs,
            rows,
            weight: &weight,
        };
        for [got, want] in run_each(compare) {
            assert_eq!(got, want, "{rows} x {num_in} x {num_out}, {:?}", T::DTYPE);
        }
    }

    /// Of sums that end within a vector, of columns that fill no panel, and of values that are no whole number of lanes.
    #[test]
    fn products_of_panels_have_the_bits_of_vectors_along_the_sums() {
        for (dims, rows) in [
            ((28, 1), 1),
            ((33, 17), 3),
            ((50, 515), 1),
            ((64, 1300), 2),
            ((97, 2100), 5),
        ] {
            check::<bf16>(dims, rows);
            check::<f16>(dims, rows);
            check::<f32>(dims, rows);
        }
    }
}
