//! Borders between what ranks of a group share and what each has for itself, differentiable.
//!
//! | function | forward | backward | paper |
//! |---|---|---|---|
//! | [`copy_to_tensor_parallel_region`] | identity | all_reduce | f in arXiv:1909.08053 |
//! | [`reduce_from_tensor_parallel_region`] | all_reduce | identity | g in arXiv:1909.08053 |
//! | [`enter`] a region that divides rows | all_gather | reduce_scatter | g in arXiv:2205.05198 |
//! | [`leave`] a region that divides rows | reduce_scatter | all_gather | ḡ in arXiv:2205.05198 |
//!
//! `enter` and `leave` of a [`Region`] that does not divide rows are the first two.
//! In a group of one each of them returns its input.

use candle_comm::{Pending, ProcessGroup, ReduceOp};
use candle_core::{D, Result, Tensor, bail};
use candle_ops::with_backward;

use crate::pass::{Pass, Region, note_entered, note_sum};
use crate::placement::part;

/// Enters a region where each rank computes with other weights: (..) -> (..); the gradients of all ranks are summed.
///
/// # Errors
/// In the backward pass: what ends collectives.
pub fn copy_to_tensor_parallel_region(xs: &Tensor, tp: &ProcessGroup) -> Result<Tensor> {
    if tp.world_size() == 1 {
        return Ok(xs.clone());
    }
    note_entered(xs, tp)?;
    let tp = tp.clone();
    with_backward(
        [xs],
        xs.detach(),
        "copy_to_tensor_parallel_region",
        move |grad| {
            let sum = tp.all_reduce(grad, ReduceOp::Sum)?;
            note_sum("the gradient of what enters a region", grad, &sum, &tp)?;
            Ok([Some(sum)])
        },
    )
}

/// Leaves a region where each rank has a part of a sum: (..) -> (..), the sum.
///
/// # Errors
/// What ends collectives, such as another shape on another rank.
pub fn reduce_from_tensor_parallel_region(xs: &Tensor, tp: &ProcessGroup) -> Result<Tensor> {
    if tp.world_size() == 1 {
        return Ok(xs.clone());
    }
    let sum = tp.all_reduce(&xs.detach(), ReduceOp::Sum)?;
    note_sum("what leaves a region", xs, &sum, tp)?;
    with_backward([xs], sum, "reduce_from_tensor_parallel_region", |grad| {
        Ok([Some(grad.clone())])
    })
}

/// Enters `region`, where each rank computes with other weights: what this rank has outside, as (b, t, width) on all ranks; the gradients of all
/// ranks are summed.
///
/// # Errors
/// Rows that are not those of the pass, and what ends collectives.
pub fn enter(xs: &Tensor, region: &Region, pass: &Pass) -> Result<Tensor> {
    if !region.divides_rows() {
        region.check_rows(xs, pass)?;
        return copy_to_tensor_parallel_region(xs, region.tp());
    }
    let (of_grad, dims) = (region.clone(), xs.dims().to_vec());
    let out = region.enter(&xs.detach(), pass)?;
    with_backward([xs], out, "enter", move |grad| {
        let grad = of_grad.leave(grad)?.reshape(dims.as_slice())?;
        Ok([Some(grad)])
    })
}

/// Leaves `region` with this rank's summand (b, t, width) of all rows: the sum, as this rank has it outside.
///
/// # Errors
/// As [`enter`].
pub fn leave(partial: &Tensor, region: &Region, pass: &Pass) -> Result<Tensor> {
    if !region.divides_rows() {
        return reduce_from_tensor_parallel_region(partial, region.tp());
    }
    let (b, t) = pass.dims()?;
    let dims = partial.dims().to_vec();
    if dims.split_last().map(|(_, rows)| rows.iter().product()) != Some(b * t) {
        bail!(
            "a tensor of shape {dims:?} leaves a region; expected all {} rows of the micro-batch",
            b * t
        );
    }
    let (of_grad, pass) = (region.clone(), pass.clone());
    let out = region.leave(&partial.detach())?;
    with_backward([partial], out, "leave", move |grad| {
        let grad = of_grad.enter(grad, &pass)?.reshape(dims.as_slice())?;
        Ok([Some(grad)])
    })
}

impl Region {
    /// Enters the region: what this rank has outside as (b, t, ..), the same on all ranks.
    ///
    /// # Errors
    /// Rows that are not those of the pass, and what ends collectives.
    pub fn enter(&self, xs: &Tensor, pass: &Pass) -> Result<Tensor> {
        self.start_enter(xs, pass)?.wait()
    }

