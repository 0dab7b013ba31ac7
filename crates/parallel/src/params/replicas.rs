//! Finds parameters whose copies on tensor-parallel ranks have come to differ.
//!
//! A replicated weight that ranks use on different values, declared as if they used it on the same ones, gets another gradient on
//! each rank. Its copies drift apart while the loss still falls, and a checkpoint has the copy of the first rank only.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hasher};

use candle_comm::Mesh;
use candle_core::{DType, Result, Tensor, bail};
use serde::{Deserialize, Serialize};

use super::parameters::Parameters;

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
            self.0.push(Checksum {
                param: params.get(index).name.clone(),
                first_index: range.start,
                sum: checksum(&copy)?,
            });
        }
        Ok(())
    }

    /// An error on every rank of the mesh that names the first parameter of which two tensor-parallel ranks have different
    /// copies. All ranks must call it; `what` it is and `when` go into the error.
    pub fn compare(&self, mesh: &Mesh, what: &str, when: &str) -> Result<()> {
        let own = ((mesh.pp.rank(), mesh.dp.rank()), &self.0);
        let bytes = serde_json::to_vec(&own).map_err(candle_core::Error::msg)?;
        let mut seen = HashMap::new();
        for (rank, bytes) in mesh.world.all_gather_bytes(&bytes)?.iter().enumerate() {
            let (place, copies): ((usize, usize), Vec<Checksum>) =
                serde_json::from_slice(bytes).map_err(candle_core::Error::msg)?;
            for copy in copies {
                let key = (place, copy.param.clone(), copy.first_index);
                let (first, sum) = *seen.entry(key).or_insert((rank, copy.sum));
                if sum != copy.sum {
                    bail!(
                        "the {what} of parameter {} differs between ranks {first} and {rank} {when}: these tensor-parallel \
                         ranks hold copies of it that must be the same\nhint: a weight that each rank uses on values of its \
                         own, such as a norm inside a tensor-parallel region, is asked for by get_placed with \
                         Placement::Replicated(Gradient::Partial), which sums its gradient",
                        copy.param
                    );
                }
            }
        }
        Ok(())
    }
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
        let mut checksums = Checksums::default();
        for index in 0..self.len() {
            if !self.overlaps(index).is_empty() {
                checksums.add(self, index, &values(index)?)?;
            }
        }
        checksums.compare(mesh, "value", when)
    }
}

/// The bits of all values; -0 and 0 are the same, and so are all NaNs, of which others tell.
pub(crate) fn checksum(values: &Tensor) -> Result<u64> {
    let values = values
        .flatten_all()?
        .to_dtype(DType::F32)?
        .to_vec1::<f32>()?;
    let mut hasher = DefaultHasher::new();
    for value in values {
        let value = if value.is_nan() {
            f32::NAN
        } else {
            value + 0.0
        };
        hasher.write_u32(value.to_bits());
    }
    Ok(hasher.finish())
}
