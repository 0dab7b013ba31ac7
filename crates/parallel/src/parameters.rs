//! The parameters of a finished model: what this rank holds, and a catalog of what every rank holds.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use candle_comm::{Mesh, ProcessGroup};
use candle_core::{DType, Result, bail};
use serde::{Deserialize, Serialize};

use crate::checkpoint::Checkpoint;
use crate::param::Param;
use crate::param_store::{Allowance, Source};

/// All parameters of a model, in name order; immutable but for their values.
#[derive(Clone)]
pub struct Parameters {
    inner: Arc<Inner>,
}

struct Inner {
    params: Vec<Param>,
    counted: Vec<Vec<Range<usize>>>,
    overlapping: Vec<usize>,
    ties: Vec<Tie>,
    catalog: Vec<CatalogEntry>,
    source: Arc<Source>,
    allowance: Allowance,
}

/// Parameters held by several pipeline stages, whose gradients are summed over them.
pub(crate) struct Tie {
    /// The ranks that hold them, one per stage.
    pub group: ProcessGroup,
    /// Indices of the parameters.
    pub params: Vec<usize>,
}

/// A parameter of the model, wherever it lives.
#[derive(Clone, Debug)]
pub struct CatalogEntry {
    /// Hugging Face name.
    pub name: String,
    /// Global shape.
    pub shape: Vec<usize>,
    /// Type in the source checkpoint.
    pub stored_dtype: DType,
    /// Whether it gets a gradient and an update.
    pub trainable: bool,
    /// World ranks and the disjoint parts that they answer for, in order; together they are the whole parameter.
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

/// The part of a parameter that one rank answers for when it is saved.
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
    stored_dtype: String,
    dim: usize,
    held: Range<usize>,
    owned: Range<usize>,
    is_sharded: bool,
    trainable: bool,
}

struct RankAnnouncements {
    stage: usize,
    is_first_replica: bool,
    params: Vec<Announcement>,
}

impl Parameters {
    pub(crate) fn new(
        params: Vec<Param>,
        source: Arc<Source>,
        allowance: Allowance,
        mesh: &Mesh,
    ) -> Result<Self> {
        let ranks = exchange(&params, mesh)?;
        let catalog = catalog(&ranks)?;
        if let Source::Pretrained(checkpoint) = &*source {
            check_all_used(checkpoint, &catalog, &allowance)?;
        }
        let overlaps = |name: &str| {
            let mut all = ranks.iter().flat_map(|rank| &rank.params);
            all.any(|param| param.name == name && param.held != param.owned)
        };
        let overlapping = (0..params.len())
            .filter(|&index| params[index].trainable && overlaps(&params[index].name))
            .collect();
        let ties = ties(&params, &ranks, mesh)?;
        let first_stage = first_stages(&ranks);
        let counted = params
            .iter()
            .map(|param| {
                let is_first_holder = first_stage.get(&param.name) == Some(&mesh.pp.rank())
                    && mesh.cp.rank() == 0
                    && (param.shard.is_some() || mesh.tp.rank() == 0);
                if is_first_holder {
                    param.owned_offsets()
                } else {
                    Vec::new()
                }
            })
            .collect();
        Ok(Self {
            inner: Arc::new(Inner {
                params,
                counted,
                overlapping,
                ties,
                catalog,
                source,
                allowance,
            }),
        })
    }

