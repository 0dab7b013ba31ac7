//! What a model asks for: every parameter of every block, by arithmetic. It is the same on every rank, and what any rank holds, owns, shares and
//! ties follows from it.
//!
//! A model of blocks that can be built anywhere is [described](ModelSpec::describe) on one rank. While a model is built, a rank asks for what
//! its own stages need, and the ranks of a pipeline tell each other, so that each has the whole: the function that builds a block
//! is not called for the blocks of other ranks, since it may keep a tensor of one block for another one, or read values. Tensor-parallel
//! ranks and replicas ask for the same, which one hash shows.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use candle_comm::{Degrees, Mesh};
use candle_core::{Error, Result};

use super::layout::ParamLayout;
use super::param_spec::ParamSpec;
use super::rank_spec::{HeldParam, RankSpec};
use super::tie::TieSpec;
use crate::agreement::Facts;
use crate::pass::Tape;
use crate::pipeline_layout::PipelineLayout;

/// Every parameter of a model, in name order, and how the model is divided: numbers and names, the same on every rank.
#[derive(Clone, Debug)]
pub struct ModelSpec {
    params: Vec<ParamSpec>,
    layout: PipelineLayout,
    degrees: Degrees,
    /// The multiple of values at which a parameter begins in the flat buffers of a rank.
    slot_alignment: usize,
    /// Of each block, if the model was described and not built.
    tapes: Vec<Option<Tape>>,
}

/// Whether it is the same model; what is known of its passes does not count.
impl PartialEq for ModelSpec {
    fn eq(&self, other: &Self) -> bool {
        (&self.params, &self.layout, self.degrees) == (&other.params, &other.layout, other.degrees)
    }
}

/// The part of a parameter that one rank owns: it writes that part to files.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Holder {
    /// World rank.
    pub rank: usize,
    /// Indices along the dim that is cut.
    pub range: Range<usize>,
}

impl ModelSpec {
    fn new(
        params: Vec<ParamSpec>,
        layout: PipelineLayout,
        degrees: Degrees,
        slot_alignment: usize,
    ) -> Result<Self> {
        params
            .iter()
            .try_for_each(|param| param.check(degrees.tp))?;
        Ok(Self {
            params,
            layout,
            degrees,
            slot_alignment,
            tapes: Vec::new(),
        })
    }

    /// The model whose blocks have asked for `params` on a rank alone, and what each block says that stays in memory between its passes.
    pub(crate) fn described(
        mut params: Vec<ParamSpec>,
        layout: PipelineLayout,
        degrees: Degrees,
        slot_alignment: usize,
        tapes: Vec<Option<Tape>>,
    ) -> Result<Self> {
        for param in params.iter_mut().filter(|param| !param.outside.is_empty()) {
            // A program asks on every rank.
            param.outside = (0..layout.num_ranks()).collect();
        }
        params.iter_mut().for_each(|param| param.asked_by = None);
        let model = Self::new(params, layout, degrees, slot_alignment)?;
        Ok(Self { tapes, ..model })
    }

    /// What all ranks of the mesh have asked for, this one for `own`. Each rank of a pipeline hears of the others what their stages need, and
    /// nothing else moves but a hash. Every rank must call it.
    pub(super) fn exchange(
        own: Vec<ParamSpec>,
        layout: &PipelineLayout,
        mesh: &Mesh,
        slot_alignment: usize,
    ) -> Result<Self> {
        let whole = match mesh.pp.world_size() {
            1 => Ok(own),
            _ => {
                let own = (mesh.world.rank(), own);
                let bytes = serde_json::to_vec(&own).map_err(Error::wrap)?;
                let all = mesh.pp.all_gather_bytes(&bytes)?;
                joined(all.iter().map(Vec::as_slice))
            }
        };
        let model = whole.and_then(|mut params| {
            params.iter_mut().for_each(|param| param.asked_by = None);
            Self::new(params, layout.clone(), mesh.degrees, slot_alignment)
        });
        Facts::agree(
            &mesh.world,
            model,
            Self::facts,
            "ranks build different models",
            "every rank asks for every parameter of its stages alike; Shard::even and Shard::of_ranks tell which rank holds which part",
        )
    }

    /// Everything that ranks must say alike.
    fn facts(&self) -> Facts {
        let mut facts = Facts::default();
        for param in &self.params {
            facts.add(&format!("parameter {}", param.name), param.in_words());
        }
        facts
    }

    /// A hash of all of it: ranks with the same one build the same model.
    pub fn hash(&self) -> u64 {
        self.facts().hash()
    }

    /// Every parameter of the model, in name order.
    pub fn params(&self) -> &[ParamSpec] {
        &self.params
    }

    /// The stages of the pipeline.
    pub fn layout(&self) -> &PipelineLayout {
        &self.layout
    }

    /// What the blocks say that stays in memory between their passes, on the tensor-parallel rank that they were described for: for
    /// [`PlannedPasses`](crate::PlannedPasses). Nothing of a model that was built.
    pub fn tapes(&self) -> &[Option<Tape>] {
        &self.tapes
    }

