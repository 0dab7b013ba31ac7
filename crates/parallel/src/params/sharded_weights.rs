//! Weights of which each data-parallel rank keeps a slice (ZeRO-3, arXiv:1910.02054, section 5.3), on its device or away from it
//! (arXiv:2104.07857): fetched and gathered for the pass of a block, behind the tensors that its layers hold, and freed after.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use candle_comm::{Pending, ProcessGroup};
use candle_core::{DType, Error, Result, Tensor, bail};
use candle_ops::{QuantizedType, quantize_rows};

use super::layout::{Bucket, ParamLayout, Sharing, Slot};
use super::param::Param;
use super::replica_groups::ReplicaGroups;
use super::slices::{GatheredRange, no_values, start_gather_range, unpacked};
use crate::memory::{MemoryCategory, MemoryGuard, MemoryMeter, num_bytes};
use crate::offload::{Column, Fetched, Kept, OffloadPlace, OffloadStore};
use crate::placement::{intersect, offset_by, part};

/// The slices of a rank, and what is gathered of the others'.
pub(crate) struct ShardedWeights {
    shard: ProcessGroup,
    /// The same ranks, for what is not to wait until sums of gradients are over.
    tiles: ProcessGroup,
    /// Of these ranks those that divide a second copy, if there is one.
    secondary: Option<ProcessGroup>,
    overlap: bool,
    /// In the order of [`ParamLayout::all`].
    buckets: Vec<ShardedBucket>,
    /// An item for each bucket.
    pub slices: Column,
    /// Weights that come tile by tile, by name.
    tiled: BTreeMap<String, Tiled>,
}

/// A weight that comes tile by tile.
struct Tiled {
    bucket: usize,
    tiles: Vec<WeightTile>,
}

struct WeightTile {
    rows: Range<usize>,
    /// Its values in the bucket.
    values: Range<usize>,
    /// Where this rank's part of them is, if slices are not on the device; `None` if it has none.
    away: Option<usize>,
}

struct ShardedBucket {
    /// The slices of all ranks in the bucket.
    slices: Vec<Range<usize>>,
    params: Vec<(Param, Slot)>,
    state: Mutex<Residence>,
    /// This rank's part of the second copy, from the first time that the bucket is gathered to the next update, or the next call of passes.
    copy: Mutex<Option<(Tensor, MemoryGuard)>>,
    /// Whether its weights are gathered in 8 bits.
    is_quantized: bool,
    dtype: DType,
    meter: MemoryMeter,
}

/// A buffer becomes the storage of its first parameter if the others are at most one part in so many of it: they exist twice then.
const ADOPTED: usize = 16;

/// Whether the first parameter of a bucket takes the buffer over, if the others have so many bytes.
pub(crate) fn is_adopted(others: usize, whole: usize) -> bool {
    ADOPTED * others <= whole
}

/// Where a bucket's whole weights are.
enum Residence {
    Absent,
    Gathering(Pending<Tensor>, MemoryGuard),
    Present(MemoryGuard),
}

