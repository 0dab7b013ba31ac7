//! A micro-batch on its way through a model, and what is asked of it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use candle_comm::ProcessGroup;
use candle_core::{Result, Tensor, bail};
use candle_ops::{AttentionRows, DocumentStarts, IGNORE_INDEX, Runs};

use super::cut::Cut;
use super::dropout::{MaskPlace, SequenceKeys};
use super::key_value_cache::KeyValueCache;
use super::region::Region;
use super::region_watch::note_entered;
use super::reports::{Reported, Reports};
use crate::placement::Shard;

/// A pass of a micro-batch, as every block sees it: what goes in, the targets, and what the pass is for. Clones are cheap.
///
/// Every rank of a pipeline is given the same, so that each stage knows the shapes that it will receive and the last one has the targets.
/// Inputs and targets belong on the CPU, where they are checked and counted. A program makes passes by [`Self::train`] or
/// [`Self::infer`]; the engine says whether they train or evaluate.
#[derive(Clone, Debug)]
pub struct Pass {
    inputs: Tensor,
    targets: Option<Tensor>,
    documents: Option<DocumentStarts>,
    /// Made when a block first asks for them.
    rows: Arc<OnceLock<AttentionRows>>,
    /// If these are some of the rows of a micro-batch that context-parallel ranks share.
    cut: Option<Arc<Cut>>,
    mode: Mode,
    /// Index of the block that it is given to.
    pub(super) block: usize,
    /// Takes the losses that a block in plain candle adds.
    added: Option<Arc<Mutex<Vec<Tensor>>>>,
    /// Whether what is reported was so before: a forward pass runs again.
    is_again: bool,
}

/// What a pass is for.
#[derive(Clone, Debug)]
enum Mode {
    Train(Arc<Training>),
    /// Nothing is kept for a backward pass, and nothing is dropped.
    Evaluate,
    /// The inputs go on after tokens whose keys and values are known.
    Generate(KeyValueCache),
}

/// What is known of a training pass.
#[derive(Debug)]
struct Training {
    loss_scale: f64,
    seed: u64,
    step: usize,
    /// Whether tensor-parallel ranks have some of the rows each of what passes between blocks.
    divides_rows: bool,
    /// Made when a block first asks for them.
    sequences: OnceLock<SequenceKeys>,
    reports: Reports,
}

impl Pass {
    /// A micro-batch to train on or to evaluate. A language model takes tokens and their targets, (b, t) u32 both, where
    /// [`IGNORE_INDEX`] marks a position without a target; other models take what their first and last blocks
    /// make of it, dim 0 being the sequences, images or whatever a sample is.
    pub fn train(inputs: Tensor, targets: Tensor) -> Self {
        Self {
            targets: Some(targets),
            ..Self::infer(inputs)
        }
    }

    /// Inputs without targets, as [`Pipeline::logits`](crate::Pipeline::logits) takes them.
    pub fn infer(inputs: Tensor) -> Self {
        Self {
            inputs,
            targets: None,
            documents: None,
            rows: Arc::default(),
            cut: None,
            mode: Mode::Evaluate,
            block: 0,
            added: None,
            is_again: false,
        }
    }

    /// The same for sequences that are made of several documents: packed records, padding.
    pub fn with_documents(self, documents: impl Into<Option<DocumentStarts>>) -> Self {
        Self {
            documents: documents.into(),
            rows: Arc::default(),
            ..self
        }
    }

    /// The same for tokens that come after those of `cache`, which gets theirs, too.
    pub fn with_cache(self, cache: KeyValueCache) -> Self {
        Self {
            mode: Mode::Generate(cache),
            rows: Arc::default(),
            ..self
        }
    }

