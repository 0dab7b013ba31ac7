//! The parameters of a finished model: what this rank holds, and a catalog of what every rank holds.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

use candle_comm::{Mesh, ProcessGroup};
use candle_core::{Result, Tensor, bail};

use super::catalog::{Announcements, CatalogEntry, Overlap};
use super::changes::{Changes, ValuesFrom};
use super::layout::ParamLayout;
use super::param::Param;
use super::pending_weights::PendingWeights;
use super::store::{Allowance, Source};
use crate::checkpoint::Checkpoint;

/// All parameters of a model, in name order; immutable but for their values.
#[derive(Clone)]
pub struct Parameters {
    inner: Arc<Inner>,
}

struct Inner {
    params: Vec<Param>,
    owned: Vec<Vec<Range<usize>>>,
    overlaps: Vec<Vec<Overlap>>,
    ties: Vec<Tie>,
    layout: ParamLayout,
    catalog: Vec<CatalogEntry>,
    source: Arc<Source>,
    allowance: Allowance,
    pending: Arc<PendingWeights>,
    changes: Changes,
}

/// Parameters held by several pipeline stages, whose gradients are summed over them.
pub(crate) struct Tie {
    /// The ranks that hold them, one per stage.
    pub group: ProcessGroup,
    /// Indices of the parameters.
    pub params: Vec<usize>,
}

impl Parameters {
    pub(crate) fn new(
        params: Vec<Param>,
        (source, allowance): (Arc<Source>, Allowance),
        pending: Arc<PendingWeights>,
        mesh: &Mesh,
    ) -> Result<Self> {
        if mesh.degrees.cp > 1 {
            bail!(
                "the mesh has cp({}) > 1, but nothing implements context parallelism yet: every rank would train on whole \
                 sequences and the gradients would be too small\nhint: use cp = 1",
                mesh.degrees.cp
            );
        }
        let ranks = Announcements::exchange(&params, mesh)?;
        let catalog = ranks.catalog()?;
        if let Source::Pretrained(checkpoint) = &*source {
            check_all_used(checkpoint, &catalog, &allowance)?;
        }
        let ties = ties(&params, &ranks, mesh)?;
        let stage = mesh.pp.rank();
        let owned = params.iter().map(|param| {
            let range = ranks.owned_by(&param.name, stage, mesh.tp.rank());
            match range.is_empty() {
                true => Vec::new(),
                false => param.local_offsets(&range),
            }
        });
        let overlaps = params
            .iter()
            .map(|param| ranks.overlaps(&param.name, stage));
        Ok(Self {
            inner: Arc::new(Inner {
                owned: owned.collect(),
                overlaps: overlaps.collect(),
                layout: ParamLayout::new(&params, &ties, mesh.dp.world_size()),
                changes: Changes::new(params.len()),
                params,
                ties,
                catalog,
                source,
                allowance,
                pending,
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

    /// Row-major offsets of the local values of parameter `index` that this rank owns: over a data-parallel replica, each value
    /// of the model is owned by exactly one rank.
    pub(crate) fn owned(&self, index: usize) -> &[Range<usize>] {
        &self.inner.owned[index]
    }

    /// The parts of parameter `index` that several tensor-parallel ranks hold, this one perhaps not among them.
    pub(crate) fn overlaps(&self, index: usize) -> &[Overlap] {
        &self.inner.overlaps[index]
    }

    /// Where gradients and the optimizer's state of the trainable parameters lie.
    pub(crate) fn layout(&self) -> &ParamLayout {
        &self.inner.layout
    }

    /// Updates on their way to this rank.
    pub(crate) fn pending(&self) -> &PendingWeights {
        &self.inner.pending
    }

    /// Waits for weights that other replicas updated and that are on their way: see [`DataParallel::overlap`](crate::DataParallel::overlap).
    ///
    /// # Errors
    /// An update does not arrive.
    pub fn wait_for_updates(&self) -> Result<()> {
        self.inner.pending.wait_for_all()
    }

    /// Frees the values of the parameters that block `block` uses and no block of `others` does; they stay in their place, and
    /// every read of them is an error, until [`Self::refill`].
    ///
    /// # Errors
    /// An update on its way does not arrive.
    pub fn release(&self, block: usize, others: &[usize]) -> Result<()> {
        let is_free = |param: &&Param| {
            param.blocks.contains(&block) && !param.blocks.iter().any(|b| others.contains(b))
        };
        self.iter().filter(is_free).try_for_each(Param::release)
    }

    /// Puts values back into parameter `index`, behind every tensor that layers captured; `values` has its local shape, type
    /// and device. An optimizer that keeps f32 masters of narrower weights does not take them over.
    ///
    /// # Errors
    /// Values that do not fit the parameter.
    pub fn refill(&self, index: usize, values: &Tensor) -> Result<()> {
        self.get(index).refill(values)?;
        self.set_values_from(index, ValuesFrom::Refill);
        Ok(())
    }

    pub(super) fn changes(&self) -> &Changes {
        &self.inner.changes
    }

    pub(super) fn source(&self) -> &Source {
        &self.inner.source
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

/// One tie per set of stages that share parameters. Every rank splits the pipeline group once per set, in the same order.
fn ties(params: &[Param], ranks: &Announcements, mesh: &Mesh) -> Result<Vec<Tie>> {
    let catalog = ranks.catalog()?;
    let is_trainable = |name: &str| {
        let entry = catalog.binary_search_by(|entry| entry.name.as_str().cmp(name));
        entry.is_ok_and(|index| catalog[index].trainable)
    };
    let mut stages_of = ranks.stages();
    stages_of.retain(|name, stages| stages.len() > 1 && is_trainable(name));
    let shared: BTreeSet<&BTreeSet<usize>> = stages_of.values().collect();
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