impl ShardedWeights {
    /// Slices of `params`, whose initial values `values` gives, in their local shape and type; only one parameter's exist at a time. They
    /// are kept at `place`.
    pub fn new(
        params: &[Param],
        layout: &ParamLayout,
        groups: &ReplicaGroups,
        (place, meter): (OffloadPlace<'_>, &MemoryMeter),
        values: impl Fn(&Param) -> Result<Tensor>,
    ) -> Result<Self> {
        let all: Vec<&Bucket> = layout.all().collect();
        let device = groups.shard.device();
        let slice = |bucket: &Bucket| {
            let own = groups.own_range(bucket.len);
            let slice = Tensor::zeros(own.len(), bucket.dtype, device)?;
            for (slot, mine) in bucket.slots_in(&own) {
                let values = values(&params[slot.param])?.flatten_all()?;
                let values = values.narrow(0, mine.start - slot.range.start, mine.len())?;
                slice.slice_set(&values, 0, mine.start - own.start)?;
            }
            Ok::<_, Error>(slice)
        };
        let items = all.iter();
        let items = items.map(|bucket| vec![(groups.own_range(bucket.len).len(), bucket.dtype)]);
        let kept = Kept {
            what: "the weights",
            category: MemoryCategory::Gathered,
            items: items.collect(),
        };
        let resident = MemoryCategory::Weights;
        let slices = Column::new(place, kept, resident, device, meter, |index| {
            Ok(vec![slice(all[index])?])
        })?;
        let sharded = |bucket: &&Bucket| {
            let slots = bucket.slots.iter().cloned();
            let of_slot = |slot: Slot| (params[slot.param].clone(), slot);
            let moves = groups.shard.world_size() > 1 && groups.config.quantize_weights;
            ShardedBucket {
                is_quantized: moves && bucket.sharing == Sharing::None && bucket.dtype != DType::U8,
                dtype: bucket.dtype,
                meter: meter.clone(),
                slices: groups.slices(bucket.len),
                params: slots.map(of_slot).collect(),
                state: Mutex::new(Residence::Absent),
                copy: Mutex::new(None),
            }
        };
        let mut tiled = BTreeMap::new();
        for (index, bucket) in all.iter().enumerate() {
            for slot in bucket.slots.iter().filter(|_| bucket.is_tiled) {
                let param = &params[slot.param];
                let num_rows = param.local_shape().dims().first().copied().unwrap_or(1);
                let num_tiles = groups.config.tile_linears.min(num_rows).max(1);
                let width = slot.range.len() / num_rows.max(1);
                let own = groups.own_range(bucket.len);
                let tile = |tile| {
                    let rows = part(num_rows, tile, num_tiles);
                    let start = slot.range.start;
                    let values = start + rows.start * width..start + rows.end * width;
                    let mine = intersect(&values, &own);
                    let away = slices.away().filter(|_| !mine.is_empty());
                    WeightTile {
                        away: away.map(|away| away.view(index, offset_by(&mine, own.start))),
                        rows,
                        values,
                    }
                };
                let tiles = (0..num_tiles).map(tile).collect();
                let bucket = index;
                tiled.insert(param.name.clone(), Tiled { bucket, tiles });
            }
        }
        Ok(Self {
            shard: groups.shard.clone(),
            tiles: groups.tiles.clone(),
            secondary: groups.secondary.clone(),
            overlap: groups.config.overlap,
            tiled,
            buckets: all.iter().map(sharded).collect(),
            slices,
        })
    }

    /// This rank's slice of a bucket. What is written to it is lost if it is not on the device, but in [`Self::change`] and an update.
    pub fn slice(&self, bucket: usize) -> Result<Tensor> {
        one_of(self.slices.read(bucket)?)
    }

    /// Lets `change` write to what [`Self::slice`] gives of a bucket.
    pub fn change<T>(&self, bucket: usize, change: impl FnOnce() -> Result<T>) -> Result<T> {
        // Nothing that was kept before may be taken for changed.
        *lock(&self.buckets[bucket].copy) = None;
        self.slices.get(bucket)?;
        match change() {
            Ok(changed) => {
                self.slices.put(bucket)?;
                self.slices.flush()?;
                Ok(changed)
            }
            Err(err) => {
                self.slices.free(bucket)?;
                Err(err)
            }
        }
    }

    /// Whether weight `name` comes tile by tile.
    pub fn is_tiled(&self, name: &str) -> bool {
        self.tiled.contains_key(name)
    }

    /// The rows of each tile of a weight that comes by them.
    pub fn tiles(&self, name: &str) -> impl ExactSizeIterator<Item = Range<usize>> + '_ {
        let tiles = self.tiled.get(name).map_or(&[][..], |tiled| &tiled.tiles);
        tiles.iter().map(|tile| tile.rows.clone())
    }

    /// Whether a tile is to be started while the one before it is used.
    pub fn prefetches(&self) -> bool {
        self.overlap
    }