    /// The pass as one that is trained on, after `step` updates, with the gradient of the loss times `loss_scale`, by a model whose blocks
    /// get and give what ranks have outside of `region`.
    pub(crate) fn training(
        &self,
        loss_scale: f64,
        step: usize,
        seed: u64,
        region: &Region,
    ) -> Self {
        let training = Training {
            loss_scale,
            seed,
            step,
            divides_rows: region.divides_rows(),
            sequences: OnceLock::new(),
            reports: Reports::default(),
        };
        Self {
            mode: Mode::Train(Arc::new(training)),
            ..self.clone()
        }
    }

    /// The pass as one that nothing is trained on.
    pub(crate) fn evaluating(&self) -> Self {
        Self {
            mode: Mode::Evaluate,
            ..self.clone()
        }
    }

    /// The same pass of a block that runs again.
    pub(crate) fn again(&self) -> Self {
        Self {
            is_again: true,
            ..self.clone()
        }
    }

    /// The same pass for the block with this index.
    pub(crate) fn of_block(&self, block: usize) -> Self {
        Self {
            block,
            ..self.clone()
        }
    }

    /// Whether tensor-parallel ranks have some of the rows each of what passes between the blocks that are trained.
    pub(crate) fn divides_rows(&self) -> bool {
        self.of_training().is_some_and(|of| of.divides_rows)
    }

    /// The same pass for one block in plain candle, whose [added](Self::add_loss) losses [`Self::added`] gives.
    pub(crate) fn of_plain_block(&self) -> Self {
        Self {
            added: Some(Arc::default()),
            ..self.clone()
        }
    }

    /// The losses that the block has added.
    pub(crate) fn added(&self) -> Vec<Tensor> {
        let added = self.added.iter();
        let added = added.flat_map(|all| {
            let mut all = all.lock().unwrap_or_else(PoisonError::into_inner);
            std::mem::take(&mut *all)
        });
        added.collect()
    }

    /// What the blocks of a training pass have reported.
    pub(crate) fn reports(&self) -> Result<BTreeMap<String, Reported>> {
        match self.of_training() {
            Some(training) => training.reports.read(),
            None => Ok(BTreeMap::new()),
        }
    }

    /// Adds a sum of losses, a scalar in candle's graph, to the loss that a block in plain candle is trained on: of a router that shall use
    /// its experts evenly, for example. It is divided as the loss of the head is, whose number of targets it is to be a multiple of, and
    /// the step's metrics have it under `name`, the loss of the head being apart. Tensor-parallel ranks must add the
    /// same. Outside of training it does nothing.
    ///
    /// # Errors
    /// A loss that is no scalar; a [`Layer`](crate::Layer), which computes its gradients itself.
    pub fn add_loss(&self, name: &str, sum: &Tensor) -> Result<()> {
        let Some(training) = self.of_training() else {
            return Ok(());
        };
        let Some(added) = &self.added else {
            bail!(
                "a layer with a backward pass of its own adds the loss {name}, whose gradient nobody would compute\nhint: its backward pass adds \
                 that gradient, and Pass::report the number"
            )
        };
        if !self.is_again {
            training.reports.add(name, sum, 0)?;
        }
        let mut added = added.lock().unwrap_or_else(PoisonError::into_inner);
        added.push(sum.clone());
        Ok(())
    }

    /// Puts the mean of what is reported under `name`, scalars, over blocks, micro-batches and replicas into the metrics of the step; once
    /// if the forward pass runs again. Of tensor-parallel ranks the first one's counts, with a warning if another reports
    /// something else, or nothing. Outside of training it does nothing.
    ///
    /// # Errors
    /// A value that is no scalar.
    pub fn report(&self, name: &str, value: &Tensor) -> Result<()> {
        match self.of_training() {
            Some(training) if !self.is_again => training.reports.add(name, value, 1),
            _ => Ok(()),
        }
    }

    /// What the first block gets: token ids, (b, t) u32, images, features.
    pub fn inputs(&self) -> &Tensor {
        &self.inputs
    }

    /// The targets.
    ///
    /// # Errors
    /// There are none.
    pub fn targets(&self) -> Result<&Tensor> {
        match &self.targets {
            Some(targets) => Ok(targets),
            None => bail!(
                "a micro-batch without targets has no loss\nhint: Pass::train(inputs, targets) makes one that has"
            ),
        }
    }

