//! [`linear_cross_entropy`](super::linear_cross_entropy) with a weight that comes tile by tile. It comes twice, for the losses and
//! for the gradients, and its product with the rows is computed each time.

use std::ops::Range;

use candle_comm::ProcessGroup;
use candle_core::{DType, Device, Result, Tensor};
use candle_ops::{
    IGNORE_INDEX, LinearWeight, cross_entropy_grad_in_place, cross_entropy_loss,
    linear_weight_grad_into, softmax_stats, sum_into,
};

use crate::params::TiledWeight;
use crate::pass::{GradientSink, Region, WeightHalf};
use crate::placement::Shard;

/// Rows (n, hidden), their targets (n), the weight (local_vocab, hidden) of the vocabulary's part `shard`; `chunk_rows` rows of
/// logits exist at once.
pub(super) struct HeadByTiles {
    pub xs: Tensor,
    pub targets: Tensor,
    pub weight: TiledWeight,
    pub shard: Shard,
    pub tp: ProcessGroup,
    pub chunk_rows: usize,
}

/// A product of the weight's gradient that waits: the tile's rows, whether it is the first chunk, the gradient of the logits (len, rows of the
/// tile) and the input (len, hidden).
struct WaitingProduct {
    tile_rows: Range<usize>,
    is_first_chunk: bool,
    dz: Tensor,
    xs: Tensor,
}

impl WaitingProduct {
    /// Writes it to its rows of `dw`, or adds it, as the flag says of the first one of a row.
    fn run(&self, dw: &Tensor, add: bool) -> Result<()> {
        let (rows, hidden) = (&self.tile_rows, self.xs.dim(1)?);
        let dw = dw.narrow(0, rows.start * hidden, rows.len() * hidden)?;
        linear_weight_grad_into(&dw, add || !self.is_first_chunk, &self.dz, &self.xs)
    }
}

impl HeadByTiles {
    /// The sum of the losses, f64, and the gradient of the rows (n, hidden) times `loss_scale`; that of the weight goes to `gradients`.
    pub fn losses_and_grad(
        self,
        region: &Region,
        loss_scale: f32,
        gradients: &mut dyn GradientSink,
    ) -> Result<(Tensor, Tensor)> {
        let stats = self.tp.all_gather(&self.stats()?, 0)?;
        let (losses, log_sum_exp) = cross_entropy_loss(&stats, &self.targets, self.shard.global())?;
        let sum = Tensor::zeros((), DType::F64, self.xs.device())?;
        sum_into(&sum, true, &losses)?;
        // In f32, rounded once.
        let dx = Tensor::zeros(self.xs.elem_count(), DType::F32, self.xs.device())?;
        let (dims, dtype) = (self.xs.dims().to_vec(), self.xs.dtype());
        let weight = self.weight.tensor().clone();
        if !weight.track_op() {
            self.backward(&log_sum_exp, loss_scale, &dx, &mut |_| Ok(()))?;
        } else if gradients.weight_half() == WeightHalf::AtOnce {
            let dx = dx.clone();
            let grad = move |dw: &Tensor, add| {
                let mut run = |product: WaitingProduct| product.run(dw, add);
                self.backward(&log_sum_exp, loss_scale, &dx, &mut run)
            };
            gradients.put(&weight, Box::new(grad))?;
        } else {
            let mut waiting = Vec::new();
            self.backward(&log_sum_exp, loss_scale, &dx, &mut |product| {
                waiting.push(product);
                Ok(())
            })?;
            let grad = move |dw: &Tensor, add| {
                let mut products = waiting.iter();
                products.try_for_each(|product: &WaitingProduct| product.run(dw, add))
            };
            gradients.put(&weight, Box::new(grad))?;
        }
        let dx = dx.reshape(dims)?.to_dtype(dtype)?;
        Ok((sum, region.leave(&dx)?))
    }

    /// The sum of the losses, and the number of rows whose largest logit is that of their target, of equal ones the first: f64 scalars on the host.
    pub fn predictions(&self) -> Result<[Tensor; 2]> {
        if self.xs.dim(0)? == 0 {
            // Replicas with rows need this rank's part of each tile; all tensor-parallel ranks have as many rows.
            self.weight.for_each_part(|_, _| Ok(()))?;
            let none = Tensor::new(0f64, &Device::Cpu)?;
            return Ok([none.clone(), none]);
        }
        let of_chunk = |logits: &Tensor, targets: &Tensor, vocab_start: usize| {
            let stats = softmax_stats(logits, targets, vocab_start)?; // (len, 3)
            // An id that is less than 2^24 is exact in f32.
            let largest = logits.argmax_keepdim(1)?.to_dtype(DType::F32)?;
            Tensor::cat(&[stats, (largest + vocab_start as f64)?], 1)
        };
        let join = |a: &Tensor, b: &Tensor| {
            let stats = joined_stats(a, b)?;
            let column = |of: &Tensor, index| of.narrow(1, index, 1)?.contiguous();
            let is_larger = column(b, 0)?.gt(&column(a, 0)?)?;
            let largest = is_larger.where_cond(&column(b, 3)?, &column(a, 3)?)?;
            Tensor::cat(&[stats, largest], 1)
        };
        // Of the part of each rank all rows, in the order of the vocabulary: (tp * n, 4).
        let parts = self.tp.all_gather(&self.of_tiles(of_chunk, join)?, 0)?;
        let stats = parts.narrow(1, 0, 3)?.contiguous()?;
        let (losses, _) = cross_entropy_loss(&stats, &self.targets, self.shard.global())?;
        let losses: Vec<f32> = losses.to_vec1()?;
        let targets: Vec<u32> = self.targets.to_vec1()?;
        let (parts, n) = (parts.to_vec2::<f32>()?, targets.len());
        let is_right = |row: usize, target: u32| {
            let of_row = parts.iter().skip(row).step_by(n);
            let largest = of_row.reduce(|a, b| if b[0] > a[0] { b } else { a });
            largest.is_some_and(|part| part[3] == target as f32)
        };
        let rows = targets.iter().enumerate();
        let num_right = rows
            .filter(|&(row, &target)| target != IGNORE_INDEX && is_right(row, target))
            .count();
        let loss_sum: f64 = losses.into_iter().map(f64::from).sum();
        Ok([
            Tensor::new(loss_sum, &Device::Cpu)?,
            Tensor::new(num_right as f64, &Device::Cpu)?,
        ])
    }