    /// Starts to fetch and to gather a tile of a weight that comes by them. All ranks of the shard group must call it.
    pub(super) fn start_tile(&self, name: &str, tile: usize) -> Result<ComingTile<'_>> {
        let Some(tiled) = self.tiled.get(name) else {
            bail!("parameter {name} does not come tile by tile");
        };
        let (bucket, tile) = (&self.buckets[tiled.bucket], &tiled.tiles[tile]);
        let own_slice = &bucket.slices[self.shard.rank()];
        let (own, own_start) = match (self.slices.away(), tile.away) {
            (None, _) => (self.slice(tiled.bucket)?, own_slice.start),
            (Some(_), None) => (
                no_values(bucket.dtype, self.shard.device())?,
                own_slice.start,
            ),
            (Some(away), Some(item)) => {
                away.start_fetch(item)?;
                if self.shard.world_size() == 1 {
                    return Ok(ComingTile::Fetched(away, item));
                }
                let own_start = intersect(&tile.values, own_slice).start;
                (one_of(away.fetch(item)?.tensors)?, own_start)
            }
        };
        let values = start_gather_range(
            &tile.values,
            &bucket.slices,
            (&own, own_start),
            &self.tiles,
            bucket.is_quantized,
        )?;
        // What was fetched is there until it is sent.
        let fetched = self.slices.away().map_or(0, |_| num_bytes(&own));
        let bytes = values.num_bytes() + fetched;
        Ok(ComingTile::Gathered {
            on_the_way: bucket.meter.hold(MemoryCategory::Gathered, bytes),
            meter: bucket.meter.clone(),
            values,
        })
    }

    /// Starts to gather a bucket, from the slices or from the second copy. All ranks that divide that must call it.
    pub fn gather(&self, index: usize, from_copy: bool) -> Result<()> {
        let bucket = &self.buckets[index];
        let copy = lock(&bucket.copy);
        *lock(&bucket.state) = match (copy.as_ref().zip(self.secondary.as_ref()), from_copy) {
            // It is of what may have moved in 8 bits before.
            (Some(((copy, _), secondary)), true) => bucket.start_gather(copy, secondary, false)?,
            (None, true) => {
                bail!("this rank has no part of a second copy of bucket {index} of weights")
            }
            (_, false) => {
                let slice = one_of(self.slices.get(index)?)?;
                let gathering = bucket.start_gather(&slice, &self.shard, bucket.is_quantized)?;
                self.slices.free(index)?;
                gathering
            }
        };
        Ok(())
    }

    /// Puts the weights of a bucket in their places: those that are being gathered, or the slice, if that is all.
    pub fn arrive(&self, index: usize, keeps_copy: bool) -> Result<()> {
        let bucket = &self.buckets[index];
        let mut state = lock(&bucket.state);
        *state = match std::mem::replace(&mut *state, Residence::Absent) {
            Residence::Gathering(whole, on_the_way) => {
                let own = bucket.slices[self.shard.rank()].len();
                let whole = unpacked(whole.wait()?, own, bucket.dtype)?;
                if let Some(secondary) = self.secondary.as_ref().filter(|_| keeps_copy) {
                    bucket.keep_copy(&whole, secondary)?;
                }
                Residence::Present(bucket.distribute(whole, on_the_way)?)
            }
            Residence::Absent => {
                let Fetched { tensors, held } = self.slices.take(index)?;
                Residence::Present(bucket.distribute(one_of(tensors)?, held)?)
            }
            present @ Residence::Present(_) => present,
        };
        Ok(())
    }

    /// Frees the weights of a bucket but for the slice.
    pub fn free(&self, index: usize) -> Result<()> {
        let bucket = &self.buckets[index];
        match std::mem::replace(&mut *lock(&bucket.state), Residence::Absent) {
            Residence::Absent => self.slices.free(index),
            // Of passes that failed.
            Residence::Gathering(whole, _held) => whole.wait().map(drop),
            Residence::Present(_held) => bucket
                .params
                .iter()
                .try_for_each(|(param, _)| param.release()),
        }
    }

    /// Frees all weights but the slices.
    pub fn free_all(&self) -> Result<()> {
        for (index, bucket) in self.buckets.iter().enumerate() {
            self.free(index)?;
            *lock(&bucket.copy) = None;
        }
        Ok(())
    }

    /// Buckets of which this rank has its part of a second copy.
    pub fn copies(&self) -> Vec<bool> {
        let buckets = self.buckets.iter();
        buckets.map(|bucket| lock(&bucket.copy).is_some()).collect()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The slice that is an item.
fn one_of(tensors: Vec<Tensor>) -> Result<Tensor> {
    match tensors.as_slice() {
        [slice] => Ok(slice.clone()),
        tensors => bail!("a slice of weights came as {} tensors", tensors.len()),
    }
}

/// Rows of a weight on their way.
pub(super) enum ComingTile<'a> {
    /// The item of this store.
    Fetched(&'a OffloadStore, usize),
    Gathered {
        values: GatheredRange,
        on_the_way: MemoryGuard,
        meter: MemoryMeter,
    },
}

impl ComingTile<'_> {
    /// The values, flat, which count as held.
    pub fn wait(self) -> Result<(Tensor, MemoryGuard)> {
        match self {
            Self::Fetched(away, item) => {
                let Fetched { tensors, held } = away.fetch(item)?;
                Ok((one_of(tensors)?, held))
            }
            Self::Gathered {
                values,
                on_the_way,
                meter,
            } => {
                // Pieces of several ranks exist a second time while they are joined.
                let joined = match values.num_pieces() {
                    0 | 1 => 0,
                    _ => values.num_value_bytes(),
                };
                let _joined = meter.hold(MemoryCategory::Gathered, joined);
                let values = values.wait()?;
                drop(on_the_way);
                let bytes = num_bytes(&values);
                Ok((values, meter.hold(MemoryCategory::Gathered, bytes)))
            }
        }
    }
}

