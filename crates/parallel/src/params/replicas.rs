//! Finds parameters whose copies on tensor-parallel ranks have come to differ.
//!
//! A replicated weight that ranks use on different values, declared as if they used it on the same ones, gets another gradient on
//! each rank. Its copies drift apart while the loss still falls, and a checkpoint has the copy of the first rank only.

use std::hash::{DefaultHasher, Hasher};

use candle_comm::ProcessGroup;
use candle_core::{DType, Result, Tensor, bail};

use super::parameters::Parameters;

/// The bits of a rank's copy of some indices of a parameter, condensed.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Checksum {
    param: usize,
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
                param: index,
                first_index: range.start,
                sum: checksum(&copy)?,
            });
        }
        Ok(())
    }

    /// An error on every rank that names the first parameter of which two ranks have different copies. All ranks of the group
    /// must call it; `what` it is and `when` go into the error.
    pub fn compare(
        &self,
        params: &Parameters,
        tp: &ProcessGroup,
        what: &str,
        when: &str,
    ) -> Result<()> {
        let bytes = self.0.iter().flat_map(|copy| {
            [copy.param as u64, copy.first_index as u64, copy.sum].map(u64::to_le_bytes)
        });
        let bytes: Vec<u8> = bytes.flatten().collect();
        let all = tp.all_gather_bytes(&bytes)?;
        let mut seen: Vec<(usize, Checksum)> = Vec::new();
        for (rank, bytes) in all.iter().enumerate() {
            for copy in bytes.chunks_exact(24).filter_map(from_bytes) {
                let same = |(_, other): &&(usize, Checksum)| {
                    (other.param, other.first_index) == (copy.param, copy.first_index)
                };
                match seen.iter().find(same) {
                    None => seen.push((rank, copy)),
                    Some((_, other)) if other.sum == copy.sum => {}
                    Some((first, _)) => bail!(
                        "the {what} of parameter {} differs between tensor-parallel ranks {first} and {rank} {when}: they \
                         hold copies of it that must be the same\nhint: a weight that each rank uses on values of its own, \
                         such as a norm inside a tensor-parallel region, is asked for by get_placed with \
                         Placement::Replicated(Gradient::Partial), which sums its gradient",
                        params.get(copy.param).name
                    ),
                }
            }
        }
        Ok(())
    }
}

impl Parameters {
    /// An error on every rank of the group that names the first parameter of which two tensor-parallel ranks hold different copies;
    /// `values` gives a parameter's local values, and `when` says when that was.
    pub(crate) fn check_copies(
        &self,
        tp: &ProcessGroup,
        when: &str,
        values: impl Fn(usize) -> Result<Tensor>,
    ) -> Result<()> {
        if tp.world_size() == 1 {
            return Ok(());
        }
        let mut checksums = Checksums::default();
        for index in 0..self.len() {
            if !self.overlaps(index).is_empty() {
                checksums.add(self, index, &values(index)?)?;
            }
        }
        checksums.compare(self, tp, "value", when)
    }
}

fn from_bytes(bytes: &[u8]) -> Option<Checksum> {
    let number = |place: usize| {
        let bytes = bytes.get(8 * place..8 * place + 8)?;
        Some(u64::from_le_bytes(bytes.try_into().ok()?))
    };
    Some(Checksum {
        param: number(0)? as usize,
        first_index: number(1)? as usize,
        sum: number(2)?,
    })
}

/// The bits of all values; -0 and 0 are the same.
fn checksum(values: &Tensor) -> Result<u64> {
    let values = values
        .flatten_all()?
        .to_dtype(DType::F32)?
        .to_vec1::<f32>()?;
    let mut hasher = DefaultHasher::new();
    for value in values {
        hasher.write_u32((value + 0.0).to_bits());
    }
    Ok(hasher.finish())
}