    /// Whether there are targets.
    pub fn has_targets(&self) -> bool {
        self.targets.is_some()
    }

    /// The documents that the sequences are made of, if they have several.
    pub fn documents(&self) -> Option<&DocumentStarts> {
        self.documents.as_ref()
    }

    /// Which tokens the rows of this pass are, and which those whose keys and values this rank has: its own, and while a text is generated the
    /// `num_before` tokens before them, as many in each layer.
    ///
    /// # Errors
    /// Inputs of fewer than two dims.
    pub fn rows(&self, num_before: usize) -> Result<AttentionRows> {
        let (b, t) = self.dims()?;
        if let Some(known) = self.rows.get() {
            if known.keys().num_rows() != b * (num_before + t) && self.cut.is_none() {
                bail!(
                    "a pass goes on after {num_before} tokens that went on after others before\nhint: a Pass for each call"
                );
            }
            return Ok(known.clone());
        }
        let rows = match (&self.cut, &self.documents) {
            (Some(cut), _) => cut.own().clone().into(),
            (None, Some(documents)) => documents.clone().into(),
            (None, None) if num_before == 0 => Runs::sequences(b, t).into(),
            (None, None) => AttentionRows::new(
                Runs::after(b, num_before, t),
                Runs::sequences(b, num_before + t),
            ),
        };
        Ok(self.rows.get_or_init(|| rows).clone())
    }

    /// What a context-parallel rank computes of this pass; all of it if the group is this rank alone.
    ///
    /// # Errors
    /// Inputs or targets that are not (b, t, ..).
    pub(crate) fn cut(&self, cp: &ProcessGroup) -> Result<Self> {
        if cp.world_size() == 1 {
            return Ok(self.clone());
        }
        let cut = Cut::new(self, cp)?;
        let targets = self.targets.as_ref().map(|targets| cut.take(targets));
        Ok(Self {
            inputs: cut.take(&self.inputs)?,
            targets: targets.transpose()?,
            documents: None,
            rows: Arc::default(),
            cut: Some(Arc::new(cut)),
            ..self.clone()
        })
    }

    /// If this is a part of a micro-batch that context-parallel ranks share, which one.
    pub(crate) fn of_cut(&self) -> Option<&Arc<Cut>> {
        self.cut.as_ref()
    }

    /// While a text is generated, what comes before the inputs.
    pub fn cache(&self) -> Option<&KeyValueCache> {
        match &self.mode {
            Mode::Generate(cache) => Some(cache),
            Mode::Train(_) | Mode::Evaluate => None,
        }
    }

    fn of_training(&self) -> Option<&Training> {
        match &self.mode {
            Mode::Train(training) => Some(training),
            Mode::Evaluate | Mode::Generate(_) => None,
        }
    }

    /// Whether this is a training pass.
    pub fn is_training(&self) -> bool {
        self.of_training().is_some()
    }

    /// The gradient of the loss: 1 but for types whose small gradients vanish.
    pub fn loss_scale(&self) -> f64 {
        self.of_training().map_or(1.0, |of| of.loss_scale)
    }

    /// How many updates came before this training pass; 0 outside of training.
    pub fn step(&self) -> usize {
        self.of_training().map_or(0, |of| of.step)
    }

    /// The seed of what this training pass draws at random: that of [`LoraConfig`](crate::LoraConfig) or of
    /// [`ParamStore::init`](crate::ParamStore::init), else 0; 0 outside of training.
    pub fn seed(&self) -> u64 {
        self.of_training().map_or(0, |of| of.seed)
    }

