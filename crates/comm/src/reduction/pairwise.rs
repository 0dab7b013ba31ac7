//! Reductions, in an order that is the same everywhere: pairwise by rank number.
//!
//! The ranks `0..N` are the leaves of a binary tree over aligned blocks of 2, 4, 8, .. ranks, of which the last may be shorter:
//! `(0+1)`, `(2+3)`, `((0+1)+(2+3))`, and five ranks give `((0+1)+(2+3))+4`. So an aligned block can be combined by itself, on another
//! host for instance, and the result has the same bits. It takes one accumulator for each level of the tree.

use std::ops::Range;

use candle_core::{Device, Result, Tensor, bail};

use crate::ReduceOp;
use crate::reduction::element::{Element, read_all, with_element};

/// Elements reduced at a time: the accumulators that are in use (at most 16 KiB each) stay in a near cache.
const BLOCK: usize = 2048;

/// What a block of ranks brings to a reduction.
pub(crate) struct Term<'a, T: Element> {
    /// Aligned, as above.
    pub ranks: Range<usize>,
    pub values: TermValues<'a, T>,
}

impl<'a, T: Element> Term<'a, T> {
    /// The input of one rank.
    pub fn input(rank: usize, values: &'a [T]) -> Self {
        Self {
            ranks: rank..rank + 1,
            values: TermValues::Input(values),
        }
    }
}

/// Values to be combined.
#[derive(Clone, Copy)]
pub(crate) enum TermValues<'a, T: Element> {
    /// The input of one rank.
    Input(&'a [T]),
    /// Several inputs, combined.
    Combined(&'a [T::Acc]),
}

impl<T: Element> TermValues<'_, T> {
    fn part(&self, range: Range<usize>) -> Self {
        match self {
            Self::Input(values) => Self::Input(&values[range]),
            Self::Combined(values) => Self::Combined(&values[range]),
        }
    }

    fn widen_into(&self, acc: &mut [T::Acc]) {
        match self {
            Self::Input(values) => {
                let pairs = acc.iter_mut().zip(*values);
                pairs.for_each(|(acc, x)| *acc = x.widen());
            }
            Self::Combined(values) => acc.copy_from_slice(values),
        }
    }
}

/// Whether two blocks of the ranks `0..world_size` are the halves of one.
pub(crate) fn are_halves(left: &Range<usize>, right: &Range<usize>, world_size: usize) -> bool {
    let block = 2 * left.len();
    left.end == right.start
        && left.start.is_multiple_of(block)
        && right.end == world_size.min(left.start + block)
}

/// The largest blocks that these ranks of `0..world_size`, which ascend, make up.
#[cfg(feature = "mpi")]
pub(crate) fn blocks(ranks: &[usize], world_size: usize) -> Vec<Range<usize>> {
    let mut blocks: Vec<Range<usize>> = Vec::new();
    for rank in ranks {
        blocks.push(*rank..rank + 1);
        while let [.., left, right] = &blocks[..]
            && are_halves(left, right, world_size)
        {
            let both = left.start..right.end;
            blocks.truncate(blocks.len() - 2);
            blocks.push(both);
        }
    }
    blocks
}

/// Reduces the inputs of all ranks, or blocks of them, into every destination. All have the same length, and the terms are
/// in the order of the ranks. A single input is copied bit by bit.
pub(crate) fn reduce<T: Element>(
    op: ReduceOp,
    terms: &[Term<'_, T>],
    destinations: &mut [&mut [T]],
) {
    let [destination, copies @ ..] = destinations else {
        return;
    };
    let (len, world_size) = (
        destination.len(),
        terms.last().map_or(0, |term| term.ranks.end),
    );
    for_each_block(op, terms, world_size, len, |range, _, values| {
        let place = &mut destination[range.clone()];
        match values {
            TermValues::Input(values) => place.copy_from_slice(values),
            TermValues::Combined(values) => {
                let pairs = place.iter_mut().zip(values);
                match op {
                    ReduceOp::Avg => {
                        pairs.for_each(|(y, acc)| *y = T::round(T::average(*acc, world_size)))
                    }
                    _ => pairs.for_each(|(y, acc)| *y = T::round(*acc)),
                }
            }
        }
        for copy in &mut *copies {
            copy[range.clone()].copy_from_slice(place);
        }
    });
}

/// Terms for the inputs of all ranks, in their order.
pub(crate) fn of_all<'a, T: Element>(inputs: impl Iterator<Item = &'a [T]>) -> Vec<Term<'a, T>> {
    let terms = inputs.enumerate();
    terms.map(|(rank, xs)| Term::input(rank, xs)).collect()
}

