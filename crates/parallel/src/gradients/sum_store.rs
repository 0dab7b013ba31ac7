//! The sums of a step's gradients, wherever they are.

use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use candle_comm::Mesh;
use candle_core::{DType, Device, Result, bail};

use crate::memory::{MemoryCategory, MemoryMeter};
use crate::offload::{Fetched, Kept, OffloadStore};
use crate::params::{FlatBuffer, Parameters};

/// A sum of f32 for each bucket of gradients: of the whole bucket, or of this rank's slice if replicas divide the gradients.
pub(super) struct SumStore {
    /// Of each bucket, how long the sum is, and what of it this rank updates.
    lens: Vec<(usize, Range<usize>)>,
    /// Of each bucket the block that is the last to add to it.
    blocks: Vec<usize>,
    place: SumsPlace,
    /// What was put back and is not away yet, as the next micro-batch of the same block may add to it.
    idle: Mutex<Vec<(usize, FlatBuffer)>>,
    device: Device,
    meter: MemoryMeter,
}

enum SumsPlace {
    Resident(Vec<FlatBuffer>),
    Away(Box<OffloadStore>),
}

impl SumStore {
    /// Sums for the gradients of `params`, where their store says.
    ///
    /// # Errors
    /// Memory or space that is missing, and files that cannot be written.
    pub fn new(params: &Parameters, mesh: &Mesh) -> Result<Self> {
        let (groups, device) = (params.groups(), mesh.world.device());
        let lens = params.layout().of_gradients().map(|bucket| {
            let own = groups.own_range(bucket.len);
            match groups.shards_gradients() {
                true => (own.len(), 0..own.len()),
                false => (bucket.len, own),
            }
        });
        let lens: Vec<(usize, Range<usize>)> = lens.collect();
        let place = (params.offload()).place_of_gradients(mesh.world.rank(), !device.is_cpu());
        let kept = Kept {
            what: "the gradients",
            category: MemoryCategory::Gradients,
            items: lens
                .iter()
                .map(|(len, _)| vec![(*len, DType::F32)])
                .collect(),
        };
        let zeros = |len| FlatBuffer::zeros(len, device);
        let away = OffloadStore::new(place, kept, device, params.meter(), |index| {
            Ok(vec![zeros(lens[index].0)?.into_tensor()])
        })?;
        let counted = |(len, _): &(usize, Range<usize>)| {
            Ok(zeros(*len)?.counted(params.meter(), MemoryCategory::Gradients))
        };
        Ok(Self {
            place: match away {
                Some(store) => SumsPlace::Away(Box::new(store)),
                None => SumsPlace::Resident(lens.iter().map(counted).collect::<Result<_>>()?),
            },
            blocks: params.layout().of_gradients().map(|of| of.block).collect(),
            idle: Mutex::new(Vec::new()),
            lens,
            device: device.clone(),
            meter: params.meter().clone(),
        })
    }

    /// Whether sums are on the device only while they are used.
    pub fn is_away(&self) -> bool {
        matches!(self.place, SumsPlace::Away(_))
    }

    fn idle(&self) -> MutexGuard<'_, Vec<(usize, FlatBuffer)>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A sum that is to be written to, and if it may be away to be [put](Self::put) back; what was put back of other blocks goes. Unless it `has_values` of this step, nothing is read for
    /// it: what is here has what was left in it, and of what is away zeros are made.
    pub fn take(&self, index: usize, has_values: bool) -> Result<FlatBuffer> {
        let mut idle = self.idle();
        if let Some(place) = idle.iter().position(|(of, _)| *of == index) {
            return Ok(idle.swap_remove(place).1);
        }
        let goes = |(of, _): &mut (usize, FlatBuffer)| self.blocks[*of] != self.blocks[index];
        let going: Vec<_> = idle.extract_if(.., goes).collect();
        drop(idle);
        (going.into_iter()).try_for_each(|(of, sum)| self.store(of, sum))?;
        match &self.place {
            SumsPlace::Resident(sums) => Ok(sums[index].clone()),
            SumsPlace::Away(_) if !has_values => {
                let zeros = FlatBuffer::zeros(self.lens[index].0, &self.device)?;
                Ok(zeros.counted(&self.meter, MemoryCategory::Gradients))
            }
            SumsPlace::Away(store) => {
                let Fetched { tensors, held } = store.fetch(index)?;
                match tensors.into_iter().next() {
                    Some(values) => Ok(FlatBuffer::fetched(values, held)),
                    None => bail!("bucket {index} of gradients came without values"),
                }
            }
        }
    }

    /// Takes a sum back, of which no other part is used any more.
    pub fn put(&self, index: usize, sum: FlatBuffer) {
        if self.is_away() {
            self.idle().push((index, sum));
        }
    }

    fn store(&self, index: usize, sum: FlatBuffer) -> Result<()> {
        let SumsPlace::Away(store) = &self.place else {
            return Ok(());
        };
        let num_bytes = sum.num_bytes();
        let tensors = vec![sum.into_tensor()];
        let held = self.meter.hold(MemoryCategory::Gradients, num_bytes);
        store.store(index, Fetched { tensors, held })
    }

    /// Forgets what was put back.
    pub fn clear(&self) {
        self.idle().clear();
    }

    /// Has all that was put back go, and waits until it is written, if it is in a file.
    pub fn finish(&self) -> Result<()> {
        let going = std::mem::take(&mut *self.idle());
        (going.into_iter()).try_for_each(|(of, sum)| self.store(of, sum))?;
        match &self.place {
            SumsPlace::Resident(_) => Ok(()),
            SumsPlace::Away(store) => store.finish(),
        }
    }

    /// Starts to fetch a sum that [`Self::own`] is to give.
    pub fn start_fetch(&self, index: usize) -> Result<()> {
        match &self.place {
            SumsPlace::Resident(_) => Ok(()),
            SumsPlace::Away(store) => store.start_fetch(index),
        }
    }

    /// What this rank updates of a bucket.
    pub fn own(&self, index: usize) -> Result<FlatBuffer> {
        self.take(index, true)?.part(&self.lens[index].1)
    }
}
