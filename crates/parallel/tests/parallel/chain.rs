//! A small model of parallel layers, trained and saved by the tests.

use std::collections::BTreeMap;

use candle_comm::{Mesh, ProcessGroup};
use candle_core::{D, DType, Device, Result, Tensor};
use candle_nn::Init;
use candle_parallel::Layer as _;
use candle_parallel::checkpoint::gather_full;
use candle_parallel::{
    Block, ColumnParallelLinear, Gradients, Loss, ModelPart, ParamBuilder, ParamStore, Pass,
    PlainBlock, PlainHead, RowParallelLinear, Shard, VocabParallelEmbedding, WEIGHT_INIT,
    column_parallel_linear_shard, plain_block, plain_head, row_parallel_linear,
    vocab_parallel_cross_entropy, vocab_parallel_embedding,
};

use crate::check::random_ids;
use crate::device::device;

pub const HIDDEN: usize = 6;
const INNER: usize = 7;

/// Embedding, layers of two linear maps, head with loss.
#[derive(Clone, Copy)]
pub struct Chain {
    pub vocab: usize,
    pub num_layers: usize,
    /// Whether the head uses the embedding's weight.
    pub tied: bool,
    /// Type of weights and activations.
    pub dtype: DType,
    /// Whether the first linear map of a layer is two in one weight.
    pub fused: bool,
}

/// Values by parameter name.
pub type Values = BTreeMap<String, Vec<f32>>;

struct Embed(VocabParallelEmbedding);

struct Layer {
    norm: Tensor,
    fused: bool,
    up: ColumnParallelLinear,
    down: RowParallelLinear,
}

pub struct LastBlock {
    weight: ColumnParallelLinear,
    shard: Shard,
    tp: ProcessGroup,
}

impl Default for Chain {
    fn default() -> Self {
        Self {
            vocab: 13,
            num_layers: 3,
            tied: false,
            dtype: DType::F32,
            fused: false,
        }
    }
}

impl Chain {
    pub fn num_blocks(&self) -> usize {
        self.num_layers + 2
    }

    /// Block `index` of the chain.
    pub fn block(&self, index: usize, tp: &ProcessGroup, vb: &ParamBuilder) -> Result<Block> {
        Ok(match self.in_graph(index, tp, vb)? {
            Plain::Block(block) => plain_block(AnyBlock(block)),
            Plain::Head(head) => plain_head(*head),
        })
    }

    /// Block `index` of the chain in candle's graph.
    pub fn in_graph(&self, index: usize, tp: &ProcessGroup, vb: &ParamBuilder) -> Result<Plain> {
        if index == 0 {
            let vb = vb.pp("embed");
            let embedding = vocab_parallel_embedding(self.vocab, HIDDEN, tp, vb)?;
            return Ok(Plain::Block(Box::new(Embed(embedding))));
        }
        if index <= self.num_layers {
            let vb = vb.pp("layers").pp(index - 1);
            return Ok(Plain::Block(Box::new(Layer {
                norm: vb.pp("norm").get(HIDDEN, "weight", Init::Const(1.0))?,
                up: {
                    let part = Shard::even(0, INNER, tp)?;
                    let maps = vec![part; if self.fused { 2 } else { 1 }];
                    column_parallel_linear_shard(
                        HIDDEN,
                        Shard::fused(&maps)?,
                        true,
                        tp,
                        vb.pp("up"),
                    )?
                },
                fused: self.fused,
                down: row_parallel_linear(INNER, HIDDEN, true, tp, vb.pp("down"))?,
            })));
        }
        let shard = Shard::even(0, self.vocab, tp)?;
        let vb = match self.tied {
            true => vb.tied().pp("embed"),
            false => vb.pp("head"),
        };
        let shape = (self.vocab, HIDDEN);
        // Of a weight that one of its users takes whole there are no tiles.
        let weight = match self.tied {
            true => vb
                .get_placed(shape, "weight", shard.clone(), WEIGHT_INIT)?
                .into(),
            false => vb.get_tiled(shape, "weight", shard.clone(), WEIGHT_INIT)?,
        };
        Ok(Plain::Head(Box::new(LastBlock {
            weight: ColumnParallelLinear::new(weight, None, tp.clone()),
            shard,
            tp: tp.clone(),
        })))
    }

    /// This rank's blocks.
    pub fn part(&self, mesh: &Mesh, store: &ParamStore) -> Result<ModelPart> {
        let vb = store.builder(self.dtype, &device());
        ModelPart::build(mesh, &vb, self.num_blocks(), HIDDEN, |index, vb| {
            self.block(index, &mesh.tp, &vb)
        })
    }