    /// Numbers that the sequences of a training pass are known by, from which follows what is dropped; `None` outside of training.
    pub(super) fn sequence_keys(&self) -> Result<Option<&SequenceKeys>> {
        let Some(training) = self.of_training() else {
            return Ok(None);
        };
        if let Some(known) = training.sequences.get() {
            return Ok(Some(known));
        }
        // Of whole sequences, of which no rank of several has all tokens after the cut.
        let whole = self.cut.as_ref().map_or(self, |cut| &cut.whole);
        let keys = SequenceKeys::new(whole, training.seed, training.step)?;
        Ok(Some(training.sequences.get_or_init(|| keys)))
    }

    /// `xs` (b, t, ..), (b, ..) or (b · t, ..), as this rank has it outside of `region`, with each value dropped with this probability and the
    /// others times 1 / (1 - probability), in candle's graph. What is dropped follows from the seed, the step, what the sequence holds, the block,
    /// `name` and the value's place in the whole tensor: it is the same on every layout, and when a forward pass runs again. What a block drops
    /// in several places needs several names. Outside of training it is `xs`.
    ///
    /// `region` is that of the model, or `&mesh.tp` where each rank has all rows. Inside of a region, as after a
    /// [`ColumnParallelLinear`](crate::ColumnParallelLinear), ranks have other features or heads: [`Self::dropout_sharded`].
    ///
    /// # Errors
    /// A probability that is not in 0..1, and rows that are not those of the pass that this rank has outside of `region`.
    pub fn dropout(
        &self,
        xs: &Tensor,
        probability: f64,
        name: &str,
        region: impl Into<Region>,
    ) -> Result<Tensor> {
        self.dropped(xs, probability, name, &MaskPlace::Outside(&region.into()))
    }

    /// [`Self::dropout`] inside of a tensor-parallel region: `xs` has all rows, and of one dim the part `shard`: `shard.along(2)` of the features
    /// in (b, t, features), `heads.along(1)` of the heads in (b, heads, t, t). What all ranks have whole there is `Shard::new(dim, 0..len, len)`.
    ///
    /// # Errors
    /// A probability that is not in 0..1, rows that are not those of the pass, and a dim that has not as many indices as `shard`.
    pub fn dropout_sharded(
        &self,
        xs: &Tensor,
        probability: f64,
        name: &str,
        shard: &Shard,
    ) -> Result<Tensor> {
        self.dropped(xs, probability, name, &MaskPlace::Inside(shard))
    }

    fn dropped(
        &self,
        xs: &Tensor,
        probability: f64,
        name: &str,
        place: &MaskPlace<'_>,
    ) -> Result<Tensor> {
        if !(0.0..1.0).contains(&probability) {
            bail!("dropout {name}: the probability is {probability}; expected 0 <= p < 1");
        }
        if let MaskPlace::Outside(region) = place
            && !region.divides_rows()
        {
            note_entered(xs, region.tp())?;
        }
        let mask = place.mask(xs, probability, name, self);
        match mask.map_err(|err| err.context(format!("dropout {name}")))? {
            None => Ok(xs.clone()),
            Some(mask) => (xs * mask)?.contiguous(),
        }
    }

    /// Number of sequences and of positions in each: the first two dims of the inputs.
    ///
    /// # Errors
    /// Inputs of fewer dims.
    pub fn dims(&self) -> Result<(usize, usize)> {
        match self.inputs.dims() {
            [b, t, ..] => Ok((*b, *t)),
            dims => bail!("the inputs of a micro-batch have shape {dims:?}; expected (b, t, ..)"),
        }
    }

    /// Number of targets that are not [`IGNORE_INDEX`], of ids; of numbers, how many there are.
    ///
    /// # Errors
    /// There are no targets.
    pub fn num_targets(&self) -> Result<usize> {
        let targets = self.targets()?;
        if targets.dtype().is_float() {
            return Ok(targets.elem_count());
        }
        let ids = targets.flatten_all()?.to_dtype(candle_core::DType::U32)?;
        let ids = ids.to_vec1::<u32>()?;
        Ok(ids.into_iter().filter(|&id| id != IGNORE_INDEX).count())
    }
}
