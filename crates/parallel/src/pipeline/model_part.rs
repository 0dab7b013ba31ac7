//! A rank's part of a model: its stages, contiguous ranges of blocks, and their parameters.

use std::sync::atomic::{AtomicU64, Ordering};

use candle_comm::{Mesh, ProcessGroup, Scope};
use candle_core::{DType, Device, Error, Result, Shape, Tensor, bail};
use twox_hash::XxHash64;

use super::block::{Block, Link, plain_head};
use super::border::{Borders, packed};
use super::plain::PlainHead;
use super::stage_block::{SavedBlock, StageBlock};
use crate::agreement::Facts;
use crate::checksums::Shared;
use crate::gradients::Gradients;
use crate::layers::Head;
use crate::offload::Stored;
use crate::params::{ParamBuilder, Parameters, is_about_released};
use crate::pass::{
    Early, InputHalf, Loss, Pass, Recompute, Region, SeenRegions, WeightJobs, watched,
};
use crate::pipeline_layout::PipelineLayout;
use crate::schedule::Instruction;

/// What a rank has of a model: its stages, one or several, in the order of the model, and the parameters of all of them.
pub struct ModelPart {
    stages: Vec<Stage>,
    layout: PipelineLayout,
    hidden_size: usize,
    /// What the blocks give, if that is not (b, t, hidden).
    borders: Option<Box<Borders>>,
    /// How tensor-parallel ranks divide the tensors between blocks.
    pub(super) region: Region,
    dtype: DType,
    device: Device,
    tp: ProcessGroup,
    params: Parameters,
    /// Passes of blocks since those of a step, or of an evaluation, began.
    num_passes: AtomicU64,
    /// A hash of what is recomputed of each block of the model.
    pub(super) recompute: u64,
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

/// What the backward pass of a unit needs: what each block of the stage has kept.
///
/// The tape carries gradients from one block to the one before it and drops what a block has kept when it is done.
pub(super) struct StageTape {
    saved: Vec<SavedBlock>,
    pass: Pass,
}

/// What a backward pass gives.
pub(super) struct StageGrad {
    /// The gradient of the stage's input; the first stage has none.
    pub input: Option<Tensor>,
    /// Of the last stage.
    pub loss: Option<Loss>,
    /// The weight half of each block, if it was put off: in the order of the backward pass.
    pub jobs: StageJobs,
}

/// The result of a block's pass, and what was watched in it.
#[derive(Default)]
struct SeenInPass {
    /// Collectives of tensor-parallel ranks.
    num_collectives: u64,
    /// Its regions, if they were watched.
    regions: SeenRegions,
}

/// What of a backward pass is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BackwardHalf {
    /// Both halves.
    Whole,
    /// The input half, and of the weight half these.
    Input(Early),
}

/// The weight half of a unit: of each block by its index.
pub(super) type StageJobs = Vec<(usize, WeightJobs)>;

