//! Checksums of what tensor-parallel ranks must have alike, and their comparison, which names what differs.

use std::collections::HashMap;
use std::hash::Hasher;

use candle_comm::{Mesh, ProcessGroup};
use candle_core::{DType, Result, Tensor, bail};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use twox_hash::XxHash64;

use crate::agreement::gather;

/// What tensor-parallel ranks must have alike.
#[derive(Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) enum Shared {
    /// Values of a parameter of which several ranks hold copies.
    Value(String),
    /// Their gradient.
    Gradient(String),
    /// The output of a block.
    Output(usize),
    /// The gradient of a block's input.
    InputGrad(usize),
    /// An input of a region in a block.
    RegionInput(usize),
    /// Values of a parameter that data-parallel ranks have, too.
    Replica(String),
}

/// The bits of it, condensed.
#[derive(Clone, Serialize, Deserialize)]
struct Checksum {
    what: Shared,
    /// Index of the first value of a parameter, or place of a block's among the passes: the same on all ranks that have it.
    place: usize,
    sum: u64,
}

/// What a rank has of all that is shared, in the order in which it came by it.
#[derive(Default)]
pub(crate) struct Checksums(Vec<Checksum>);

impl Checksums {
    /// Adds values; `place` tells them from others of the same name.
    pub fn add(&mut self, what: Shared, place: usize, values: &Tensor) -> Result<()> {
        self.note(what, place, checksum(values)?);
        Ok(())
    }

    /// Adds what is condensed already.
    pub fn note(&mut self, what: Shared, place: usize, sum: u64) {
        self.0.push(Checksum { what, place, sum });
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// A hash of all sums.
    pub fn condensed(&self) -> u64 {
        let mut hasher = XxHash64::default();
        self.0
            .iter()
            .for_each(|checksum| hasher.write_u64(checksum.sum));
        hasher.finish()
    }

    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// An error on every rank of the mesh that names the first thing of which two tensor-parallel ranks have different ones; `when` that
    /// was goes into it. All ranks must call it.
    pub fn compare(&self, mesh: &Mesh, when: &str) -> Result<()> {
        match self.difference(mesh, when)? {
            None => Ok(()),
            Some(difference) => bail!("{difference}"),
        }
    }

    /// As [`Self::compare`], with the message in place of the error.
    ///
    /// # Errors
    /// Failures of ranks.
    pub fn difference(&self, mesh: &Mesh, when: &str) -> Result<Option<String>> {
        self.difference_in(&mesh.tp, mesh, when)
    }

    /// As [`Self::difference`], between the ranks of `group` and of its like.
    ///
    /// # Errors
    /// Failures of ranks.
    pub fn difference_in(
        &self,
        group: &ProcessGroup,
        mesh: &Mesh,
        when: &str,
    ) -> Result<Option<String>> {
        let of_group: Vec<(usize, Vec<Checksum>)> = gather(group, &(mesh.world.rank(), &self.0))?;
        let mut seen = HashMap::new();
        let mut difference = None;
        for (rank, sums) in of_group {
            for Checksum { what, place, sum } in sums {
                let (first, expected) = *seen.entry((what.clone(), place)).or_insert((rank, sum));
                if difference.is_none() && sum != expected {
                    difference = Some(what.differs(first, rank, when));
                }
            }
        }
        let of_ranks: Vec<Option<String>> = gather(&mesh.world, &difference)?;
        Ok(of_ranks.into_iter().flatten().next())
    }
}

impl Shared {
    /// Says that two ranks have different ones.
    fn differs(&self, first: usize, second: usize, when: &str) -> String {
        let (what, why) = match self {
            Self::Value(name) => (format!("value of parameter {name}"), HELD),
            Self::Gradient(name) => (format!("gradient of parameter {name}"), HELD),
            Self::Output(block) => (format!("output of block {block}"), PASSED_ON),
            Self::InputGrad(block) => (format!("gradient of block {block}'s input"), PASSED_BACK),
            Self::RegionInput(block) => (format!("input of a region in block {block}"), ENTERED),
            Self::Replica(name) => {
                return format!(
                    "the value of parameter {name} differs between ranks {first} and {second} {when}: these data-parallel ranks {REPLICATED}"
                );
            }
        };
        format!(
            "the {what} differs between ranks {first} and {second} {when}: these tensor-parallel ranks {why}"
        )
    }
}

const HELD: &str = "hold copies of it that must be the same\nhint: a block that draws random numbers, as for dropout, must draw the same \
    ones on every tensor-parallel rank, and what is computed with each rank's own weights must be inside a tensor-parallel region \
    (regions); a weight that each rank uses on values of its own, such as a norm inside such a region, is asked for by get_placed with \
    Placement::Replicated(Gradient::Partial), which sums its gradient";
const PASSED_ON: &str = "share what passes between blocks\nhint: a block that draws random numbers, as for dropout, must draw the same ones \
    on every tensor-parallel rank; what each rank computes with weights of its own is summed or gathered (regions, RowParallelLinear), \
    over mesh.tp";
const PASSED_BACK: &str = "share what passes between blocks\nhint: what each rank computes with weights of its own begins with \
    regions::copy_to_tensor_parallel_region or a ColumnParallelLinear, over mesh.tp, which sum the gradients of all ranks; a block that \
    draws random numbers must draw the same ones on every tensor-parallel rank";

const ENTERED: &str = "must enter it with the same\nhint: copy_to_tensor_parallel_region takes what all ranks have alike, and sums its gradients; \
    what a rank has computed in a region is in it already, and is not entered again; inside a region Pass::dropout_sharded drops";
const REPLICATED: &str = "hold copies of it that must be the same\nhint: a program writes a weight by Parameters::set alone, on every rank and to the \
    same values; every rank has the same rule of the optimizer, with the same constants";

/// The bits of all values; -0 and 0 are the same, and so are all NaNs, of which others tell.
pub(crate) fn checksum(values: &Tensor) -> Result<u64> {
    let values = values
        .flatten_all()?
        .to_dtype(DType::F32)?
        .to_vec1::<f32>()?;
    let bits = |value: &f32| match value.is_nan() {
        true => f32::NAN.to_bits(),
        false => (value + 0.0).to_bits(),
    };
    let of_part = |values: &[f32]| {
        let mut hasher = XxHash64::default();
        let mut bytes = Vec::new();
        for values in values.chunks(1024) {
            bytes.clear();
            bytes.extend(values.iter().flat_map(|value| bits(value).to_le_bytes()));
            hasher.write(&bytes);
        }
        hasher.finish()
    };
    let parts: Vec<u64> = values.par_chunks(1 << 18).map(of_part).collect();
    let mut hasher = XxHash64::default();
    parts.iter().for_each(|part| hasher.write_u64(*part));
    Ok(hasher.finish())
}