    /// The first row and the number of rows of each chunk.
    fn chunks(&self) -> Result<impl Iterator<Item = (usize, usize)>> {
        let (n, chunk_rows) = (self.xs.dim(0)?, self.chunk_rows);
        // One of no rows, if there are none: the weight has a gradient of zeros then.
        let firsts = (0..n.max(1)).step_by(chunk_rows);
        Ok(firsts.map(move |first| (first, chunk_rows.min(n - first))))
    }

    /// Rows, targets and their logits (len, rows of the tile).
    fn logits(&self, first: usize, len: usize, tile: LinearWeight<'_>) -> Result<[Tensor; 3]> {
        let xs = self.xs.narrow(0, first, len)?;
        let logits = tile.forward(&xs, None)?;
        Ok([xs, self.targets.narrow(0, first, len)?, logits])
    }

    fn vocab_start(&self, tile_rows: &Range<usize>) -> usize {
        self.shard.start() + tile_rows.start
    }

    /// What [`softmax_stats`] gives for all local columns, (n, 3).
    fn stats(&self) -> Result<Tensor> {
        self.of_tiles(softmax_stats, joined_stats)
    }

    /// What `of_chunk` gives for logits, their targets and the first id of their columns, (len, ..), of all rows and, as `join` puts two tiles
    /// together, of all local columns.
    fn of_tiles(
        &self,
        of_chunk: impl Fn(&Tensor, &Tensor, usize) -> Result<Tensor>,
        join: impl Fn(&Tensor, &Tensor) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let mut all: Option<Tensor> = None;
        self.weight.for_each_part(|tile_rows, tile| {
            let mut chunks = Vec::new();
            for (first, len) in self.chunks()? {
                let [_, targets, logits] = self.logits(first, len, tile)?;
                chunks.push(of_chunk(&logits, &targets, self.vocab_start(&tile_rows))?);
            }
            let of_tile = Tensor::cat(&chunks, 0)?;
            all = Some(match all.take() {
                None => of_tile,
                Some(all) => join(&all, &of_tile)?,
            });
            Ok(())
        })?;
        all.ok_or_else(|| candle_core::Error::msg("a head of no tiles"))
    }

    /// Writes the gradient of the rows to `dx`, n * hidden values; `of_weight` gets the products whose sum is that of the weight.
    fn backward(
        &self,
        log_sum_exp: &Tensor,
        loss_scale: f32,
        dx: &Tensor,
        of_weight: &mut dyn FnMut(WaitingProduct) -> Result<()>,
    ) -> Result<()> {
        let hidden = self.xs.dim(1)?;
        let mut is_first_tile = true;
        self.weight.for_each_tile(|tile_rows, tile| {
            let start = self.vocab_start(&tile_rows);
            for (first, len) in self.chunks()? {
                let [xs, targets, logits] = self.logits(first, len, tile.into())?;
                let log_sum_exp = log_sum_exp.narrow(0, first, len)?;
                let dz =
                    cross_entropy_grad_in_place(logits, &log_sum_exp, &targets, start, loss_scale)?;
                let dx = dx.narrow(0, first * hidden, len * hidden)?;
                // dz W is the gradient of a weight, (dzᵀ)ᵀ W.
                linear_weight_grad_into(&dx, !is_first_tile, &dz.t()?.contiguous()?, tile)?;
                of_weight(WaitingProduct {
                    tile_rows: tile_rows.clone(),
                    is_first_chunk: first == 0,
                    dz,
                    xs,
                })?;
            }
            is_first_tile = false;
            Ok(())
        })
    }
}

/// The [`softmax_stats`] (n, 3) of the columns of two parts of the vocabulary together; more columns are left alone.
fn joined_stats(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let column = |stats: &Tensor, index| stats.narrow(1, index, 1);
    let (max_a, max_b) = (column(a, 0)?, column(b, 0)?);
    let max = max_a.maximum(&max_b)?;
    let sum_a = (column(a, 1)? * (max_a - &max)?.exp()?)?;
    let sum_b = (column(b, 1)? * (max_b - &max)?.exp()?)?;
    let target = (column(a, 2)? + column(b, 2)?)?;
    Tensor::cat(&[max, (sum_a + sum_b)?, target], 1)
}
