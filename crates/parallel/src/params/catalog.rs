//! What every rank holds of every parameter, and who owns what.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use candle_comm::Mesh;
use candle_core::{DType, Result, bail};
use serde::{Deserialize, Serialize};

use super::param::{Asker, Param, asked_twice};
use crate::pipeline_layout::PipelineLayout;
use crate::placement::{Gradient, Indices, Placement, joined};

/// A parameter of the model, wherever it lives.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct CatalogEntry {
    /// Hugging Face name.
    pub name: String,
    /// Global shape.
    pub shape: Vec<usize>,
    /// Form in which ranks hold its values: the name of a type, or `q8_0` or `q4k`.
    pub form: String,
    /// Type in the source checkpoint.
    pub stored_dtype: DType,
    /// Whether it gets a gradient and an update.
    pub trainable: bool,
    /// Whether it is of a low-rank adapter.
    pub is_adapter: bool,
    /// World ranks and the disjoint parts that they own, in the order of their indices; together they are the whole parameter. A rank
    /// may own several.
    pub holders: Vec<Holder>,
    /// Dim along which the parts lie.
    pub dim: usize,
}

impl CatalogEntry {
    /// Number of values of the whole parameter.
    pub fn num_values(&self) -> usize {
        self.shape.iter().product()
    }
}

/// The part of a parameter that one rank owns: it writes that part to files.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Holder {
    /// World rank.
    pub rank: usize,
    /// Indices along [`CatalogEntry::dim`].
    pub range: Range<usize>,
}

/// What a rank tells the others of a parameter.
#[derive(Serialize, Deserialize)]
struct Announcement {
    name: String,
    shape: Vec<usize>,
    form: String,
    stored_dtype: String,
    dim: usize,
    held: Indices,
    /// What its gradient is; of a shard that of the part.
    gradient: Gradient,
    is_replicated: bool,
    trainable: bool,
    is_tiled: bool,
    is_adapter: bool,
    /// Its distribution, if it is drawn at random.
    init: Option<String>,
    /// Who asked for it without saying that others do too.
    asked_by: Option<Asker>,
    /// The stages of the rank that use it.
    stages: Vec<usize>,
}

/// What a rank tells the others.
#[derive(Serialize, Deserialize)]
struct RankAnnouncement {
    pp_rank: usize,
    replica: usize,
    tp_rank: usize,
    params: Vec<Announcement>,
}

/// What all ranks hold.
pub(super) struct GlobalPlacement {
    ranks: Vec<RankAnnouncement>,
    /// Of each parameter, the stages that use it.
    stages: BTreeMap<String, BTreeSet<usize>>,
    layout: PipelineLayout,
}

/// Indices of a parameter's cut dim that several tensor-parallel ranks hold.
#[derive(Clone, Debug)]
pub(crate) struct SharedRange {
    /// Consecutive indices with the same holders.
    pub range: Range<usize>,
    /// Whether each holder's gradient of them is a summand.
    pub gradient: Gradient,
    /// Ranks that hold them.
    pub num_holders: usize,
}

impl GlobalPlacement {
    /// Tells all ranks of the mesh what this one holds, and learns what they hold.
    pub fn exchange(
        params: &[Param],
        is_drawn: impl Fn(&Param) -> bool,
        mesh: &Mesh,
        layout: &PipelineLayout,
    ) -> Result<Self> {
        let pp_rank = mesh.pp.rank();
        let stages = |param: &Param| -> Vec<usize> {
            // What no block asked for counts as used by the first stage.
            let blocks = param.blocks.iter().filter(|_| param.is_of_blocks());
            let stages = blocks.filter_map(|&block| layout.stage_of_block(block));
            let stages: BTreeSet<usize> = stages.collect();
            match stages.is_empty() {
                true => layout.stages_of(pp_rank).take(1).collect(),
                false => stages.into_iter().collect(),
            }
        };
        let params = params.iter().map(|param| {
            let (dim, held) = param.held();
            Announcement {
                init: is_drawn(param).then(|| format!("{:?}", param.init)),
                asked_by: param.asked_by,
                stages: stages(param),
                name: param.name.clone(),
                shape: param.global_shape.dims().to_vec(),
                form: param.form().to_string(),
                stored_dtype: param.stored_dtype.as_str().to_string(),
                dim,
                held,
                gradient: match param.placement {
                    Placement::Replicated(gradient) => gradient,
                    Placement::Sharded(_) => Gradient::Partial,
                },
                is_replicated: param.shard().is_none(),
                trainable: param.trainable,
                is_tiled: param.is_tiled,
                is_adapter: param.is_adapter,
            }
        });
        let own = RankAnnouncement {
            pp_rank,
            replica: mesh.replicas.rank(),
            tp_rank: mesh.tp.rank(),
            params: params.collect(),
        };
        let bytes = serde_json::to_vec(&own).map_err(candle_core::Error::msg)?;
        let all = mesh.world.all_gather_bytes(&bytes)?;
        let all = all
            .iter()
            .map(|bytes| serde_json::from_slice(bytes).map_err(candle_core::Error::msg));
        let ranks: Vec<RankAnnouncement> = all.collect::<Result<_>>()?;
        let mut stages: BTreeMap<String, BTreeSet<usize>> = BTreeMap::new();
        for param in ranks.iter().flat_map(|rank| &rank.params) {
            let known = stages.entry(param.name.clone()).or_default();
            known.extend(&param.stages);
        }
        Ok(Self {
            ranks,
            stages,
            layout: layout.clone(),
        })
    }

