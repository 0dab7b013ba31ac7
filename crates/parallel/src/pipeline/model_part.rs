//! A rank's part of a model: its stages, contiguous ranges of blocks, and their parameters.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use candle_comm::{Mesh, ProcessGroup};
use candle_core::{DType, Device, Error, Result, Shape, Tensor, bail};
use twox_hash::XxHash64;

use super::block::{Block, Link, plain_head};
use super::border::{Borders, packed};
use super::plain::PlainHead;
use super::stage_block::StageBlock;
use crate::agreement::Facts;
use crate::params::{ParamBuilder, Parameters, is_about_released};
use crate::pass::{Early, Loss, Pass, Recompute, Region};
use crate::pipeline_layout::PipelineLayout;
use crate::program::Program;
use crate::schedule::Plan;

/// What a rank has of a model: its stages, one or several, in the order of the model, and the parameters of all of them.
pub struct ModelPart {
    stages: Vec<Stage>,
    layout: PipelineLayout,
    hidden_size: usize,
    /// What the blocks give, if that is not (b, t, hidden).
    borders: Option<Box<Borders>>,
    /// How tensor-parallel ranks divide the tensors between blocks.
    pub(crate) region: Region,
    dtype: DType,
    device: Device,
    pub(super) tp: ProcessGroup,
    params: Parameters,
    /// Passes of blocks since those of a step, or of an evaluation, began.
    pub(super) num_passes: AtomicU64,
    /// A hash of what is recomputed of each block of the model.
    pub(crate) recompute: u64,
    /// The plan that ran last, and the list of this rank's actions that was lowered from it.
    pub(crate) program: Mutex<Option<(Arc<Plan>, Arc<Program>)>>,
}

/// A whole model, which gives its loss.
struct Whole<M, L> {
    model: M,
    loss: L,
}

impl<M, L> PlainHead for Whole<M, L>
where
    M: Send + Sync,
    L: Fn(&M, &Pass) -> Result<Loss> + Send + Sync,
{
    fn loss(&self, _inputs: &Tensor, pass: &Pass) -> Result<Loss> {
        (self.loss)(&self.model, pass)
    }
}

/// A contiguous range of a model's blocks.
struct Stage {
    /// Its number in the model.
    index: usize,
    blocks: Vec<StageBlock>,
}

/// The error of building a block; if it is that of values which are not in memory, why they are not.
fn about_released_while_building(err: Error) -> Error {
    match is_about_released(&err) {
        false => err,
        true => err.context(
            "the values of parameters are not in memory while blocks are built with ZeRO-3 or offloaded weights\nhint: compute with them in \
             the forward pass; even without these, what is computed from them while the block is built never sees an update",
        ),
    }
}

impl ModelPart {
    /// Builds this rank's blocks of a chain of `num_blocks`, divided as [`PipelineLayout::even`] says: `build` gets the index of a block and
    /// the builder of its parameters. Every rank of the mesh must call it.
    ///
    /// # Errors
    /// What `build` returns, more ranks of a pipeline than blocks, a last block that is no head, and whatever ranks have not alike.
    pub fn build(
        mesh: &Mesh,
        vb: &ParamBuilder,
        num_blocks: usize,
        hidden_size: usize,
        build: impl Fn(usize, ParamBuilder) -> Result<Block>,
    ) -> Result<Self> {
        let layout = PipelineLayout::even(num_blocks, mesh.pp.world_size())?;
        Self::build_stages(mesh, vb, layout, hidden_size, build)
    }

    /// [`Self::build`] with stages as `layout` has them.
    ///
    /// # Errors
    /// As [`Self::build`], and a layout for another number of ranks.
    pub fn build_stages(
        mesh: &Mesh,
        vb: &ParamBuilder,
        layout: PipelineLayout,
        hidden_size: usize,
        build: impl Fn(usize, ParamBuilder) -> Result<Block>,
    ) -> Result<Self> {
        layout.check_ranks(mesh.pp.world_size())?;
        let num_blocks = layout.num_blocks();
        let building = vb.store().building();
        let build = |index: usize| {
            let block = build(index, vb.block(index, num_blocks));
            let block = block.map_err(|err| match vb.store().defers_values() {
                true => about_released_while_building(err),
                false => err,
            });
            let block = block.and_then(|block| {
                if matches!(block.link, Link::Head(_)) != (index + 1 == num_blocks) {
                    bail!(
                        "the last block of a model, and no other, is a head, which gives the loss\nhint: plain_head or head_block makes one"
                    );
                }
                if mesh.degrees.cp > 1 && !block.is_of_rows {
                    bail!(
                        "the block does not say how it attends, so context-parallel ranks (cp {}) cannot each have a part of a sequence\nhint: \
                         cp = 1, or Block::of_rows of a block that computes each row alone or attends by ContextParallel",
                        mesh.degrees.cp
                    );
                }
                Ok(block)
            });
            block.map_err(|err| err.context(format!("building block {index}")))
        };
        let stages = layout.stages_of(mesh.pp.rank());
        let stages = stages.map(|stage| {
            let blocks = layout.blocks(stage).map(|index| Ok((index, build(index)?)));
            Ok((stage, blocks.collect::<Result<Vec<_>>>()?))
        });
        let stages = stages.collect::<Result<Vec<_>>>()?;
        drop(building);
        let mut facts = Facts::default();
        facts.add("the number of blocks", num_blocks);
        facts.add("the stages", format!("{layout:?}"));
        facts.add("the hidden size", hidden_size);
        facts.add("the type", vb.dtype().as_str());
        let params = vb.store().seal(mesh, facts, &layout)?;
        let stages = stages.into_iter().map(|(index, blocks)| {
            let blocks = blocks.into_iter();
            let blocks = blocks.map(|(index, block)| StageBlock::new(index, block, &params));
            Stage {
                index,
                blocks: blocks.collect(),
            }
        });
        Ok(Self {
            stages: stages.collect(),
            layout,
            hidden_size,
            borders: None,
            region: Region::from(&mesh.tp),
            dtype: vb.dtype(),
            device: vb.device().clone(),
            tp: mesh.tp.clone(),
            params,
            num_passes: AtomicU64::new(0),
            recompute: 0,
            program: Mutex::default(),
        })
    }

