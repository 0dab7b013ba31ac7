//! Where each parameter lies in the flat buffers that gradients, their reduction, the optimizer's state and slices of weights share.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use candle_core::DType;

use super::rank_spec::HeldParam;
use super::tie::TieSpec;
use crate::placement::intersect;

/// Values to whose multiples each data-parallel rank's slice of a bucket is padded: 256 bytes of f32, on which kernels and
/// copies of a GPU start best.
pub(crate) const SLICE_ALIGNMENT: usize = 64;

/// Buckets of parameters that are reduced, updated and gathered together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ParamLayout {
    /// Those of trainable parameters, in the order in which a backward pass is done with them: those of one block each, the last
    /// block first, then those of parameters tied across pipeline stages.
    pub buckets: Vec<Bucket>,
    /// Those of frozen parameters, whose slices lie like those of the others: one of each block, the last block first.
    pub frozen: Vec<Bucket>,
    /// Of tied parameters that several stages of this rank use, the buckets of gradients of the stages after the first one.
    more: Vec<MoreGradients>,
    /// Of each parameter, the bucket and the place of its first value there; `None` for frozen ones.
    places: Vec<Option<(usize, usize)>>,
}

/// Where the gradients lie that another stage of this rank gives to the parameters of a bucket.
#[derive(Clone, Debug, PartialEq, Eq)]
struct MoreGradients {
    /// Index of the bucket whose parameters they are of.
    of: usize,
    stage: usize,
    bucket: Bucket,
}

/// Parameters that lie one after the other in a flat buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Bucket {
    /// The first block that uses one of its parameters. Its backward pass is the last to add to their gradients.
    pub block: usize,
    /// All blocks of this rank that use one of them, in rising order.
    pub blocks: Vec<usize>,
    /// The tie between stages that all of its parameters have, by its index. Tied parameters have buckets of their own, of one
    /// length on all their stages: so whatever order a reduction sums in, it is the same for every copy.
    pub tie: Option<usize>,
    /// Number of values, padded so that the ranks that divide it have even slices.
    pub len: usize,
    /// The one type of its parameters.
    pub dtype: DType,
    /// Whether its weights, if replicas divide them, are gathered tile by tile, and not with their block.
    pub is_tiled: bool,
    /// Which of its values other tensor-parallel ranks hold, too.
    pub sharing: Sharing,
    /// Its parameters, the one with the largest global shape first, equal ones in name order: the same order on every rank.
    pub slots: Vec<Slot>,
}

/// Which values of a parameter several tensor-parallel ranks hold.
///
/// Parameters that differ in this have buckets of their own. So copies lie at the same places on every rank, however unevenly the
/// ranks divide the rest, and a reduction over replicas, whose order may depend on the place, gives each copy the same bits. And as
/// blocks of quantized values share a scale with what lies beside them, values that are held twice are never quantized.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Sharing {
    // The smallest buckets come first: while the last one of a block is summed the passes of the next one run.
    /// All: every rank holds a copy.
    Copies,
    /// Some: the parts that ranks hold overlap.
    Overlapping,
    /// None: each has one holder.
    None,
}

/// The place of a parameter in its bucket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Slot {
    /// Index of the parameter.
    pub param: usize,
    /// Its values in the bucket.
    pub range: Range<usize>,
}

/// What the parameters of a bucket have in common; buckets are in this order.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    tie: Option<usize>,
    /// Of those that are not tied.
    block: Option<Reverse<usize>>,
    dtype: &'static str,
    is_tiled: bool,
    sharing: Sharing,
}

impl Bucket {
    /// The parameters with values in `part` of the bucket, each with the places of these.
    pub fn slots_in(&self, part: &Range<usize>) -> impl Iterator<Item = (&Slot, Range<usize>)> {
        let slots = self.slots.iter();
        let in_part = slots.map(|slot| (slot, intersect(&slot.range, part)));
        in_part.filter(|(_, mine)| !mine.is_empty())
    }

    /// Bytes of its weights.
    pub fn num_bytes(&self) -> usize {
        self.len * self.dtype.size_in_bytes()
    }
}

