//! One link of the chain that a model is, of any kind.

use std::any::Any;

use candle_comm::Degrees;
use candle_core::{Error, Result, Tensor};

use super::plain::{Plain, PlainBlock, PlainHead};
use crate::layers::{Head, Layer};
use crate::params::{ModelSpec, ParamBuilder};
use crate::pass::{GradientSink, Pass, Tape};
use crate::pipeline_layout::PipelineLayout;

/// A part of a model between two borders of the tape: an embedding, a decoder layer, a head with its loss.
///
/// A [`Layer`] becomes a block by [`layer_block`], a [`Head`] by [`head_block`], model parts in plain candle by [`plain_block`] and
/// [`plain_head`].
///
/// Tensor-parallel ranks get and give the same, bit by bit. Only where what passes between blocks has another shape than (b, t, hidden) may
/// it be a part of its own on each, of the sequence for example.
///
/// The first block of a model gets the [inputs](Pass::inputs), on the CPU wherever the model computes; blocks between get and give
/// (b, t, hidden); the last one is a head.
pub struct Block {
    pub(super) link: Link,
    pub(super) is_of_rows: bool,
}

pub(super) enum Link {
    Layer(Box<dyn AnyLayer>),
    Head(Box<dyn Head>),
}

impl Block {
    fn new(link: Link) -> Self {
        Self {
            link,
            is_of_rows: false,
        }
    }

    /// What the layer or head says that stays in memory between its passes: [`Layer::tape`], [`Head::tape`].
    pub fn tape(&self) -> Option<Tape> {
        match &self.link {
            Link::Layer(layer) => layer.tape(),
            Link::Head(head) => head.tape(),
        }
    }

    /// Says that the block computes each row alone, or attends as [`Pass::rows`] and [`ContextParallel`](crate::ContextParallel) say: then
    /// context-parallel ranks may each have a part of a sequence.
    pub fn of_rows(self) -> Self {
        Self {
            is_of_rows: true,
            ..self
        }
    }
}

impl ModelSpec {
    /// What the blocks of a model ask for that `build` makes, which gets the index of a block and the builder of its parameters. It is called
    /// once for each block, in order, with the store of `vb`, which from then on [has no values](crate::ParamStore::without_values). Its
    /// layers lie on a tensor-parallel group of `degrees.tp` ranks: any of them, as a [`Shard`](crate::Shard) knows the parts of all.
    /// [`ProcessGroup::unconnected`](candle_comm::ProcessGroup::unconnected) gives one on a rank alone.
    ///
    /// # Errors
    /// Degrees of 0, stages on another number of ranks, settings of ZeRO and adapters that do not fit; what `build` returns; parts that leave something
    /// of a parameter out.
    pub fn describe(
        layout: PipelineLayout,
        degrees: Degrees,
        vb: &ParamBuilder,
        build: impl Fn(usize, ParamBuilder) -> Result<Block>,
    ) -> Result<Self> {
        degrees.check()?;
        layout.check_ranks(degrees.pp)?;
        let store = vb.store().clone().without_values();
        let building = store.building();
        let num_blocks = layout.num_blocks();
        let tapes = (0..num_blocks).map(|index| {
            let built = build(index, vb.block(index, num_blocks));
            let block = built.map_err(|err| err.context(format!("building block {index}")))?;
            Ok(block.tape())
        });
        let tapes = tapes.collect::<Result<_>>()?;
        drop(building);
        let params = store.specs(0, &layout);
        let model = Self::described(params, layout, degrees, store.slot_alignment(), tapes)?;
        store.check(&model, degrees.dp * degrees.cp)?;
        Ok(model)
    }
}

/// A block that is one layer.
pub fn layer_block<L>(layer: L) -> Block
where
    L: Layer + 'static,
    L::Saved: 'static,
{
    Block::new(Link::Layer(Box::new(layer)))
}

/// The last block, with a backward pass of its own.
pub fn head_block(head: impl Head + 'static) -> Block {
    Block::new(Link::Head(Box::new(head)))
}

/// A block that candle differentiates.
pub fn plain_block(block: impl PlainBlock + 'static) -> Block {
    layer_block(Plain::new(block))
}

/// The last block, which candle differentiates.
pub fn plain_head(head: impl PlainHead + 'static) -> Block {
    head_block(Plain::new(head))
}

/// A [`Layer`] with whatever it keeps.
pub(super) trait AnyLayer: Send + Sync {
    fn forward(&self, xs: &Tensor, pass: &Pass) -> Result<(Tensor, Box<dyn Any>)>;

    fn backward(
        &self,
        saved: Box<dyn Any>,
        dy: &Tensor,
        pass: &Pass,
        gradients: &mut dyn GradientSink,
    ) -> Result<Option<Tensor>>;

    fn infer(&self, xs: &Tensor, pass: &Pass) -> Result<Tensor>;

    fn tape(&self) -> Option<Tape>;
}

impl<L> AnyLayer for L
where
    L: Layer,
    L::Saved: 'static,
{
    fn forward(&self, xs: &Tensor, pass: &Pass) -> Result<(Tensor, Box<dyn Any>)> {
        let (output, saved) = Layer::forward(self, xs, pass)?;
        Ok((output, Box::new(saved)))
    }

    fn backward(
        &self,
        saved: Box<dyn Any>,
        dy: &Tensor,
        pass: &Pass,
        gradients: &mut dyn GradientSink,
    ) -> Result<Option<Tensor>> {
        let saved = saved
            .downcast::<L::Saved>()
            .map_err(|_| Error::msg("a block was given what another one has kept"))?;
        Layer::backward(self, *saved, dy, pass, gradients)
    }

    fn infer(&self, xs: &Tensor, pass: &Pass) -> Result<Tensor> {
        Layer::infer(self, xs, pass)
    }

    fn tape(&self) -> Option<Tape> {
        Layer::tape(self)
    }
}