impl ShardedBucket {
    /// Starts to gather the bucket from the ranks of a group that divide it evenly, of which this rank's part is `part`.
    fn start_gather(
        &self,
        part: &Tensor,
        group: &ProcessGroup,
        is_quantized: bool,
    ) -> Result<Residence> {
        let sent = match is_quantized {
            true => quantize_rows(part, QuantizedType::Int8)?,
            false => part.clone(),
        };
        // What is sent is a copy if it is in 8 bits.
        let copies = group.world_size() + usize::from(is_quantized);
        let bytes = num_bytes(&sent) * copies;
        let held = self.meter.hold(MemoryCategory::Gathered, bytes);
        Ok(Residence::Gathering(group.start_all_gather(&sent)?, held))
    }

    /// Keeps this rank's part of the second copy.
    fn keep_copy(&self, whole: &Tensor, secondary: &ProcessGroup) -> Result<()> {
        let len = whole.elem_count() / secondary.world_size();
        let part = whole.narrow(0, len * secondary.rank(), len)?;
        let part = part.force_contiguous()?;
        let held = (self.meter).hold(MemoryCategory::Gathered, num_bytes(&part));
        *lock(&self.copy) = Some((part, held));
        Ok(())
    }

    /// Gives the parameters their values, `whole`, which came as `on_the_way`, the first in the bucket first; what they hold then.
    fn distribute(&self, whole: Tensor, on_the_way: MemoryGuard) -> Result<MemoryGuard> {
        drop(on_the_way);
        let hold = |bytes| self.meter.hold(MemoryCategory::Gathered, bytes);
        let whole_bytes = num_bytes(&whole);
        let values_of = |param: &Param, slot: &Slot| {
            let values = whole.narrow(0, slot.range.start, slot.range.len())?;
            values.reshape(param.local_shape())
        };
        let bytes_of = |params: &[(Param, Slot)]| -> usize {
            params.iter().map(|(param, _)| param.num_bytes()).sum()
        };
        // A parameter that is nearly all of its bucket, as an embedding, takes the buffer over.
        let (adopting, copied) = match self.params.split_first() {
            Some((first, others)) if is_adopted(bytes_of(others), whole_bytes) => {
                (Some(first), others)
            }
            _ => (None, self.params.as_slice()),
        };
        let (buffer, copies) = (hold(whole_bytes), hold(bytes_of(copied)));
        for (param, slot) in copied {
            param.refill(&values_of(param, slot)?)?;
        }
        let Some((param, slot)) = adopting else {
            return Ok(copies);
        };
        param.adopt(&values_of(param, slot)?)?;
        drop((buffer, copies));
        Ok(hold(whole_bytes + bytes_of(copied)))
    }
}