    /// `num` micro-batches of (2, 3) random tokens.
    pub fn micro_batches(&self, seed: u64, num: usize) -> Result<Vec<Pass>> {
        self.micro_batches_of((2, 3), seed, num)
    }

    /// As [`Self::micro_batches`], of this shape.
    pub fn micro_batches_of(
        &self,
        dims: (usize, usize),
        seed: u64,
        num: usize,
    ) -> Result<Vec<Pass>> {
        let num_ids = dims.0 * dims.1;
        let ids =
            |seed| Tensor::from_vec(random_ids(seed, num_ids, self.vocab), dims, &Device::Cpu);
        (0..num as u64)
            .map(|index| {
                Ok(Pass::train(
                    ids(seed + 2 * index)?,
                    ids(seed + 2 * index + 1)?,
                ))
            })
            .collect()
    }
}

/// A block of any kind.
pub enum Plain {
    Block(Box<dyn PlainBlock>),
    Head(Box<LastBlock>),
}

struct AnyBlock(Box<dyn PlainBlock>);

impl PlainBlock for AnyBlock {
    fn forward(&self, xs: &Tensor, pass: &Pass) -> Result<Tensor> {
        self.0.forward(xs, pass)
    }
}

impl Plain {
    /// The block's output; of the head the loss.
    pub fn forward(&self, xs: &Tensor, pass: &Pass) -> Result<Tensor> {
        match self {
            Self::Block(block) => block.forward(xs, pass),
            Self::Head(head) => Ok(head.loss(xs, pass)?.sum),
        }
    }
}

/// The gradients as those of one target: the global batch has no more.
pub fn one_target<'a>(gradients: &'a mut Gradients, mesh: &Mesh) -> &'a mut Gradients {
    gradients.set_num_targets(usize::from(mesh.dp.rank() == 0));
    gradients
}

impl PlainBlock for Embed {
    fn forward(&self, tokens: &Tensor, pass: &Pass) -> Result<Tensor> {
        self.0.apply(tokens, pass)
    }
}

impl PlainBlock for Layer {
    fn forward(&self, xs: &Tensor, pass: &Pass) -> Result<Tensor> {
        let normed = xs.broadcast_mul(&self.norm)?;
        let inner = match self.up.apply(&normed, pass)? {
            both if self.fused => {
                let maps = both.chunk(2, D::Minus1)?;
                (&maps[0] + &maps[1])?
            }
            inner => inner,
        };
        let inner = inner.tanh()?;
        xs + self.down.apply(&inner, pass)?
    }
}

impl PlainHead for LastBlock {
    fn loss(&self, xs: &Tensor, pass: &Pass) -> Result<Loss> {
        let (b, t, _hidden) = xs.dims3()?;
        let logits = self.weight.apply(xs, pass)?;
        let logits = logits.reshape((b * t, self.shard.len()))?;
        let targets = pass.targets()?.flatten_all()?;
        let sum = vocab_parallel_cross_entropy(&logits, &targets, &self.shard, &self.tp)?;
        Ok(Loss::new(sum.sum_all()?, pass.num_targets()? as f64))
    }
}

/// Whole tensors by name, on rank 0; `local` gives this rank's part of a parameter.
pub fn gather(
    part: &ModelPart,
    mesh: &Mesh,
    local: impl Fn(usize) -> Result<Tensor>,
) -> Result<Values> {
    let mut values = Values::new();
    for entry in part.params().catalog() {
        let whole = gather_full(part.params(), mesh, entry, DType::F32, &local)?;
        if let Some(whole) = whole {
            values.insert(entry.name.clone(), whole.flatten_all()?.to_vec1::<f32>()?);
        }
    }
    Ok(values)
}

pub fn gather_weights(part: &ModelPart, mesh: &Mesh) -> Result<Values> {
    gather(part, mesh, |index| part.params().values(index))
}

/// The gradients as they were accumulated, of a mesh without data parallelism, ties or overlaps.
pub fn gather_gradients(part: &ModelPart, mesh: &Mesh, gradients: &Gradients) -> Result<Values> {
    gather(part, mesh, |index| gradients.get(index))
}

/// The bits of values by name.
pub type Bits = BTreeMap<String, Vec<u32>>;

/// This rank's values, bit by bit.
pub fn local_bits(part: &ModelPart) -> Bits {
    let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect();
    let params = part.params();
    params
        .iter()
        .enumerate()
        .map(|(index, param)| {
            let values = params.values(index).unwrap().flatten_all().unwrap();
            let values = values.to_dtype(DType::F32).unwrap();
            (param.name.clone(), bits(values.to_vec1().unwrap()))
        })
        .collect()
}