const FORWARD: &str = "forward pass";
const BACKWARD: &str = "backward pass";

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
    pub(super) fn begin(&self) {
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
    pub(super) fn border_of_stage(&self, stage: usize, pass: &Pass) -> Result<(Shape, DType)> {
        match self.layout.blocks(stage).last() {
            Some(block) => self.border(block, pass),
            None => bail!("stage {stage} has no blocks"),
        }
    }

    /// An error if a block gives something else than other stages, or its user, expect of it.
    fn check_border(&self, block: usize, xs: &Tensor, pass: &Pass) -> Result<()> {
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

    fn stage(&self, index: usize) -> Result<&Stage> {
        match self.stages.iter().find(|stage| stage.index == index) {
            Some(stage) => Ok(stage),
            None => bail!("stage {index} of the pipeline is not on this rank"),
        }
    }

    /// Runs the blocks of a stage on what the stage before gave (`None` for the first one, which takes the inputs): its output, which the last
    /// stage has none of, and the tape. `after` is the block that this rank runs next.
    pub(super) fn forward(
        &self,
        stage: usize,
        mut input: Option<Stored>,
        pass: Pass,
        after: Option<usize>,
        gradients: &mut Gradients,
    ) -> Result<(Option<Tensor>, StageTape)> {
        let stage = self.stage(stage)?;
        let mut saved = Vec::with_capacity(stage.blocks.len());
        let mut xs = Some(match &input {
            Some(input) => input.get()?,
            None => pass.inputs().clone(),
        });
        let num_frozen = stage.num_frozen(&self.params);
        for (position, block) in stage.blocks.iter().enumerate() {
            let (stored, Some(input)) = (input.take(), xs.take()) else {
                bail!("a head is followed by another block")
            };
            if block.is_head() {
                // Its weights are needed in the backward pass alone.
                let kept = block.forward(&input, &pass)?.1;
                saved.push(kept.put_away(&self.params, stored)?);
                continue;
            }
            let next = stage.blocks.get(position + 1);
            let next = next.filter(|next| !next.is_head());
            let next = next.map(|next| next.index).or(after);
            let watch = gradients.watches_regions();
            let (result, seen) = self.run(FORWARD, block, next, watch, || {
                if position < num_frozen {
                    block.forward_frozen(&input, &pass, gradients)
                } else {
                    block.forward(&input, &pass)
                }
            });
            let (output, kept) =
                result.map_err(|err| self.about_released(err, block, &input, &pass))?;
            gradients.count_collectives(seen.num_collectives);
            gradients.note_regions((FORWARD, block.index), seen.regions)?;
            if let Some(output) = &output {
                self.check_border(block.index, output, &pass)?;
                if self.is_shared(output, &pass) {
                    gradients.note_border(Shared::Output(block.index), output)?;
                }
            }
            xs = output;
            drop(input);
            saved.push(kept.put_away(&self.params, stored)?);
            self.params.meter().count_activations(&self.device)?;
        }
        Ok((xs, StageTape { saved, pass }))
    }

    /// Whether what leaves a block in a pass is what all tensor-parallel ranks share: (b, t, hidden), or the loss. A model
    /// that divides the sequence between its blocks has something else.
    fn is_shared(&self, values: &Tensor, pass: &Pass) -> bool {
        let dims = pass.dims().ok().filter(|_| !self.region.divides_rows());
        values.rank() == 0 || dims.is_some_and(|(b, t)| values.dims() == [b, t, self.hidden_size])
    }

    /// The error of a block's forward pass; if it is that of values which are not in memory, whose they are.
    fn about_released(&self, err: Error, block: &StageBlock, xs: &Tensor, pass: &Pass) -> Error {
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

    /// Does `pass`, which is called `name`, with the parameters of a block in place; meanwhile those of the block `next` come. The result,
    /// and what was seen of the pass, of its regions if they are to be watched.
    fn run<T>(
        &self,
        name: &'static str,
        block: &StageBlock,
        next: Option<usize>,
        watches_regions: bool,
        pass: impl FnOnce() -> Result<T>,
    ) -> (Result<T>, SeenInPass) {
        let scope = Scope {
            what: name,
            block: block.index,
            number: self.num_passes.fetch_add(1, Ordering::Relaxed),
        };
        let mut seen = SeenInPass::default();
        let result = self.params.unshard(block.index).and_then(|()| {
            if let Some(next) = next {
                self.params.prefetch(next)?;
            }
            self.params.check_present(&block.params)?;
            let ((result, regions), num_collectives) =
                scope.run(&self.tp, || watched(watches_regions, pass));
            seen = SeenInPass {
                num_collectives,
                regions,
            };
            let result = result?;
            self.params.reshard(block.index, next)?;
            Ok(result)
        });
        let result = result.map_err(|err| err.context(format!("{name} of block {}", block.index)));
        (result, seen)
    }

    /// Runs the blocks of a stage without keeping anything for a backward pass, but for its head: what that is to be given, if the stage is the
    /// last one. `observe` gets what each block, by its index, gives. `after` is the block that this rank runs next.
    pub(super) fn infer(
        &self,
        stage: usize,
        input: Option<Stored>,
        pass: &Pass,
        after: Option<usize>,
        observe: &mut dyn FnMut(usize, &Tensor) -> Result<()>,
    ) -> Result<Tensor> {
        let stage = self.stage(stage)?;
        let mut xs = match input {
            Some(input) => input.get()?,
            None => pass.inputs().clone(),
        };
        for (position, block) in stage.blocks.iter().enumerate() {
            if block.is_head() {
                break;
            }
            let next = stage.blocks.get(position + 1);
            let next = next.map(|next| next.index).or(after);
            let (output, _) = self.run(FORWARD, block, next, false, || block.infer(&xs, pass));
            xs = output.map_err(|err| self.about_released(err, block, &xs, pass))?;
            self.check_border(block.index, &xs, pass)?;
            observe(block.index, &xs)?;
        }
        Ok(xs)
    }

    /// What `work` gets of the model's head, whose weights are in place; on the rank that has it.
    pub(super) fn with_head<T>(
        &self,
        xs: &Tensor,
        pass: &Pass,
        work: impl FnOnce(&dyn Head) -> Result<T>,
    ) -> Result<T> {
        let blocks = self.stages.last().map(|stage| stage.blocks.as_slice());
        let last = blocks.and_then(<[StageBlock]>::last);
        let Some((block, Link::Head(head))) = last.map(|block| (block, &block.block.link)) else {
            bail!("the head of the model is not on this rank")
        };
        let (result, _) = self.run(FORWARD, block, None, false, || work(head.as_ref()));
        result.map_err(|err| self.about_released(err, block, xs, pass))
    }

    /// Runs the backward pass of a unit, from the gradient of the stage's output, which the last stage has none of. The gradients of the
    /// parameters go to `gradients`, or where `half` puts them off into what is returned. `after` is the block that this rank runs next.
    pub(super) fn backward(
        &self,
        stage: usize,
        tape: StageTape,
        upstream: Option<Tensor>,
        after: Option<usize>,
        gradients: &mut Gradients,
        half: BackwardHalf,
    ) -> Result<StageGrad> {
        let stage = self.stage(stage)?;
        let num_frozen = stage.num_frozen(&self.params);
        let mut grad = StageGrad {
            input: upstream,
            loss: None,
            jobs: Vec::new(),
        };
        for (position, saved) in tape.saved.into_iter().enumerate().rev() {
            let (block, saved) = (&stage.blocks[position], saved.get()?);
            if let SavedBlock::Frozen = saved {
                grad.input = None;
                return Ok(grad);
            }
            let of_head = match (&saved, block.is_head()) {
                (SavedBlock::Input { xs, .. }, true) => Some(xs.get()?),
                _ => None,
            };
            let upstream = grad.input.take();
            let next = position.checked_sub(1).filter(|&next| next >= num_frozen);
            let next = next.map(|next| stage.blocks[next].index).or(after);
            let mut jobs = WeightJobs::new(self.params.sharded().is_none());
            let watch = gradients.watches_regions();
            let (result, seen) = self.run(BACKWARD, block, next, watch, || {
                let (pass, params) = (&tape.pass, &self.params);
                let mut now = gradients.of_stage(stage.index);
                let BackwardHalf::Input(early) = half else {
                    return block.backward(saved, upstream, pass, params, &mut now);
                };
                let mut sink = InputHalf {
                    waiting: &mut jobs,
                    now: &mut now,
                    early,
                    // Jobs of what was computed again would keep it, which was not kept to save memory.
                    none_waits: early.large && block.recompute == Recompute::Full,
                };
                block.backward(saved, upstream, pass, params, &mut sink)
            });
            let (input, loss) = match (result, of_head) {
                (Err(err), Some(xs)) => {
                    return Err(self.about_released(err, block, &xs, &tape.pass));
                }
                (result, _) => result?,
            };
            gradients.count_collectives(seen.num_collectives);
            gradients.note_regions((BACKWARD, block.index), seen.regions)?;
            if let Some(loss) = loss {
                gradients.note_border(Shared::Output(block.index), &loss.sum)?;
                grad.loss = Some(loss);
            }
            if let Some(input) = &input
                && self.is_shared(input, &tape.pass)
            {
                gradients.note_border(Shared::InputGrad(block.index), input)?;
            }
            grad.input = input;
            match half {
                BackwardHalf::Whole => gradients.block_done(block.index)?,
                _ => grad.jobs.push((block.index, jobs)),
            }
            self.params.meter().count_activations(&self.device)?;
        }
        Ok(grad)
    }

    /// The first block whose weights an instruction needs.
    pub(super) fn first_block(&self, instruction: Instruction) -> Option<usize> {
        let stage = self.stage(instruction.unit().stage).ok()?;
        let first = match instruction {
            Instruction::Forward(_) => stage.blocks.first().filter(|first| !first.is_head()),
            Instruction::Backward(_) | Instruction::InputGrad(_) => {
                let num_frozen = stage.num_frozen(&self.params);
                stage.blocks[num_frozen..].last()
            }
            _ => None,
        };
        first.map(|first| first.index)
    }

    /// Runs the weight half of a unit.
    pub(super) fn weight_half(
        &self,
        stage: usize,
        jobs: StageJobs,
        gradients: &mut Gradients,
    ) -> Result<()> {
        for (block, jobs) in jobs {
            let run = jobs.run(&mut gradients.of_stage(stage));
            run.map_err(|err| err.context(format!("gradients of the weights of block {block}")))?;
            gradients.block_done(block)?;
        }
        Ok(())
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

impl Stage {
    /// Number of blocks, from the first of the model on, before the first one with a trainable parameter: no gradient needs to reach
    /// them, and the tape has nothing of them. 0 but in the first stage: a later one does not know what those before it train.
    fn num_frozen(&self, params: &Parameters) -> usize {
        let is_trained = |block: &&StageBlock| {
            let mut own = block.params.iter();
            own.any(|&index| params.get(index).trainable)
        };
        match self.index {
            0 => {
                let blocks = self.blocks.iter();
                blocks.take_while(|block| !is_trained(block)).count()
            }
            _ => 0,
        }
    }
}
