//! What every rank holds of every parameter, and who owns what.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use candle_comm::Mesh;
use candle_core::{DType, Result, bail};
use serde::{Deserialize, Serialize};

use super::param::{Asker, Param, asked_twice};
use super::placement::{Gradient, Placement, joined};

/// A parameter of the model, wherever it lives.
#[derive(Clone, Debug)]
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
    /// World ranks and the disjoint parts that they own, in order; together they are the whole parameter.
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
    held: Range<usize>,
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
}

/// What a rank tells the others.
#[derive(Serialize, Deserialize)]
struct RankAnnouncement {
    stage: usize,
    replica: usize,
    tp_rank: usize,
    params: Vec<Announcement>,
}

/// What all ranks hold.
pub(super) struct Announcements(Vec<RankAnnouncement>);

/// Indices of a parameter's cut dim that several tensor-parallel ranks hold.
#[derive(Clone, Debug)]
pub(crate) struct Overlap {
    /// Consecutive indices with the same holders.
    pub range: Range<usize>,
    /// Whether each holder's gradient of them is a summand.
    pub gradient: Gradient,
    /// Ranks that hold them.
    pub num_holders: usize,
}

impl Announcements {
    /// Tells all ranks of the mesh what this one holds, and learns what they hold.
    pub fn exchange(
        params: &[Param],
        is_drawn: impl Fn(&Param) -> bool,
        mesh: &Mesh,
    ) -> Result<Self> {
        let params = params.iter().map(|param| {
            let (dim, held) = param.held();
            Announcement {
                init: is_drawn(param).then(|| format!("{:?}", param.init)),
                asked_by: param.asked_by,
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
            stage: mesh.pp.rank(),
            replica: mesh.dp.rank(),
            tp_rank: mesh.tp.rank(),
            params: params.collect(),
        };
        let bytes = serde_json::to_vec(&own).map_err(candle_core::Error::msg)?;
        let all = mesh.world.all_gather_bytes(&bytes)?;
        let all = all
            .iter()
            .map(|bytes| serde_json::from_slice(bytes).map_err(candle_core::Error::msg));
        Ok(Self(all.collect::<Result<_>>()?))
    }

    /// Whether all ranks that hold parameter `name` use it tile by tile: what is tied across stages lies in the same places on each.
    pub fn is_tiled(&self, name: &str) -> bool {
        let params = self.0.iter().flat_map(|rank| &rank.params);
        let mut holders = params.filter(|param| param.name == name);
        holders.all(|param| param.is_tiled)
    }

    /// Of each parameter, the stages with a block that uses it.
    pub fn stages(&self) -> BTreeMap<&str, BTreeSet<usize>> {
        let mut stages: BTreeMap<&str, BTreeSet<usize>> = BTreeMap::new();
        for rank in &self.0 {
            for param in &rank.params {
                stages.entry(&param.name).or_default().insert(rank.stage);
            }
        }
        stages
    }

    /// The parts of parameter `name` that the tensor-parallel ranks of a stage hold, in their order; all replicas have the same.
    fn held<'a>(&'a self, name: &'a str, stage: usize) -> impl Iterator<Item = &'a Announcement> {
        let ranks = self.0.iter();
        let ranks = ranks.filter(move |rank| rank.stage == stage && rank.replica == 0);
        ranks.flat_map(move |rank| rank.params.iter().filter(move |param| param.name == name))
    }

    /// Indices of parameter `name` that each tensor-parallel rank of a stage owns: those that no lower rank holds.
    fn owned(&self, name: &str, stage: usize) -> Vec<Range<usize>> {
        let mut next = 0;
        let owned = self.held(name, stage).map(|param| {
            let range = param.held.start.max(next)..param.held.end.max(next);
            next = range.end;
            range
        });
        owned.collect()
    }

    /// Indices of parameter `name` that the rank at these places of the mesh owns. Over a data-parallel replica, each index of the
    /// model is owned by exactly one rank.
    pub fn owned_by(&self, name: &str, stage: usize, tp_rank: usize) -> Range<usize> {
        let stages = self.stages();
        let is_first = stages.get(name).and_then(BTreeSet::first) == Some(&stage);
        let owned = is_first.then(|| self.owned(name, stage).get(tp_rank).cloned());
        owned.flatten().unwrap_or(0..0)
    }

    /// Indices of parameter `name` that several tensor-parallel ranks of a stage hold, in rising order.
    pub fn overlaps(&self, name: &str, stage: usize) -> Vec<Overlap> {
        let held: Vec<&Announcement> = self.held(name, stage).collect();
        let borders: BTreeSet<usize> = held
            .iter()
            .flat_map(|param| [param.held.start, param.held.end])
            .collect();
        let borders: Vec<usize> = borders.into_iter().collect();
        let pieces = borders.windows(2).map(|ends| ends[0]..ends[1]);
        let overlaps = pieces.filter_map(|range| {
            let holds = |param: &&&Announcement| {
                param.held.start <= range.start && range.end <= param.held.end
            };
            let holders: Vec<_> = held.iter().filter(holds).collect();
            let num_holders = holders.len();
            let gradient = holders.first().filter(|_| num_holders > 1)?.gradient;
            Some(Overlap {
                range,
                gradient,
                num_holders,
            })
        });
        overlaps.collect()
    }

    /// Every parameter of the model, in name order.
    pub fn catalog(&self) -> Result<Vec<CatalogEntry>> {
        let mut first: BTreeMap<&str, (usize, &Announcement)> = BTreeMap::new();
        for (rank, announced) in self.0.iter().enumerate() {
            for param in &announced.params {
                let (_, known) = first.entry(&param.name).or_insert((rank, param));
                check_agrees(param, known, rank)?;
            }
        }
        self.check_askers()?;
        let stages = self.stages();
        let entries = first.into_values().map(|(_, param)| {
            let stage = stages.get(param.name.as_str()).and_then(BTreeSet::first);
            let stage = stage.copied().unwrap_or_default();
            self.entry(param, stage)
        });
        entries.collect()
    }

    /// An error if blocks of several stages ask for one parameter and do not say that it is shared; blocks of one stage have been asked
    /// already.
    fn check_askers(&self) -> Result<()> {
        let mut known: BTreeMap<&str, Asker> = BTreeMap::new();
        for param in self.0.iter().flat_map(|rank| &rank.params) {
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

    /// An error unless every tensor-parallel rank of a stage with the parameter has it, and the stages hold the same parts.
    fn check_placement(&self, param: &Announcement, first_stage: usize) -> Result<()> {
        let name = param.name.as_str();
        let parts = |stage: usize| -> Vec<&Range<usize>> {
            self.held(name, stage).map(|param| &param.held).collect()
        };
        let num_ranks = |stage: usize| {
            let ranks = self.0.iter();
            let ranks = ranks.filter(|rank| rank.stage == stage && rank.replica == 0);
            ranks.count()
        };
        let stages = self.stages();
        for &stage in stages.get(name).into_iter().flatten() {
            let (parts, of_first) = (parts(stage), parts(first_stage));
            if parts.len() != num_ranks(stage) {
                bail!(
                    "parameter {name} is on {} of the {} tensor-parallel ranks of stage {stage}\nhint: every rank asks for \
                     every parameter, with a Shard of its own part, which may be empty",
                    parts.len(),
                    num_ranks(stage)
                );
            }
            if parts != of_first {
                bail!(
                    "parameter {name} is divided into {of_first:?} on stage {first_stage} and into {parts:?} on stage \
                     {stage}\nhint: stages that share a parameter divide it alike"
                );
            }
        }
        Ok(())
    }

    fn entry(&self, param: &Announcement, stage: usize) -> Result<CatalogEntry> {
        self.check_placement(param, stage)?;
        let holds = |rank: &RankAnnouncement| {
            let mut params = rank.params.iter();
            rank.stage == stage && rank.replica == 0 && params.any(|held| held.name == param.name)
        };
        let ranks = (0..self.0.len()).filter(|&rank| holds(&self.0[rank]));
        let mut holders: Vec<Holder> = ranks
            .zip(self.owned(&param.name, stage))
            .map(|(rank, range)| Holder { rank, range })
            .collect();
        let len = param.shape.get(param.dim).copied().unwrap_or(1);
        let covered = joined(holders.iter().map(|holder| holder.range.clone()));
        if len > 0 && (covered.len() != 1 || covered.first() != Some(&(0..len))) {
            let held: Vec<_> = self
                .held(&param.name, stage)
                .map(|held| &held.held)
                .collect();
            bail!(
                "parameter {}: the parts that ranks hold of dim {} do not cover 0..{len} in rank order: {held:?}",
                param.name,
                param.dim,
            );
        }
        // Of a parameter without values the first holder.
        let mut is_first = true;
        holders
            .retain(|holder| !holder.range.is_empty() || std::mem::take(&mut is_first) && len == 0);
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