    /// The stages of the pipeline.
    pub fn layout(&self) -> &PipelineLayout {
        &self.layout
    }

    /// Whether all ranks that hold parameter `name` use it tile by tile: what is tied across stages lies in the same places on each.
    pub fn is_tiled(&self, name: &str) -> bool {
        let params = self.ranks.iter().flat_map(|rank| &rank.params);
        let mut holders = params.filter(|param| param.name == name);
        holders.all(|param| param.is_tiled)
    }

    /// Of each parameter, the stages with a block that uses it.
    pub fn stages(&self) -> &BTreeMap<String, BTreeSet<usize>> {
        &self.stages
    }

    /// The rank of the pipeline group that owns parameter `name`: that of the first stage which uses it.
    fn owner(&self, name: &str) -> Option<usize> {
        let first = self.stages.get(name)?.first()?;
        Some(self.layout.rank_of(*first))
    }

    /// The parts of parameter `name` that the tensor-parallel ranks at a place of the pipeline hold, in their order; all replicas have the same.
    fn held<'a>(&'a self, name: &'a str, pp_rank: usize) -> impl Iterator<Item = &'a Announcement> {
        let ranks = self.ranks.iter();
        let ranks = ranks.filter(move |rank| rank.pp_rank == pp_rank && rank.replica == 0);
        ranks.flat_map(move |rank| rank.params.iter().filter(move |param| param.name == name))
    }

    /// Indices of parameter `name` in pieces that the same tensor-parallel ranks at a place of the pipeline hold, and those ranks;
    /// both are rising. The first rank owns the piece.
    fn pieces(&self, name: &str, pp_rank: usize) -> Vec<(Range<usize>, Vec<usize>)> {
        let held: Vec<&Indices> = self.held(name, pp_rank).map(|param| &param.held).collect();
        let ranges = held.iter().flat_map(|held| held.ranges());
        let borders = ranges.flat_map(|range| [range.start, range.end]);
        let borders: Vec<usize> = borders.collect::<BTreeSet<_>>().into_iter().collect();
        let pieces = borders.windows(2).map(|ends| {
            let holds = |rank: &usize| held[*rank].contains(ends[0]);
            (ends[0]..ends[1], (0..held.len()).filter(holds).collect())
        });
        pieces
            .filter(|(_, ranks): &(_, Vec<_>)| !ranks.is_empty())
            .collect()
    }

    /// Indices of parameter `name` that the rank at these places of the mesh owns. Over a data-parallel replica, each index of the
    /// model is owned by exactly one rank.
    pub fn owned_by(&self, name: &str, pp_rank: usize, tp_rank: usize) -> Indices {
        let is_owner = self.owner(name) == Some(pp_rank);
        let pieces = is_owner
            .then(|| self.pieces(name, pp_rank))
            .into_iter()
            .flatten();
        let owned = pieces.filter(|(_, ranks)| ranks[0] == tp_rank);
        owned.map(|(range, _)| range).collect()
    }

    /// Indices of parameter `name` that several tensor-parallel ranks at a place of the pipeline hold, in rising order.
    pub fn shared_ranges(&self, name: &str, pp_rank: usize) -> Vec<SharedRange> {
        let Some(gradient) = self.held(name, pp_rank).next().map(|param| param.gradient) else {
            return Vec::new();
        };
        let pieces = self.pieces(name, pp_rank).into_iter();
        let shared = pieces.filter(|(_, ranks)| ranks.len() > 1);
        let shared = shared.map(|(range, ranks)| SharedRange {
            range,
            gradient,
            num_holders: ranks.len(),
        });
        shared.collect()
    }

    /// Every parameter of the model, in name order.
    pub fn catalog(&self) -> Result<Vec<CatalogEntry>> {
        let mut first: BTreeMap<&str, (usize, &Announcement)> = BTreeMap::new();
        for (rank, announced) in self.ranks.iter().enumerate() {
            for param in &announced.params {
                let (_, known) = first.entry(&param.name).or_insert((rank, param));
                check_agrees(param, known, rank)?;
            }
        }
        self.check_askers()?;
        let entries = first.into_values().map(|(_, param)| {
            let owner = self.owner(&param.name).unwrap_or_default();
            self.entry(param, owner)
        });
        entries.collect()
    }