impl ParamLayout {
    /// Buckets of these parameters of a rank, whose lengths `num_slices` ranks divide. Each parameter of those that may move in 8
    /// or 4 bits begins at a multiple of `slot_alignment` values.
    pub fn new(
        params: &[HeldParam],
        ties: &[TieSpec],
        num_slices: usize,
        slot_alignment: usize,
    ) -> Self {
        let (trainable, frozen): (Vec<usize>, Vec<usize>) =
            (0..params.len()).partition(|&index| params[index].trainable);
        let buckets_of =
            |members: &[usize]| buckets(params, members, ties, num_slices, slot_alignment);
        let mut buckets = buckets_of(&trainable);
        let more = split_stages(&mut buckets, ties);
        let mut places = vec![None; params.len()];
        for (index, bucket) in buckets.iter().enumerate() {
            for slot in &bucket.slots {
                places[slot.param] = Some((index, slot.range.start));
            }
        }
        Self {
            buckets,
            frozen: buckets_of(&frozen),
            more,
            places,
        }
    }

    /// The bucket of parameter `index` and the place of its first value there; `None` if it is frozen.
    pub fn place(&self, index: usize) -> Option<(usize, usize)> {
        self.places[index]
    }

    /// How many buckets of gradients there are: those of trainable parameters, which come first, and more of tied ones.
    pub fn num_gradient_buckets(&self) -> usize {
        self.buckets.len() + self.more.len()
    }

    /// A bucket of gradients.
    pub fn gradient_bucket(&self, index: usize) -> &Bucket {
        match index.checked_sub(self.buckets.len()) {
            None => &self.buckets[index],
            Some(index) => &self.more[index].bucket,
        }
    }

    /// All buckets of gradients.
    pub fn of_gradients(&self) -> impl Iterator<Item = &Bucket> {
        (0..self.num_gradient_buckets()).map(|index| self.gradient_bucket(index))
    }

    /// The bucket of the gradients that a stage of this rank gives to the parameters of a bucket.
    pub fn of_stage(&self, bucket: usize, stage: Option<usize>) -> usize {
        let mut more = self.more.iter();
        let place = more.position(|more| more.of == bucket && Some(more.stage) == stage);
        place.map_or(bucket, |place| self.buckets.len() + place)
    }

    /// The bucket of the parameters whose gradients a bucket holds.
    pub fn bucket_of_sum(&self, index: usize) -> usize {
        let more = index.checked_sub(self.buckets.len());
        more.map_or(index, |place| self.more[place].of)
    }

    /// The buckets of gradients of the parameters of a bucket, one for each stage of this rank that uses them, in the order of stages.
    pub fn stages_of(&self, bucket: usize) -> impl Iterator<Item = usize> + '_ {
        let own = (bucket < self.buckets.len()).then_some(bucket);
        let more = self.more.iter().enumerate();
        let more = more.filter(move |(_, more)| more.of == bucket);
        own.into_iter()
            .chain(more.map(|(place, _)| self.buckets.len() + place))
    }

    /// The buckets of trainable parameters, then those of frozen ones.
    pub fn all(&self) -> impl Iterator<Item = &Bucket> {
        self.buckets.iter().chain(&self.frozen)
    }

    /// One of [`Self::all`].
    pub fn bucket(&self, index: usize) -> &Bucket {
        match index.checked_sub(self.buckets.len()) {
            None => &self.buckets[index],
            Some(frozen) => &self.frozen[frozen],
        }
    }

    /// Of parameter `index`, the bucket's place in [`Self::all`], the bucket, and the slot.
    pub fn slot(&self, index: usize) -> Option<(usize, &Bucket, &Slot)> {
        self.all().enumerate().find_map(|(place, bucket)| {
            let slot = bucket.slots.iter().find(|slot| slot.param == index)?;
            Some((place, bucket, slot))
        })
    }

    /// Buckets in the order in which a forward pass needs their parameters.
    pub fn in_forward_order(&self) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.buckets.len()).collect();
        order.sort_by_key(|&index| self.buckets[index].block);
        order
    }
}

/// Leaves to the buckets of tied parameters the blocks of the first stage of this rank that uses them, and gives the buckets of the others.
fn split_stages(buckets: &mut [Bucket], ties: &[TieSpec]) -> Vec<MoreGradients> {
    let mut more = Vec::new();
    for (of, bucket) in buckets.iter_mut().enumerate() {
        let Some(tie) = bucket.tie.map(|tie| &ties[tie]) else {
            continue;
        };
        let all = std::mem::take(&mut bucket.blocks);
        for (place, (stage, blocks)) in tie.own_stages.iter().enumerate() {
            let own: Vec<usize> = all.iter().copied().filter(|b| blocks.contains(b)).collect();
            match place {
                0 => bucket.blocks = own,
                _ => more.push(MoreGradients {
                    of,
                    stage: *stage,
                    bucket: Bucket {
                        blocks: own,
                        ..bucket.clone()
                    },
                }),
            }
        }
    }
    more
}