/// Reduces the inputs of some of `world_size` ranks, in their order, as far as they make up [`blocks`]: their results one after
/// the other, each of `len` elements.
#[cfg(feature = "mpi")]
pub(crate) fn reduce_blocks<T: Element>(
    op: ReduceOp,
    terms: &[Term<'_, T>],
    world_size: usize,
    len: usize,
    results: &mut [T::Acc],
) {
    for_each_block(op, terms, world_size, len, |range, index, values| {
        values.widen_into(&mut results[index * len..][range]);
    });
}

/// Calls `take` with what is left when the terms are combined: a range of elements, the index of the result among those for
/// this range, and its values.
fn for_each_block<T: Element>(
    op: ReduceOp,
    terms: &[Term<'_, T>],
    world_size: usize,
    len: usize,
    take: impl FnMut(Range<usize>, usize, TermValues<'_, T>),
) {
    match op {
        ReduceOp::Sum | ReduceOp::Avg => combine_with(T::plus, terms, world_size, len, take),
        ReduceOp::Prod => combine_with(T::times, terms, world_size, len, take),
        ReduceOp::Max => combine_with(T::larger, terms, world_size, len, take),
        ReduceOp::Min => combine_with(T::smaller, terms, world_size, len, take),
    }
}

#[inline(always)]
fn combine_with<T: Element>(
    combine: impl Fn(T::Acc, T::Acc) -> T::Acc + Copy,
    terms: &[Term<'_, T>],
    world_size: usize,
    len: usize,
    mut take: impl FnMut(Range<usize>, usize, TermValues<'_, T>),
) {
    let block = BLOCK.min(len);
    // One for each place on the stack.
    let mut accs: Vec<Vec<T::Acc>> = Vec::new();
    // Blocks that wait for their other half: their ranks, and their values unless these are in the accumulator.
    let mut stack: Vec<(Range<usize>, Option<TermValues<'_, T>>)> = Vec::new();
    for start in (0..len).step_by(BLOCK) {
        let range = start..len.min(start + BLOCK);
        for term in terms {
            stack.push((term.ranks.clone(), Some(term.values.part(range.clone()))));
            while let [.., left, right] = &stack[..]
                && are_halves(&left.0, &right.0, world_size)
            {
                let place = stack.len() - 2;
                while accs.len() < place + 2 {
                    accs.push(T::Acc::zeros(block));
                }
                let (acc, others) = accs.split_at_mut(place + 1);
                let right_acc = TermValues::Combined(&others[0][..range.len()]);
                let right_values = right.1.unwrap_or(right_acc);
                let acc = &mut acc[place][..range.len()];
                combine_into::<T>(combine, acc, left.1, right_values);
                let both = left.0.start..right.0.end;
                stack.truncate(place);
                stack.push((both, None));
            }
        }
        for (index, (_, values)) in stack.drain(..).enumerate() {
            let combined = || TermValues::Combined(&accs[index][..range.len()]);
            let values = values.unwrap_or_else(combined);
            take(range.clone(), index, values);
        }
    }
}

/// Combines `left`, by default what is in the accumulator, with `right` into the accumulator.
#[inline(always)]
fn combine_into<T: Element>(
    combine: impl Fn(T::Acc, T::Acc) -> T::Acc,
    acc: &mut [T::Acc],
    left: Option<TermValues<'_, T>>,
    right: TermValues<'_, T>,
) {
    if let (Some(TermValues::Input(left)), TermValues::Input(right)) = (left, right) {
        let inputs = left.iter().zip(right);
        let pairs = acc.iter_mut().zip(inputs);
        pairs.for_each(|(acc, (x, y))| *acc = combine(x.widen(), y.widen()));
        return;
    }
    if let Some(left) = left {
        left.widen_into(acc);
    }
    match right {
        TermValues::Input(right) => {
            let pairs = acc.iter_mut().zip(right);
            pairs.for_each(|(acc, x)| *acc = combine(*acc, x.widen()));
        }
        TermValues::Combined(right) => {
            let pairs = acc.iter_mut().zip(right);
            pairs.for_each(|(acc, x)| *acc = combine(*acc, *x));
        }
    }
}

/// The elementwise sum of contiguous tensors on the CPU, of one shape and dtype, in their order: the bits of a sum over ranks that have
/// one each.
///
/// # Errors
/// No tensor; tensors that differ in shape or dtype, are not contiguous, not on the CPU or of a type that ranks do not exchange.
pub fn sum_in_order(tensors: &[Tensor]) -> Result<Tensor> {
    fn sum<T: Element>(first: &Tensor, tensors: &[Tensor]) -> Result<Tensor> {
        let mut sum = T::zeros(first.elem_count());
        read_all(tensors, None, |sources: &[&[T]]| {
            let terms = of_all(sources.iter().copied());
            reduce(ReduceOp::Sum, &terms, &mut [&mut sum]);
        })?;
        Tensor::from_vec(sum, first.shape(), &Device::Cpu)
    }
    let Some(first) = tensors.first() else {
        bail!("a sum of no tensor has no shape");
    };
    let differs = |xs: &&Tensor| (xs.shape(), xs.dtype()) != (first.shape(), first.dtype());
    if let Some(other) = tensors.iter().find(differs) {
        bail!("a sum of {first:?} and {other:?}, which differ in shape or dtype");
    }
    with_element!(first.dtype(), sum(first, tensors))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By the definition: a block is cut after the largest power of two that is less than its length.
    fn tree(inputs: &[Vec<f32>], i: usize) -> f32 {
        match inputs {
            [input] => input[i],
            _ => {
                let half = inputs.len().next_power_of_two() / 2;
                tree(&inputs[..half], i) + tree(&inputs[half..], i)
            }
        }
    }

    fn inputs(num_inputs: usize, len: usize) -> Vec<Vec<f32>> {
        let value = |rank: usize, i: usize| {
            ((rank * 7919 + i * 104_729) % 10_007) as f32 / 3.0 - 1500.0 * (rank as f32).sqrt()
        };
        let input = |rank| (0..len).map(|i| value(rank, i)).collect();
        (0..num_inputs).map(input).collect()
    }

    #[test]
    fn sums_are_those_of_the_tree() {
        for num_inputs in 1..20 {
            for len in [0, 1, BLOCK - 1, BLOCK, 2 * BLOCK + 5] {
                let inputs = inputs(num_inputs, len);
                let terms = of_all(inputs.iter().map(Vec::as_slice));
                let (mut sum, mut copy) = (vec![0f32; len], vec![1f32; len]);
                reduce(ReduceOp::Sum, &terms, &mut [&mut sum, &mut copy]);
                assert!((0..len).all(|i| sum[i] == tree(&inputs, i)), "{num_inputs}");
                assert_eq!(sum, copy);
            }
        }
    }

    #[test]
    #[cfg(feature = "mpi")]
    fn blocks_of_ranks() {
        let blocks = |ranks: &[usize], world_size| -> Vec<(usize, usize)> {
            let blocks = blocks(ranks, world_size).into_iter();
            blocks.map(|block| (block.start, block.end)).collect()
        };
        assert_eq!(blocks(&[0, 1, 2, 3], 8), [(0, 4)]);
        assert_eq!(blocks(&[3, 4, 5], 6), [(3, 4), (4, 6)]);
        assert_eq!(blocks(&[4, 5, 6], 7), [(4, 7)]);
        assert_eq!(blocks(&[4, 5, 6], 8), [(4, 6), (6, 7)]);
        assert_eq!(blocks(&[1, 2, 5, 7], 8), [(1, 2), (2, 3), (5, 6), (7, 8)]);
        assert_eq!(blocks(&[4], 5), [(4, 5)]);
    }

    /// Ranks that are combined apart from the others, in whatever groups, give the same bits.
    #[test]
    #[cfg(feature = "mpi")]
    fn sums_of_blocks_give_the_same_bits() {
        let len = BLOCK + 77;
        for world_size in 1..14 {
            let inputs = inputs(world_size, len);
            let all = of_all(inputs.iter().map(Vec::as_slice));
            let mut expected = vec![0f32; len];
            reduce(ReduceOp::Sum, &all, &mut [&mut expected]);
            for num_hosts in 1..=world_size {
                for host_of in [
                    |rank: usize, num_hosts: usize, n: usize| rank * num_hosts / n,
                    |rank: usize, num_hosts: usize, _: usize| (rank * rank) % num_hosts,
                ] {
                    let mut sums = Vec::new();
                    for host in 0..num_hosts {
                        let ranks: Vec<usize> = (0..world_size)
                            .filter(|rank| host_of(*rank, num_hosts, world_size) == host)
                            .collect();
                        let here: Vec<Term<f32>> = ranks
                            .iter()
                            .map(|rank| Term::input(*rank, &inputs[*rank]))
                            .collect();
                        let blocks = blocks(&ranks, world_size);
                        let mut results = vec![0f32; blocks.len() * len];
                        reduce_blocks(ReduceOp::Sum, &here, world_size, len, &mut results);
                        sums.push((blocks, results));
                    }
                    let mut terms: Vec<Term<f32>> = Vec::new();
                    for (blocks, results) in &sums {
                        let parts = blocks.iter().zip(results.chunks(len));
                        terms.extend(parts.map(|(ranks, values)| Term {
                            ranks: ranks.clone(),
                            values: TermValues::Combined(values),
                        }));
                    }
                    terms.sort_by_key(|term| term.ranks.start);
                    let mut got = vec![0f32; len];
                    reduce(ReduceOp::Sum, &terms, &mut [&mut got]);
                    assert!(got == expected, "{world_size} ranks on {num_hosts} hosts");
                }
            }
        }
    }
}