    /// The parameters of this rank, in name order.
    pub fn iter(&self) -> std::slice::Iter<'_, Param> {
        self.inner.params.iter()
    }

    /// Number of parameters of this rank.
    pub fn len(&self) -> usize {
        self.inner.params.len()
    }

    /// Whether this rank holds no parameter.
    pub fn is_empty(&self) -> bool {
        self.inner.params.is_empty()
    }

    /// Parameter `index` of this rank.
    pub fn get(&self, index: usize) -> &Param {
        &self.inner.params[index]
    }

    /// Every parameter of the model, in name order, the same on every rank.
    pub fn catalog(&self) -> &[CatalogEntry] {
        &self.inner.catalog
    }

    /// Number of values of the whole model; shared ones count once.
    pub fn num_global_values(&self) -> usize {
        self.inner
            .catalog
            .iter()
            .map(CatalogEntry::num_values)
            .sum()
    }

    /// Number of values of the whole model that are not frozen; shared ones count once.
    pub fn num_trainable_values(&self) -> usize {
        let trainable = self.inner.catalog.iter().filter(|entry| entry.trainable);
        trainable.map(CatalogEntry::num_values).sum()
    }

    /// Offsets of the values of parameter `index` for which this rank answers: over a data-parallel replica, each value of
    /// the model lies in exactly one rank's ranges.
    pub(crate) fn counted(&self, index: usize) -> &[Range<usize>] {
        &self.inner.counted[index]
    }

    /// Indices of the parameters of which some tensor-parallel ranks hold the same part.
    pub(crate) fn overlapping(&self) -> &[usize] {
        &self.inner.overlapping
    }

    pub(crate) fn ties(&self) -> &[Tie] {
        &self.inner.ties
    }

    /// The checkpoint that the model came from, if it did.
    pub fn checkpoint(&self) -> Option<&Checkpoint> {
        match &*self.inner.source {
            Source::Init { .. } => None,
            Source::Pretrained(checkpoint) => Some(checkpoint),
        }
    }

    /// Tensors that the checkpoint holds beside the parameters: (name, the parameter it repeats, if it does).
    pub(crate) fn extras(&self) -> Vec<(String, Option<String>)> {
        let Some(checkpoint) = self.checkpoint() else {
            return Vec::new();
        };
        let is_parameter = |name: &str| {
            let catalog = &self.inner.catalog;
            catalog.iter().any(|entry| entry.name == name)
        };
        let names = checkpoint.tensors().keys();
        names
            .filter(|name| !is_parameter(name))
            .map(|name| {
                (
                    name.clone(),
                    self.inner.allowance.aliases.get(name).cloned(),
                )
            })
            .collect()
    }
}

fn exchange(params: &[Param], mesh: &Mesh) -> Result<Vec<RankAnnouncements>> {
    let announcements: Vec<Announcement> = params
        .iter()
        .map(|param| {
            let whole = || 0..param.global_shape.dims().first().copied().unwrap_or(1);
            let shard = param.shard.as_ref();
            Announcement {
                name: param.name.clone(),
                shape: param.global_shape.dims().to_vec(),
                stored_dtype: param.stored_dtype.as_str().to_string(),
                dim: shard.map_or(0, |shard| shard.dim),
                held: shard.map_or_else(whole, |shard| shard.range.clone()),
                owned: shard.map_or_else(whole, |shard| shard.owned.clone()),
                is_sharded: shard.is_some(),
                trainable: param.trainable,
            }
        })
        .collect();
    let is_first_replica = mesh.dp.rank() == 0 && mesh.cp.rank() == 0;
    let announced = (mesh.pp.rank(), is_first_replica, announcements);
    let bytes = serde_json::to_vec(&announced).map_err(candle_core::Error::msg)?;
    let all = mesh.world.all_gather_bytes(&bytes)?;
    all.iter()
        .map(|bytes| {
            let (stage, is_first_replica, params) =
                serde_json::from_slice(bytes).map_err(candle_core::Error::msg)?;
            Ok(RankAnnouncements {
                stage,
                is_first_replica,
                params,
            })
        })
        .collect()
}

fn first_stages(ranks: &[RankAnnouncements]) -> BTreeMap<String, usize> {
    let mut first = BTreeMap::new();
    for rank in ranks {
        for param in &rank.params {
            let stage = first.entry(param.name.clone()).or_insert(rank.stage);
            *stage = (*stage).min(rank.stage);
        }
    }
    first
}

