//! What a model asks for of one parameter: the same on every rank.

use std::collections::BTreeSet;

use candle_core::{DType, Result, bail};
use serde::{Deserialize, Serialize};

use super::param::{Asker, Param, asked_twice};
use super::weight_format::Form;
use crate::pipeline_layout::PipelineLayout;
use crate::placement::{Gradient, HeldRange, Indices, Partition, Placement};

/// A parameter of a model, wherever it lives: numbers and names, no values.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ParamSpec {
    /// Hugging Face name.
    pub name: String,
    /// Global shape.
    pub shape: Vec<usize>,
    /// Form in which ranks hold its values.
    pub(crate) form: Form,
    /// Type in the source checkpoint.
    #[serde(with = "dtype_name")]
    pub stored_dtype: DType,
    /// Whether it gets a gradient and an update.
    pub trainable: bool,
    /// Whether it is of a low-rank adapter.
    pub is_adapter: bool,
    /// Whether all layers that use it take it tile by tile.
    pub(crate) is_tiled: bool,
    /// Blocks whose linear layers multiply with it as it is held, rising.
    pub(crate) multiplied_by: Vec<usize>,
    /// Which tensor-parallel rank holds which part; `None`: every rank all of it.
    pub(crate) partition: Option<Partition>,
    /// What a rank's gradient is; of a part that of the part.
    pub(crate) gradient: Gradient,
    /// Blocks of the model that use it, rising.
    pub blocks: Vec<usize>,
    /// Ranks of the pipeline on which the program asked for it outside of blocks, rising.
    pub(crate) outside: Vec<usize>,
    /// Its distribution, if it is drawn at random.
    pub(crate) init: Option<String>,
    /// Who asked for it without saying that others do too; while that is found out.
    pub(super) asked_by: Option<Asker>,
}

impl ParamSpec {
    /// What the blocks of rank `pp_rank` of the pipeline have asked for.
    pub(super) fn of(
        param: &Param,
        pp_rank: usize,
        is_drawn: bool,
        layout: &PipelineLayout,
    ) -> Self {
        // What is asked for outside of blocks counts as block 0's, wherever that is.
        let mut stages = param
            .blocks
            .iter()
            .map(|&block| layout.stage_of_block(block));
        let is_outside = !param.is_of_blocks() || stages.all(|stage| stage.is_none());
        let blocks = param.blocks.iter().copied();
        let blocks: BTreeSet<usize> = blocks.filter(|block| !is_outside || *block > 0).collect();
        Self {
            name: param.name.clone(),
            shape: param.global_shape.dims().to_vec(),
            form: param.held_form(),
            stored_dtype: param.stored_dtype,
            trainable: param.trainable,
            is_adapter: param.is_adapter,
            is_tiled: param.is_tiled,
            multiplied_by: match param.packing {
                None => joined(&param.multiplied_by, &[]),
                Some(_) => Vec::new(),
            },
            partition: param.shard().map(|shard| shard.partition().clone()),
            gradient: match param.placement {
                Placement::Replicated(gradient) => gradient,
                Placement::Sharded(_) => Gradient::Partial,
            },
            blocks: blocks.into_iter().collect(),
            outside: is_outside.then_some(pp_rank).into_iter().collect(),
            init: is_drawn.then(|| format!("{:?}", param.init)),
            asked_by: param.asked_by,
        }
    }

    /// Number of values of the whole parameter.
    pub fn num_values(&self) -> usize {
        self.shape.iter().product()
    }