/// The buckets of some parameters, given by their indices.
fn buckets(
    params: &[HeldParam],
    members: &[usize],
    ties: &[TieSpec],
    num_slices: usize,
    slot_alignment: usize,
) -> Vec<Bucket> {
    let mut by_key: BTreeMap<Key, Vec<usize>> = BTreeMap::new();
    for &index in members {
        let param = &params[index];
        let tie = ties.iter().position(|tie| tie.params.contains(&index));
        let first_block = param.blocks.first().copied().unwrap_or(0);
        let key = Key {
            tie,
            block: tie.is_none().then_some(Reverse(first_block)),
            dtype: param.dtype.as_str(),
            is_tiled: param.is_tiled,
            sharing: param.sharing(),
        };
        by_key.entry(key).or_default().push(index);
    }
    let bucket = |(key, mut members): (Key, Vec<usize>)| {
        // Copies and bytes never move in fewer bits.
        let is_quantized = key.sharing == Sharing::None && key.dtype != DType::U8.as_str();
        let slot_alignment = if is_quantized { slot_alignment } else { 1 };
        let mut len = 0usize;
        members.sort_by_key(|&index| Reverse(params[index].num_global_values));
        let dtype = members.first().map(|&index| params[index].dtype);
        let slots = members.into_iter().map(|param| {
            let start = len.next_multiple_of(slot_alignment);
            len = start + params[param].num_values;
            let range = start..len;
            Slot { param, range }
        });
        let slots: Vec<Slot> = slots.collect();
        let blocks = slots.iter().flat_map(|slot| &params[slot.param].blocks);
        let blocks: BTreeSet<usize> = blocks.copied().collect();
        Bucket {
            block: blocks.first().copied().unwrap_or(0),
            blocks: blocks.into_iter().collect(),
            tie: key.tie,
            len: len.next_multiple_of(SLICE_ALIGNMENT.max(slot_alignment) * num_slices),
            dtype: dtype.unwrap_or(DType::F32),
            is_tiled: key.is_tiled,
            sharing: key.sharing,
            slots,
        }
    };
    by_key.into_iter().map(bucket).collect()
}

#[cfg(test)]
mod tests {
    use candle_comm::{Degrees, Mesh, launch};
    use candle_core::Device;
    use candle_nn::Init;

    use super::*;
    use crate::{Gradient, ParamStore, PipelineLayout, Placement, Shard};

    /// Of 14 heads and three ranks, two have five and one four: a norm behind them lies at another place on each rank, unless it has a
    /// bucket of its own.
    #[test]
    fn copies_lie_at_the_same_places_on_ranks_with_uneven_parts() -> candle_core::Result<()> {
        let degrees = Degrees {
            pp: 1,
            dp: 1,
            cp: 1,
            tp: 3,
        };
        let places = launch::threads(3, |world| {
            let mesh = Mesh::new(world, degrees)?;
            let store = ParamStore::init(0);
            let vb = store.builder(DType::F32, &Device::Cpu);
            let heads = Shard::even(0, 14, &mesh.tp)?;
            vb.get_placed((14, 4), "heads", heads, Init::Const(1.0))?;
            let partial = Placement::Replicated(Gradient::Partial);
            vb.get_placed(3, "inner", partial, Init::Const(1.0))?;
            vb.get(5, "norm", Init::Const(1.0))?;
            let layout = PipelineLayout::even(1, 1)?;
            let params = store.seal(&mesh, Default::default(), &layout)?;
            let index = |name: &str| params.iter().position(|param| param.name == name);
            let place = |name: &str| params.layout().place(index(name)?);
            let sharing = params.layout().buckets.iter().map(|bucket| bucket.sharing);
            let sharing: Vec<_> = sharing.collect();
            let heads = params.get(index("heads").unwrap_or_default()).num_values();
            let len = params.layout().buckets[0].len;
            Ok((place("inner"), place("norm"), sharing, len, heads))
        })?;
        let expected = [Sharing::Copies, Sharing::None];
        for (inner, norm, sharing, copies, _) in &places {
            assert_eq!((*inner, *norm), (Some((0, 5)), Some((0, 0))));
            assert_eq!(sharing, &expected);
            assert_eq!(*copies, SLICE_ALIGNMENT);
        }
        assert_ne!(places[0].4, places[1].4, "these parts are even");
        Ok(())
    }
}