    /// A model as it is, as the one block of one stage: `build` makes it, and `loss` is that of a micro-batch, in candle's graph. It is trained in
    /// replicas, with ZeRO; tensor-parallel ranks each compute all of it. Every rank of the mesh must call it.
    ///
    /// # Errors
    /// As [`Self::build`]; more than one pipeline rank.
    pub fn whole<M: Send + Sync + 'static>(
        mesh: &Mesh,
        vb: &ParamBuilder,
        build: impl Fn(ParamBuilder) -> Result<M>,
        loss: impl Fn(&M, &Pass) -> Result<Loss> + Clone + Send + Sync + 'static,
    ) -> Result<Self> {
        Self::build(mesh, vb, 1, 0, |_, vb| {
            Ok(plain_head(Whole {
                model: build(vb)?,
                loss: loss.clone(),
            }))
        })
    }

    /// Begins the passes of a step or of an evaluation, which all ranks that share a replica begin alike.
    pub(crate) fn begin(&self) {
        self.num_passes.store(0, Ordering::Relaxed);
    }

    /// The part with activations recomputed: `of_block` tells what to keep of the block with an index. Every rank of the mesh
    /// must be told the same.
    pub fn with_recompute(mut self, of_block: impl Fn(usize) -> Recompute) -> Self {
        let last = self.layout.num_blocks() - 1;
        let of_model: Vec<Recompute> = (1..last).map(of_block).collect();
        let blocks = self.stages.iter_mut().flat_map(|stage| &mut stage.blocks);
        for block in blocks.filter(|block| (1..last).contains(&block.index)) {
            block.recompute = of_model[block.index - 1];
        }
        self.program = Mutex::default();
        // As without this call if nothing is recomputed.
        let is_any = of_model.iter().any(|of_block| *of_block != Recompute::None);
        self.recompute = if is_any {
            XxHash64::oneshot(0, format!("{of_model:?}").as_bytes())
        } else {
            0
        };
        self
    }

    /// The parameters of this rank.
    pub fn params(&self) -> &Parameters {
        &self.params
    }

    /// The stages of the model, and which rank has which.
    pub fn layout(&self) -> &PipelineLayout {
        &self.layout
    }

    /// Whether this rank runs the last block of the model.
    pub fn is_last(&self) -> bool {
        let last = self.stages.last().map(|stage| stage.index + 1);
        last == Some(self.layout.num_stages())
    }

    /// Indices of the blocks of this rank.
    pub fn block_indices(&self) -> impl Iterator<Item = usize> {
        let blocks = self.stages.iter().flat_map(|stage| &stage.blocks);
        blocks.map(|block| block.index)
    }

    /// Says what each block, by its index, gives to the next in a pass: shapes and types of tensors, which may depend on the micro-batch.
    /// Without this stages pass on one tensor (b, t, hidden) of the model's type. A block that gives several has them by
    /// [`pack`](crate::pack), and the next by [`unpack`](crate::unpack). Every rank says the same; what a block gives is compared with it, also
    /// on one rank.
    pub fn with_borders(
        self,
        borders: impl Fn(usize, &Pass) -> Result<Vec<(Shape, DType)>> + Send + Sync + 'static,
    ) -> Self {
        Self {
            borders: Some(Box::new(borders)),
            ..self
        }
    }

    /// The part of a model whose blocks get and give what this rank has outside of `region`: with sequence parallelism some of the rows.
    pub fn with_region(self, region: Region) -> Self {
        Self { region, ..self }
    }

    /// Shape and type of what a block gives to the next.
    fn border(&self, block: usize, pass: &Pass) -> Result<(Shape, DType)> {
        match &self.borders {
            Some(borders) => packed(borders(block, pass)?),
            None => {
                let (b, t) = pass.dims()?;
                let (b, t) = self.region.dims_outside(b, t);
                Ok((Shape::from((b, t, self.hidden_size)), self.dtype))
            }
        }
    }

    /// Shape and type of what a stage gives to the next.
    pub(crate) fn border_of_stage(&self, stage: usize, pass: &Pass) -> Result<(Shape, DType)> {
        match self.layout.blocks(stage).last() {
            Some(block) => self.border(block, pass),
            None => bail!("stage {stage} has no blocks"),
        }
    }

    /// An error if a block gives something else than other stages, or its user, expect of it.
    pub(super) fn check_border(&self, block: usize, xs: &Tensor, pass: &Pass) -> Result<()> {
        let is_of_stage =
            (0..self.layout.num_stages()).any(|stage| self.layout.blocks(stage).end == block + 1);
        if !is_of_stage && self.borders.is_none() {
            return Ok(());
        }
        let (shape, dtype) = self.border(block, pass)?;
        if xs.shape() != &shape || xs.dtype() != dtype {
            bail!(
                "block {block} gives {:?} of shape {:?} to the next; expected {dtype:?} of shape {shape:?}\nhint: \
                 ModelPart::with_borders tells what passes between blocks, if it is not one tensor (b, t, hidden)",
                xs.dtype(),
                xs.shape()
            );
        }
        Ok(())
    }

    /// Type of weights, and of what passes between stages unless [`Self::with_borders`] says otherwise.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Where this rank computes.
    pub fn device(&self) -> &Device {
        &self.device
    }

    pub(super) fn block(&self, index: usize) -> Result<&StageBlock> {
        let mut blocks = self.stages.iter().flat_map(|stage| &stage.blocks);
        match blocks.find(|block| block.index == index) {
            Some(block) => Ok(block),
            None => bail!("block {index} of the model is not on this rank"),
        }
    }

    /// Whether the input half of a block's backward pass computes all gradients of its weights: jobs of what was computed again would keep it, which was
    /// not kept to save memory.
    pub(super) fn writes_early(&self, block: usize, early: Early) -> bool {
        let block = self.block(block);
        early.large && block.is_ok_and(|block| block.recompute == Recompute::Full)
    }

    /// Whether what leaves a block in a pass is what all tensor-parallel ranks share: (b, t, hidden), or the loss. A model
    /// that divides the sequence between its blocks has something else.
    pub(super) fn is_shared(&self, values: &Tensor, pass: &Pass) -> bool {
        let dims = pass.dims().ok().filter(|_| !self.region.divides_rows());
        values.rank() == 0 || dims.is_some_and(|(b, t)| values.dims() == [b, t, self.hidden_size])
    }

    /// The error of a block's forward pass; if it is that of values which are not in memory, whose they are.
    pub(super) fn about_released(
        &self,
        err: Error,
        block: &StageBlock,
        xs: &Tensor,
        pass: &Pass,
    ) -> Error {
        if !is_about_released(&err) {
            let has_ids = block.index == 0 || block.is_head();
            return if has_ids { about_types(err, pass) } else { err };
        }
        let fails = || {
            let again = block.infer(xs, pass);
            again.is_err_and(|err| is_about_released(&err))
        };
        match self.params.missed(&block.params, fails) {
            None => err,
            Some(param) => err.context(format!(
                "block {} uses the values of parameter {}, for which another block asked: as replicas divide the weights (ZeRO-3) or they are \
                 offloaded, they are in memory for blocks that asked for them only\nhint: each block that uses a shared weight asks for it, by \
                 vb.tied(), instead of keeping another block's tensor",
                block.index, param.name
            )),
        }
    }
}

/// The error of a block that reads the micro-batch; if it is that of a type, which types those of the micro-batch are.
fn about_types(err: Error, pass: &Pass) -> Error {
    let targets = pass.targets().ok();
    let all_are_ids =
        (targets.into_iter().chain([pass.inputs()])).all(|xs| xs.dtype() == DType::U32);
    if all_are_ids || !is_about_type(&err) {
        return err;
    }
    let of = |xs: &Tensor| format!("{:?} of shape {:?}", xs.dtype(), xs.shape());
    let targets = targets.map_or_else(|| "none".to_string(), of);
    err.context(format!(
        "the inputs of the micro-batch are {}, its targets {targets}\nhint: a model of tokens takes ids and targets of type U32 \
         (to_dtype(DType::U32))",
        of(pass.inputs())
    ))
}

/// Whether candle says that a type is not the one that an operation takes.
fn is_about_type(err: &Error) -> bool {
    match err {
        Error::WithBacktrace { inner, .. }
        | Error::Context { inner, .. }
        | Error::WithPath { inner, .. } => is_about_type(inner),
        Error::UnexpectedDType { .. }
        | Error::UnsupportedDTypeForOp(..)
        | Error::DTypeMismatchBinaryOp { .. } => true,
        _ => false,
    }
}
