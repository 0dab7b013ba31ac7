//! Finds parameters whose copies on tensor-parallel ranks have come to differ.
//!
//! A replicated weight that ranks use on different values, declared as if they used it on the same ones, gets another gradient on
//! each rank. Its copies drift apart while the loss still falls, and a checkpoint has the copy of the first rank only.

use std::collections::HashMap;
use std::hash::Hasher;

use candle_comm::Mesh;
use candle_core::{DType, Result, Tensor, bail};
use serde::{Deserialize, Serialize};
use twox_hash::XxHash64;

use super::parameters::Parameters;
use crate::agreement::agree;

/// The bits of a rank's copy of some indices of a parameter, condensed.
#[derive(Clone, Serialize, Deserialize)]
struct Checksum {
    param: String,
    first_index: usize,
    sum: u64,
}

/// The checksums of what other tensor-parallel ranks hold too.
#[derive(Default)]
pub(crate) struct Checksums(Vec<Checksum>);

impl Checksums {
    /// Adds the copies that are held here of parameter `index`; `values` has its local shape.
    pub fn add(&mut self, params: &Parameters, index: usize, values: &Tensor) -> Result<()> {
        let (dim, held) = params.get(index).held();
        for overlap in params.overlaps(index) {
            let range = &overlap.range;
            if held.start > range.start || range.end > held.end {
                continue;
            }
            let copy = match values.rank() {
                0 => values.clone(),
                _ => values.narrow(dim, range.start - held.start, range.len())?,
            };
            self.add_values(&params.get(index).name, range.start, &copy)?;
        }
        Ok(())
    }

    /// Adds values of a parameter, the first of which has this index on every rank that has them.
    pub fn add_values(&mut self, param: &str, first_index: usize, values: &Tensor) -> Result<()> {
        self.0.push(Checksum {
            param: param.to_string(),
            first_index,
            sum: checksum(values)?,
        });
        Ok(())
    }

    /// An error on every rank of the mesh that names the first parameter of which two tensor-parallel ranks have different
    /// copies. All ranks must call it; `what` it is and `when` go into the error.
    pub fn compare(&self, mesh: &Mesh, what: &str, when: &str) -> Result<()> {
        let own =
            serde_json::to_vec(&(mesh.world.rank(), &self.0)).map_err(candle_core::Error::wrap)?;
        let all = mesh.tp.all_gather_bytes(&own)?;
        let all = all
            .iter()
            .map(|bytes| serde_json::from_slice(bytes).map_err(candle_core::Error::wrap));
        let all: Vec<(usize, Vec<Checksum>)> = all.collect::<Result<_>>()?;
        agree(&mesh.world, check(&all, what, when))
    }
}

/// An error that names the first parameter of which two of `ranks`, world ranks with what they hold, have different copies.
fn check(ranks: &[(usize, Vec<Checksum>)], what: &str, when: &str) -> Result<()> {
    let mut seen = HashMap::new();
    for (rank, copies) in ranks {
        for copy in copies {
            let key = (copy.param.as_str(), copy.first_index);
            let (first, sum) = *seen.entry(key).or_insert((rank, copy.sum));
            if sum != copy.sum {
                bail!(
                    "the {what} of parameter {} differs between ranks {first} and {rank} {when}: these tensor-parallel ranks hold \
                     copies of it that must be the same\nhint: a block that draws random numbers, as for dropout, must draw the same \
                     ones on every tensor-parallel rank, and what is computed with each rank's own weights must be inside a \
                     tensor-parallel region (regions); a weight that each rank uses on values of its own, such as a norm inside such a \
                     region, is asked for by get_placed with Placement::Replicated(Gradient::Partial), which sums its gradient",
                    copy.param
                );
            }
        }
    }
    Ok(())
}

impl Parameters {
    /// An error on every rank of the mesh that names the first parameter of which two tensor-parallel ranks hold different copies;
    /// `values` gives a parameter's local values, and `when` says when that was.
    pub(crate) fn check_copies(
        &self,
        mesh: &Mesh,
        when: &str,
        values: impl Fn(usize) -> Result<Tensor>,
    ) -> Result<()> {
        if mesh.degrees.tp == 1 {
            return Ok(());
        }
        let (mut copies, mut overlapping) = (Checksums::default(), Checksums::default());
        for index in (0..self.len()).filter(|index| !self.overlaps(*index).is_empty()) {
            let checksums = match self.get(index).shard() {
                None => &mut copies,
                Some(_) => &mut overlapping,
            };
            checksums.add(self, index, &values(index)?)?;
        }
        copies.compare(mesh, "value", when)?;
        match overlapping.compare(mesh, "value", when) {
            // Overlapping parts lie at other places on each rank, and NCCL's order of sums depends on the place.
            Err(err) if mesh.degrees.dp > 2 => {
                tracing::warn!("the copies that the first rank has are taken, as {err}");
                Ok(())
            }
            compared => compared,
        }
    }
}

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
    let mut hasher = XxHash64::default();
    let mut bytes = Vec::new();
    for values in values.chunks(1024) {
        bytes.clear();
        bytes.extend(values.iter().flat_map(|value| bits(value).to_le_bytes()));
        hasher.write(&bytes);
    }
    Ok(hasher.finish())
}