    /// An error if blocks of several stages ask for one parameter and do not say that it is shared; blocks of one stage have been asked
    /// already.
    fn check_askers(&self) -> Result<()> {
        let mut known: BTreeMap<&str, Asker> = BTreeMap::new();
        for param in self.ranks.iter().flat_map(|rank| &rank.params) {
            let Some(asker) = param.asked_by else {
                continue;
            };
            let first = *known.entry(&param.name).or_insert(asker);
            if first != asker {
                bail!("{}", asked_twice(&param.name, first, asker));
            }
        }
        Ok(())
    }

    /// An error unless every tensor-parallel rank at a place of the pipeline with the parameter has it, and all such places hold the same parts.
    fn check_placement(&self, param: &Announcement, owner: usize) -> Result<()> {
        let name = param.name.as_str();
        let parts = |pp_rank: usize| -> Vec<&[Range<usize>]> {
            self.held(name, pp_rank)
                .map(|param| param.held.ranges())
                .collect()
        };
        let num_ranks = |pp_rank: usize| {
            let ranks = self.ranks.iter();
            let ranks = ranks.filter(|rank| rank.pp_rank == pp_rank && rank.replica == 0);
            ranks.count()
        };
        for &stage in self.stages.get(name).into_iter().flatten() {
            let pp_rank = self.layout.rank_of(stage);
            let (parts, of_owner) = (parts(pp_rank), parts(owner));
            if parts.len() != num_ranks(pp_rank) {
                bail!(
                    "parameter {name} is on {} of the {} tensor-parallel ranks of stage {stage}\nhint: every rank asks for \
                     every parameter, with a Shard of its own part, which may be empty",
                    parts.len(),
                    num_ranks(pp_rank)
                );
            }
            if parts != of_owner {
                bail!(
                    "parameter {name} is divided into {of_owner:?} on the first stage that uses it and into {parts:?} on stage \
                     {stage}\nhint: stages that share a parameter divide it alike"
                );
            }
        }
        Ok(())
    }

    fn entry(&self, param: &Announcement, owner: usize) -> Result<CatalogEntry> {
        self.check_placement(param, owner)?;
        let holds = |rank: &RankAnnouncement| {
            let mut params = rank.params.iter();
            rank.pp_rank == owner && rank.replica == 0 && params.any(|held| held.name == param.name)
        };
        let ranks = (0..self.ranks.len()).filter(|&rank| holds(&self.ranks[rank]));
        let ranks: Vec<usize> = ranks.collect();
        let mut holders: Vec<Holder> = Vec::new();
        for (range, holding) in self.pieces(&param.name, owner) {
            let rank = ranks[holding[0]];
            match holders.last_mut() {
                Some(last) if last.rank == rank && last.range.end == range.start => {
                    last.range.end = range.end;
                }
                _ => holders.push(Holder { rank, range }),
            }
        }
        let len = param.shape.get(param.dim).copied().unwrap_or(1);
        let covered = joined(holders.iter().map(|holder| holder.range.clone()));
        if covered != joined(std::iter::once(0..len)) {
            let held = self.held(&param.name, owner);
            let held: Vec<_> = held.map(|held| held.held.ranges()).collect();
            bail!(
                "parameter {}: the parts that ranks hold of dim {} do not cover 0..{len}: {held:?}",
                param.name,
                param.dim,
            );
        }
        if len == 0 {
            // Of a parameter without values the first holder.
            let first = ranks.first().map(|&rank| Holder { rank, range: 0..0 });
            holders.extend(first);
        }
        Ok(CatalogEntry {
            name: param.name.clone(),
            shape: param.shape.clone(),
            form: param.form.clone(),
            stored_dtype: param.stored_dtype.parse().unwrap_or(DType::F32),
            trainable: param.trainable,
            is_adapter: param.is_adapter,
            holders,
            dim: param.dim,
        })
    }
}

/// An error unless two ranks say the same of a parameter.
fn check_agrees(param: &Announcement, known: &Announcement, rank: usize) -> Result<()> {
    let name = &param.name;
    if known.shape != param.shape {
        bail!(
            "parameter {name} has shape {:?} on rank {rank} and {:?} on another rank",
            param.shape,
            known.shape
        );
    }
    if known.trainable != param.trainable {
        bail!(
            "parameter {name} is frozen on one rank and trainable on another, rank {rank} is the first to differ\nhint: \
             freeze the same names on every rank"
        );
    }
    if known.init != param.init {
        let init = |param: &Announcement| param.init.clone().unwrap_or_else(|| "a file".into());
        bail!(
            "parameter {name} gets its initial values from {} on rank {rank} and from {} on a rank before: the blocks that share it \
             would begin with different copies\nhint: ask for it with the same Init everywhere",
            init(param),
            init(known)
        );
    }
    let is_same_placement = known.is_replicated == param.is_replicated
        && known.gradient == param.gradient
        && known.dim == param.dim;
    if !is_same_placement {
        bail!(
            "parameter {name} lies on rank {rank} in another way than on the ranks before: replicated or not, cut along \
             another dim, or with another kind of gradient\nhint: give it the same Placement on every rank"
        );
    }
    Ok(())
}
