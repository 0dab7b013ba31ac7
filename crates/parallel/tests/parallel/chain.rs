//! A small model of parallel layers, trained and saved by the tests.

use std::collections::BTreeMap;

use candle_comm::{Mesh, ProcessGroup};
use candle_core::{DType, Device, Module, Result, Tensor};
use candle_nn::Init;
use candle_parallel::checkpoint::gather_full;
use candle_parallel::{
    Block, ColumnParallelLinear, Gradients, MicroBatch, ParamBuilder, ParamStore, PlainBlock,
    RowParallelLinear, Shard, Stage, VocabParallelEmbedding, WEIGHT_INIT, column_parallel_linear,
    plain_block, row_parallel_linear, vocab_parallel_cross_entropy, vocab_parallel_embedding,
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
}

/// Values by parameter name.
pub type Values = BTreeMap<String, Vec<f32>>;

struct Embed(VocabParallelEmbedding);

struct Layer {
    norm: Tensor,
    up: ColumnParallelLinear,
    down: RowParallelLinear,
}

struct Head {
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
        }
    }
}

impl Chain {
    pub fn num_blocks(&self) -> usize {
        self.num_layers + 2
    }

    /// Block `index` of the chain.
    pub fn block(
        &self,
        index: usize,
        tp: &ProcessGroup,
        vb: &ParamBuilder,
    ) -> Result<Box<dyn Block>> {
        Ok(plain_block(self.in_graph(index, tp, vb)?))
    }

    /// Block `index` of the chain in candle's graph.
    pub fn in_graph(&self, index: usize, tp: &ProcessGroup, vb: &ParamBuilder) -> Result<Plain> {
        if index == 0 {
            let vb = vb.pp("embed");
            let embedding = vocab_parallel_embedding(self.vocab, HIDDEN, tp, vb)?;
            return Ok(Plain(Box::new(Embed(embedding))));
        }
        if index <= self.num_layers {
            let vb = vb.pp("layers").pp(index - 1);
            return Ok(Plain(Box::new(Layer {
                norm: vb.pp("norm").get(HIDDEN, "weight", Init::Const(1.0))?,
                up: column_parallel_linear(HIDDEN, INNER, true, tp, vb.pp("up"))?,
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
        Ok(Plain(Box::new(Head {
            weight: ColumnParallelLinear::new(weight, None, tp.clone()),
            shard,
            tp: tp.clone(),
        })))
    }

    /// This rank's blocks.
    pub fn stage(&self, mesh: &Mesh, store: &ParamStore) -> Result<Stage> {
        let vb = store.builder(self.dtype, &device());
        Stage::build(mesh, &vb, self.num_blocks(), HIDDEN, |index, vb| {
            self.block(index, &mesh.tp, &vb)
        })
    }

    /// `num` micro-batches of (2, 3) random tokens.
    pub fn micro_batches(&self, seed: u64, num: usize) -> Result<Vec<MicroBatch>> {
        let ids = |seed| Tensor::from_vec(random_ids(seed, 6, self.vocab), (2, 3), &Device::Cpu);
        (0..num as u64)
            .map(|index| {
                Ok(MicroBatch {
                    tokens: ids(seed + 2 * index)?,
                    targets: Some(ids(seed + 2 * index + 1)?),
                    documents: None,
                    past: None,
                })
            })
            .collect()
    }
}

/// A block of any kind.
pub struct Plain(Box<dyn PlainBlock>);

impl PlainBlock for Plain {
    fn forward(&self, xs: &Tensor, batch: &MicroBatch) -> Result<Tensor> {
        self.0.forward(xs, batch)
    }
}

/// The gradients as those of one target: the global batch has no more.
pub fn one_target<'a>(gradients: &'a mut Gradients, mesh: &Mesh) -> &'a mut Gradients {
    gradients.set_num_targets(usize::from(mesh.dp.rank() == 0));
    gradients
}

impl PlainBlock for Embed {
    fn forward(&self, tokens: &Tensor, _batch: &MicroBatch) -> Result<Tensor> {
        self.0.forward(tokens)
    }
}

impl PlainBlock for Layer {
    fn forward(&self, xs: &Tensor, _batch: &MicroBatch) -> Result<Tensor> {
        let normed = xs.broadcast_mul(&self.norm)?;
        xs + self.down.forward(&self.up.forward(&normed)?.tanh()?)?
    }
}

impl PlainBlock for Head {
    fn forward(&self, xs: &Tensor, batch: &MicroBatch) -> Result<Tensor> {
        let (b, t, _hidden) = xs.dims3()?;
        let logits = self.weight.forward(xs)?;
        let logits = logits.reshape((b * t, self.shard.len()))?;
        let targets = batch.targets.as_ref().expect("targets").flatten_all()?;
        vocab_parallel_cross_entropy(&logits, &targets, &self.shard, &self.tp)?.sum_all()
    }
}

/// Whole tensors by name, on rank 0; `local` gives this rank's part of a parameter.
pub fn gather(
    stage: &Stage,
    mesh: &Mesh,
    local: impl Fn(usize) -> Result<Tensor>,
) -> Result<Values> {
    let mut values = Values::new();
    for entry in stage.params().catalog() {
        let whole = gather_full(stage.params(), mesh, entry, DType::F32, &local)?;
        if let Some(whole) = whole {
            values.insert(entry.name.clone(), whole.flatten_all()?.to_vec1::<f32>()?);
        }
    }
    Ok(values)
}

pub fn gather_weights(stage: &Stage, mesh: &Mesh) -> Result<Values> {
    gather(stage, mesh, |index| stage.params().values(index))
}

/// The gradients as they were accumulated, of a mesh without data parallelism, ties or overlaps.
pub fn gather_gradients(stage: &Stage, mesh: &Mesh, gradients: &Gradients) -> Result<Values> {
    gather(stage, mesh, |index| gradients.get(index))
}

/// This rank's values, bit by bit.
pub fn local_bits(stage: &Stage) -> BTreeMap<String, Vec<u32>> {
    let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect();
    let params = stage.params();
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
