//! Compares, in the first steps, what passes between blocks: every tensor-parallel rank has the same.
//!
//! A block that draws random numbers on each rank, that leaves a region out or that uses the wrong group gives other values on each
//! rank. The gradients of all blocks before it are wrong then; here the block itself is named. Weights that begin as zeros hide what is
//! behind them until they were updated, so one step is not enough.

use candle_comm::Mesh;
use candle_core::{Result, Tensor, bail};
use serde::{Deserialize, Serialize};

use crate::agreement::agree;
use crate::params::checksum;

/// What passes between blocks, in the order of the passes: the same order on every rank.
#[derive(Default)]
pub(super) struct Borders(Vec<Border>);

/// What left a block.
#[derive(Clone, Serialize, Deserialize)]
struct Border {
    block: usize,
    /// The output, or the gradient of the input.
    is_output: bool,
    sum: u64,
}

impl Borders {
    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// Notes what left a block.
    pub fn add(&mut self, block: usize, is_output: bool, values: &Tensor) -> Result<()> {
        self.0.push(Border {
            block,
            is_output,
            sum: checksum(values)?,
        });
        Ok(())
    }

    /// An error on every rank of the mesh that names the first block of which two tensor-parallel ranks have different values. All
    /// ranks must call it.
    pub fn compare(&self, mesh: &Mesh, when: &str) -> Result<()> {
        let own =
            serde_json::to_vec(&(mesh.world.rank(), &self.0)).map_err(candle_core::Error::wrap)?;
        let all = mesh.tp.all_gather_bytes(&own)?;
        let all = all
            .iter()
            .map(|bytes| serde_json::from_slice(bytes).map_err(candle_core::Error::wrap));
        let all: Vec<(usize, Vec<Border>)> = all.collect::<Result<_>>()?;
        agree(&mesh.world, check(&all, when))
    }
}

/// An error that names the first block of which two of `ranks`, world ranks with their borders, have different values.
fn check(ranks: &[(usize, Vec<Border>)], when: &str) -> Result<()> {
    let Some(((first, borders), others)) = ranks.split_first() else {
        return Ok(());
    };
    let differing = borders.iter().enumerate().find_map(|(place, border)| {
        let differs = |(_, other): &&(usize, Vec<Border>)| {
            other.get(place).is_none_or(|other| other.sum != border.sum)
        };
        others.iter().find(differs).map(|(rank, _)| (border, *rank))
    });
    let Some((
        Border {
            block, is_output, ..
        },
        other,
    )) = differing
    else {
        return Ok(());
    };
    if *is_output {
        bail!(
            "the output of block {block} differs between ranks {first} and {other} {when}: these tensor-parallel ranks share \
             what passes between blocks\nhint: a block that draws random numbers, as for dropout, must draw the same ones on every \
             tensor-parallel rank; what each rank computes with weights of its own is summed or gathered (regions, \
             RowParallelLinear), over mesh.tp"
        )
    }
    bail!(
        "the gradient of block {block}'s input differs between ranks {first} and {other} {when}: these tensor-parallel ranks \
         share what passes between blocks\nhint: what each rank computes with weights of its own begins with \
         regions::copy_to_tensor_parallel_region or a ColumnParallelLinear, over mesh.tp, which sum the gradients of all ranks; a \
         block that draws random numbers must draw the same ones on every tensor-parallel rank"
    )
}