    /// What the form is called in which ranks hold its values: a type, or `q8_0` or `q4k`.
    pub fn form(&self) -> &'static str {
        self.form.name()
    }

    /// Bits that a value takes in that form.
    pub fn bits(&self) -> f64 {
        self.form.bits()
    }

    /// How it lies on tensor-parallel rank `tp_rank`.
    pub fn placement(&self, tp_rank: usize) -> Placement {
        match &self.partition {
            Some(partition) => partition.shard(tp_rank).into(),
            None => Placement::Replicated(self.gradient),
        }
    }

    /// Shape of the part that tensor-parallel rank `tp_rank` has.
    pub fn local_shape(&self, tp_rank: usize) -> Vec<usize> {
        let mut dims = self.shape.clone();
        if let Some(partition) = &self.partition {
            dims[partition.dim()] = partition.held(tp_rank).len();
        }
        dims
    }

    /// The dim along which parts lie; 0 if every rank holds all of it.
    pub(crate) fn dim(&self) -> usize {
        self.partition.as_ref().map_or(0, Partition::dim)
    }

    /// The stages with a block that uses it. What no block of a rank asked for counts as used by the rank's first stage.
    pub(crate) fn stages(&self, layout: &PipelineLayout) -> BTreeSet<usize> {
        let of_blocks = self.blocks.iter();
        let of_blocks = of_blocks.filter_map(|&block| layout.stage_of_block(block));
        let of_blocks = of_blocks.filter(|&stage| !self.outside.contains(&layout.rank_of(stage)));
        let firsts = self.outside.iter();
        let firsts = firsts.filter_map(|&rank| layout.stages_of(rank).next());
        of_blocks.chain(firsts).collect()
    }

    /// Indices of [`Self::dim`] in pieces that the same ones of `tp` ranks hold, rising. The first of these ranks owns the piece.
    pub(crate) fn pieces(&self, tp: usize) -> Vec<HeldRange> {
        match &self.partition {
            Some(partition) => partition.pieces(tp),
            None => {
                let range = 0..self.shape.first().copied().unwrap_or(1);
                let held = |range| HeldRange {
                    range,
                    ranks: (0..tp).collect(),
                };
                (!range.is_empty())
                    .then(|| held(range))
                    .into_iter()
                    .collect()
            }
        }
    }

    /// Indices of [`Self::dim`] that rank `tp_rank` of `tp` owns: of these ranks, each index has one owner.
    pub(crate) fn owned_by(&self, tp_rank: usize, tp: usize) -> Indices {
        let owned = self.pieces(tp).into_iter();
        let owned = owned.filter(|held| held.ranks[0] == tp_rank);
        owned.map(|held| held.range).collect()
    }

    /// Indices of [`Self::dim`] that several of `tp` ranks hold, rising.
    pub(crate) fn shared_ranges(&self, tp: usize) -> Vec<HeldRange> {
        let mut shared = self.pieces(tp);
        shared.retain(|held| held.ranks.len() > 1);
        shared
    }

    /// Adds what another rank of the pipeline says of it, which must be the same: this is what rank `first` says, the other what rank `second` does.
    pub(super) fn join(&mut self, other: Self, first: usize, second: usize) -> Result<()> {
        let name = &self.name;
        let differ = |what: &str, of_first: &str, of_second: &str, hint: &str| {
            bail!(
                "parameter {name} {what} {of_first} on rank {first} and {of_second} on rank {second}\nhint: {hint}"
            )
        };
        let ask_alike = "blocks that share a parameter ask for it alike on all stages";
        if self.shape != other.shape {
            let [one, two] = [&self.shape, &other.shape].map(|shape| format!("{shape:?}"));
            return differ("has shape", &one, &two, ask_alike);
        }
        if self.partition != other.partition || self.gradient != other.gradient {
            let [one, two] = [&*self, &other].map(Self::placement_in_words);
            return differ("is", &one, &two, ask_alike);
        }
        if self.trainable != other.trainable {
            let [one, two] = [self.trainable, other.trainable].map(|trainable| match trainable {
                true => "trainable",
                false => "frozen",
            });
            return differ("is", one, two, "freeze the same names on every rank");
        }
        if self.trainable && self.form != other.form {
            return differ("is asked for as", self.form(), other.form(), ask_alike);
        }
        if self.init != other.init {
            let [one, two] =
                [&self.init, &other.init].map(|init| init.as_deref().unwrap_or("a file"));
            let hint = "the blocks that share it would begin with different copies: ask for it with the same Init everywhere";
            return differ("gets its initial values from", one, two, hint);
        }
        if let (Some(first), Some(second)) = (self.asked_by, other.asked_by)
            && first != second
        {
            bail!("{}", asked_twice(name, first, second));
        }
        self.asked_by = self.asked_by.or(other.asked_by);
        // What is tied across stages lies in the same places on each.
        self.is_tiled &= other.is_tiled;
        self.multiplied_by = joined(&self.multiplied_by, &other.multiplied_by);
        self.blocks = joined(&self.blocks, &other.blocks);
        self.outside = joined(&self.outside, &other.outside);
        Ok(())
    }

    fn placement_in_words(&self) -> String {
        match &self.partition {
            None => format!("replicated with gradients that are {:?}", self.gradient),
            Some(partition) => format!("{partition:?}"),
        }
    }

    /// An error unless `tp` ranks hold all of it.
    pub(super) fn check(&self, tp: usize) -> Result<()> {
        match &self.partition {
            Some(partition) => partition.check(&self.name, tp),
            None => Ok(()),
        }
    }

    /// Everything that ranks must say alike of it.
    pub(super) fn in_words(&self) -> String {
        let Self {
            name: _,
            shape,
            form,
            stored_dtype,
            trainable,
            is_adapter,
            is_tiled,
            multiplied_by: _,
            partition: _,
            gradient: _,
            blocks,
            outside,
            init,
            asked_by: _,
        } = self;
        let mut words = format!("{shape:?} in {}", form.name());
        let mut add = |is_so: bool, what: &str| {
            if is_so {
                words += ", ";
                words += what;
            }
        };
        add(
            form.name() != stored_dtype.as_str(),
            &format!("stored as {}", stored_dtype.as_str()),
        );
        add(!trainable, "frozen");
        add(*is_adapter, "of an adapter");
        add(*is_tiled, "used by tiles");
        add(true, &self.placement_in_words());
        add(!blocks.is_empty(), &format!("of blocks {blocks:?}"));
        add(
            !outside.is_empty(),
            &format!("asked for outside of blocks on pipeline ranks {outside:?}"),
        );
        add(init.is_some(), init.as_deref().unwrap_or_default());
        words
    }
}

/// What one or both have, rising.
fn joined(one: &[usize], other: &[usize]) -> Vec<usize> {
    let all: BTreeSet<usize> = one.iter().chain(other).copied().collect();
    all.into_iter().collect()
}

/// Types by their names.
mod dtype_name {
    use candle_core::DType;
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};

    pub fn serialize<S: Serializer>(dtype: &DType, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(dtype.as_str())
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<DType, D::Error> {
        let name = String::deserialize(from)?;
        name.parse()
            .map_err(|_| D::Error::custom(format!("{name} is no type")))
    }
}