    /// The parameter of this name.
    pub fn get(&self, name: &str) -> Option<&ParamSpec> {
        let place = self
            .params
            .binary_search_by(|param| param.name.as_str().cmp(name));
        place.ok().map(|place| &self.params[place])
    }

    /// World ranks and the disjoint parts of `param` that they own, in the order of their indices; together they are the whole parameter.
    /// A rank may own several. They belong to the first replica, and to the first stage that uses the parameter.
    pub fn holders(&self, param: &ParamSpec) -> Vec<Holder> {
        let Degrees { dp, cp, tp, .. } = self.degrees;
        let first = self.owner(param) * dp * cp * tp;
        let mut holders: Vec<Holder> = Vec::new();
        for held in param.pieces(tp) {
            let (rank, range) = (first + held.ranks[0], held.range);
            match holders.last_mut() {
                Some(last) if last.rank == rank && last.range.end == range.start => {
                    last.range.end = range.end;
                }
                _ => holders.push(Holder { rank, range }),
            }
        }
        if holders.is_empty() {
            // Of a parameter without values the first rank that has it.
            let (rank, range) = (first, 0..0);
            holders.push(Holder { rank, range });
        }
        holders
    }

    /// The rank of the pipeline that owns a parameter: that of the first stage which uses it.
    fn owner(&self, param: &ParamSpec) -> usize {
        let first = param.stages(&self.layout).into_iter().next();
        first.map_or(0, |stage| self.layout.rank_of(stage))
    }

    /// The sets of stages that share trainable parameters, each once, in the same order on every rank.
    pub(super) fn tied_stages(&self) -> BTreeSet<BTreeSet<usize>> {
        let trainable = self.params.iter().filter(|param| param.trainable);
        let stages = trainable.map(|param| param.stages(&self.layout));
        stages.filter(|stages| stages.len() > 1).collect()
    }

    /// What world rank `rank` holds.
    pub fn of_rank(&self, rank: usize) -> RankSpec {
        let Degrees { dp, cp, tp, .. } = self.degrees;
        let (layout, num_replicas) = (&self.layout, dp * cp);
        let (tp_rank, pp_rank) = (rank % tp, rank / (num_replicas * tp));
        let own_blocks: Vec<Range<usize>> = layout
            .stages_of(pp_rank)
            .map(|stage| layout.blocks(stage))
            .collect();
        let is_own_block = |block: &usize| own_blocks.iter().any(|own| own.contains(block));
        let mut params = Vec::new();
        let mut tied: BTreeMap<BTreeSet<usize>, Vec<usize>> = BTreeMap::new();
        for param in &self.params {
            if !param.blocks.iter().any(is_own_block) && !param.outside.contains(&pp_rank) {
                continue;
            }
            let stages = param.stages(layout);
            if param.trainable && stages.len() > 1 {
                tied.entry(stages.clone()).or_default().push(params.len());
            }
            let blocks = param.blocks.iter().copied();
            let blocks = blocks.filter(is_own_block);
            let is_here = |block: &usize| is_own_block(block) || param.outside.contains(&pp_rank);
            let is_multiplied = param.multiplied_by.iter().any(is_here);
            let first = param.outside.contains(&pp_rank).then_some(0);
            let blocks: BTreeSet<usize> = first.into_iter().chain(blocks).collect();
            let owned = match self.owner(param) == pp_rank {
                true => param.owned_by(tp_rank, tp),
                false => Default::default(),
            };
            let shape = param.local_shape(tp_rank);
            params.push(HeldParam {
                name: param.name.clone(),
                blocks: blocks.into_iter().collect(),
                num_values: param.form.num_held(&shape),
                shape,
                num_global_values: param.num_values(),
                dtype: param.form.held_dtype(),
                trainable: param.trainable,
                is_tiled: param.is_tiled,
                is_multiplied,
                replicated: param.partition.is_none().then_some(param.gradient),
                owned,
                shared: param.shared_ranges(tp),
            });
        }
        let ties: Vec<TieSpec> = tied
            .into_iter()
            .map(|(stages, params)| TieSpec::new(stages, params, pp_rank, layout))
            .collect();
        RankSpec {
            pp_rank,
            stages: own_blocks,
            replica: rank / tp % num_replicas,
            num_replicas,
            layout: ParamLayout::new(&params, &ties, num_replicas, self.slot_alignment),
            params,
            ties,
        }
    }
}

/// What the ranks of a pipeline, each by its world rank, have asked for together.
fn joined<'a>(said: impl Iterator<Item = &'a [u8]>) -> Result<Vec<ParamSpec>> {
    let mut all: BTreeMap<String, (usize, ParamSpec)> = BTreeMap::new();
    for bytes in said {
        let asked: (usize, Vec<ParamSpec>) = serde_json::from_slice(bytes).map_err(Error::wrap)?;
        let (rank, params) = asked;
        for param in params {
            match all.get_mut(&param.name) {
                Some((first, known)) => known.join(param, *first, rank)?,
                None => drop(all.insert(param.name.clone(), (rank, param))),
            }
        }
    }
    Ok(all.into_values().map(|(_, param)| param).collect())
}