    /// An error if `xs` cannot be what this rank has outside in this pass.
    fn check_rows(&self, xs: &Tensor, pass: &Pass) -> Result<()> {
        if !self.divides_rows() && !pass.divides_rows() {
            return Ok(());
        }
        let (b, t) = pass.dims()?;
        let own = Self::sequence_parallel(self.tp()).own_rows(b * t).len();
        let (_, rows) = xs.dims().split_last().unwrap_or((&1, &[]));
        if self.divides_rows() && rows.iter().product::<usize>() != own {
            bail!(
                "a tensor of shape {:?} enters a region whose ranks have a part of the rows each outside; expected {own} rows, this rank's of {}",
                xs.shape(),
                b * t
            );
        }
        if !self.divides_rows() && own != b * t && rows.starts_with(&[1, own]) {
            bail!(
                "a tensor of shape {:?} enters a region whose ranks have all {} rows each outside, in a model whose ranks have a part of them\nhint: \
                 every layer gets the region of ModelPart::with_region",
                xs.shape(),
                b * t
            );
        }
        Ok(())
    }

    /// Starts to [enter](Self::enter).
    ///
    /// # Errors
    /// As [`Self::enter`].
    pub fn start_enter(&self, xs: &Tensor, pass: &Pass) -> Result<Pending<Tensor>> {
        self.check_rows(xs, pass)?;
        if !self.divides_rows() {
            return Ok(Pending::ready(xs.clone()));
        }
        let (b, t) = pass.dims()?;
        let num_rows = b * t;
        let own = xs.flatten_to(D::Minus2)?;
        let padded = padded(&own, self.longest(num_rows))?;
        let width = padded.dim(1)?;
        let all = self.tp().start_all_gather(&padded)?;
        Ok(all.map(move |all| {
            all.narrow(0, 0, num_rows)?
                .contiguous()?
                .reshape((b, t, width))
        }))
    }

    /// Leaves the region with this rank's summand (.., features) of all rows: the sum, as this rank has it outside.
    ///
    /// # Errors
    /// What ends collectives, such as another shape on another rank.
    pub fn leave(&self, partial: &Tensor) -> Result<Tensor> {
        self.start_leave(partial)?.wait()
    }

    /// Starts to [leave](Self::leave).
    ///
    /// # Errors
    /// As [`Self::leave`].
    pub fn start_leave(&self, partial: &Tensor) -> Result<Pending<Tensor>> {
        if !self.divides_rows() {
            return self.tp().start_all_reduce(partial, ReduceOp::Sum);
        }
        let rows = partial.flatten_to(D::Minus2)?;
        let num_rows = rows.dim(0)?;
        let num_padded = self.longest(num_rows) * self.tp().world_size();
        let own = self.own_rows(num_rows).len();
        let sum = self
            .tp()
            .start_reduce_scatter(&padded(&rows, num_padded)?, ReduceOp::Sum)?;
        Ok(sum.map(move |sum| sum.narrow(0, 0, own)?.contiguous()?.unsqueeze(0)))
    }
}

/// Rows, (rows, width), and zeros up to `len`.
fn padded(rows: &Tensor, len: usize) -> Result<Tensor> {
    let (num_rows, width) = rows.dims2()?;
    if num_rows == len {
        return rows.contiguous();
    }
    let zeros = Tensor::zeros((len - num_rows, width), rows.dtype(), rows.device())?;
    match num_rows {
        // candle's cat panics on tensors without elements.
        0 => Ok(zeros),
        _ => Tensor::cat(&[rows, &zeros], 0),
    }
}

/// Joins parts of the last dim that may be uneven, as [`crate::Shard::even`] cuts `global`; no gradient.
///
/// (.., part) -> (.., global)
///
/// # Errors
/// A part of another size, and what ends collectives.
pub fn gather_parts(xs: &Tensor, global: usize, tp: &ProcessGroup) -> Result<Tensor> {
    let world_size = tp.world_size();
    if world_size == 1 {
        return Ok(xs.detach());
    }
    let longest = global.div_ceil(world_size);
    let padding = longest - xs.dim(D::Minus1)?;
    let padded = xs
        .detach()
        .pad_with_zeros(D::Minus1, 0, padding)?
        .contiguous()?;
    let all = tp.all_gather(&padded, padded.rank() - 1)?;
    let parts = (0..world_size).map(|rank| {
        let len = part(global, rank, world_size).len();
        all.narrow(D::Minus1, rank * longest, len)
    });
    Tensor::cat(&parts.collect::<Result<Vec<_>>>()?, D::Minus1)
}
