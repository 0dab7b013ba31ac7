//! The sums of a step's gradients, wherever they are.

use std::ops::Range;

use candle_comm::Mesh;
use candle_core::{DType, Result, Tensor, bail};

use crate::memory::MemoryCategory;
use crate::offload::{Column, Kept};
use crate::params::{FlatBuffer, Parameters};

/// A sum of f32 for each bucket of gradients: of the whole bucket, or of this rank's slice if replicas divide the gradients.
pub(crate) struct SumStore {
    pub column: Column,
    /// Whether replicas divide the gradients, so that a sum is this rank's slice of a bucket.
    pub is_divided: bool,
    /// The part of each sum that this rank updates.
    own: Vec<Range<usize>>,
}

impl SumStore {
    /// Sums for the gradients of `params`, where their store says.
    ///
    /// # Errors
    /// Memory or space that is missing, and files that cannot be written.
    pub fn new(params: &Parameters, mesh: &Mesh) -> Result<Self> {
        let (groups, device) = (params.groups(), mesh.world.device());
        let buckets = params.layout().of_gradients();
        let (own, lens): (Vec<Range<usize>>, Vec<usize>) = buckets
            .map(|bucket| groups.own_part_of_sum(bucket.len))
            .unzip();
        let kept = Kept {
            what: "the gradients",
            category: MemoryCategory::Gradients,
            items: lens.iter().map(|&len| vec![(len, DType::F32)]).collect(),
        };
        let place = (params.offload()).place_of_gradients(mesh.world.rank(), !device.is_cpu());
        let zeros = |index: usize| Ok(vec![FlatBuffer::zeros(lens[index], device)?.into_tensor()]);
        let (resident, meter) = (MemoryCategory::Gradients, params.meter());
        Ok(Self {
            column: Column::new(place, kept, resident, device, meter, zeros)?,
            is_divided: groups.shards_gradients(),
            own,
        })
    }

    /// A sum, to be written to: it stays here until it is put back or freed. What this step has not written may be what an earlier one left.
    pub fn get(&self, index: usize) -> Result<FlatBuffer> {
        flat(self.column.get(index)?)
    }

    /// A sum, to be read.
    pub fn read(&self, index: usize) -> Result<FlatBuffer> {
        flat(self.column.read(index)?)
    }

    /// The part of a sum that this rank updates.
    pub fn own_part(&self, index: usize, sum: FlatBuffer) -> Result<FlatBuffer> {
        sum.part(&self.own[index])
    }
}

fn flat(tensors: Vec<Tensor>) -> Result<FlatBuffer> {
    match tensors.into_iter().next() {
        Some(values) => FlatBuffer::new(values),
        None => bail!("a sum of gradients came without values"),
    }
}