fn catalog(ranks: &[RankAnnouncements]) -> Result<Vec<CatalogEntry>> {
    let first_stage = first_stages(ranks);
    let mut entries: BTreeMap<&str, CatalogEntry> = BTreeMap::new();
    for (rank, announced) in ranks.iter().enumerate() {
        for param in &announced.params {
            let entry = entries.entry(&param.name).or_insert_with(|| CatalogEntry {
                name: param.name.clone(),
                shape: param.shape.clone(),
                stored_dtype: param.stored_dtype.parse().unwrap_or(DType::F32),
                trainable: param.trainable,
                holders: Vec::new(),
                dim: param.dim,
            });
            if entry.shape != param.shape {
                bail!(
                    "parameter {} has shape {:?} on rank {rank} and {:?} on another rank",
                    param.name,
                    param.shape,
                    entry.shape
                );
            }
            if entry.trainable != param.trainable {
                bail!(
                    "parameter {} is frozen on one rank and trainable on another, rank {rank} is the first to differ\nhint: \
                     freeze the same names on every rank",
                    param.name
                );
            }
            let answers = announced.is_first_replica
                && first_stage.get(&param.name) == Some(&announced.stage)
                && (param.is_sharded || entry.holders.is_empty())
                && !(param.owned.is_empty() && entry.shape.iter().product::<usize>() > 0);
            if answers {
                entry.dim = param.dim;
                entry.holders.push(Holder {
                    rank,
                    range: param.owned.clone(),
                });
            }
        }
    }
    for entry in entries.values() {
        let len = entry.shape.get(entry.dim).copied().unwrap_or(1);
        let mut next = 0;
        for holder in &entry.holders {
            if holder.range.start != next {
                break;
            }
            next = holder.range.end;
        }
        if next != len {
            bail!(
                "parameter {}: the parts that ranks hold of dim {} do not cover 0..{len} in rank order: {:?}",
                entry.name,
                entry.dim,
                entry.holders
            );
        }
    }
    Ok(entries.into_values().collect())
}

/// One tie per set of stages that share parameters. Every rank splits the pipeline group once per set, in the same order.
fn ties(params: &[Param], ranks: &[RankAnnouncements], mesh: &Mesh) -> Result<Vec<Tie>> {
    let mut stages_of: BTreeMap<&str, BTreeSet<usize>> = BTreeMap::new();
    for rank in ranks {
        for param in rank.params.iter().filter(|param| param.trainable) {
            stages_of.entry(&param.name).or_default().insert(rank.stage);
        }
    }
    let shared: BTreeSet<&BTreeSet<usize>> = stages_of
        .values()
        .filter(|stages| stages.len() > 1)
        .collect();
    let mut ties = Vec::new();
    for stages in shared {
        let stage = mesh.pp.rank();
        let is_member = stages.contains(&stage);
        let color = if is_member { 0 } else { 1 + stage };
        let group = mesh.pp.split(color, stage)?;
        if is_member {
            let has_tie =
                |index: &usize| stages_of.get(params[*index].name.as_str()) == Some(stages);
            let params = (0..params.len()).filter(has_tie).collect();
            ties.push(Tie { group, params });
        }
    }
    Ok(ties)
}

fn check_all_used(
    checkpoint: &Checkpoint,
    catalog: &[CatalogEntry],
    allowance: &Allowance,
) -> Result<()> {
    for (alias, name) in &allowance.aliases {
        let tensors = checkpoint.tensors();
        if tensors.contains_key(alias)
            && tensors.contains_key(name)
            && checkpoint.bytes(alias)? != checkpoint.bytes(name)?
        {
            bail!(
                "config.json ties {alias} to {name}, but the checkpoint in {} holds different values for them\nhint: set \
                 tie_word_embeddings to false to train both",
                checkpoint.dir().display()
            );
        }
    }
    let used: BTreeSet<&str> = catalog.iter().map(|entry| entry.name.as_str()).collect();
    let is_allowed = |name: &str| {
        allowance.aliases.contains_key(name)
            || allowance
                .suffixes
                .iter()
                .any(|suffix| name.ends_with(suffix))
    };
    let unused: Vec<&String> = checkpoint
        .tensors()
        .keys()
        .filter(|name| !used.contains(name.as_str()) && !is_allowed(name))
        .collect();
    if let Some(first) = unused.first() {
        bail!(
            "the checkpoint in {} holds {} tensors that the configured model does not use, the first is {first}\nhint: \
             config.json does not describe these weights (number of layers, biases, tied embeddings?)",
            checkpoint.dir().display(),
            unused.len()
        );
    }
    Ok(())
}
