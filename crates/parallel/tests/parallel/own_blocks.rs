//! Blocks of a user with sequence and context parallelism: what they drop, and every gradient, are those of one rank.

use candle_comm::{Degrees, Mesh};
use candle_core::{DType, Device, Result, Tensor};
use candle_nn::Init;
use candle_ops::{AttentionSpec, rms_norm};
use candle_parallel::{
    Block, ColumnParallelLinear, ContextConfig, ContextParallel, DistributedOptimizer,
    GradientSink, Gradients, HeadPartition, KeptAttention, Layer, ModelPart, ParamBuilder,
    ParamStore, Pass, Pipeline, PlainBlock, Recompute, Region, RowParallelLinear, Schedule, Shard,
    VocabParallelEmbedding, WEIGHT_INIT, ZeroStage, column_parallel_linear_shard, head_block,
    plain_block, regions, row_parallel_linear_shard, vocab_parallel_embedding, vocab_parallel_head,
};

use crate::chain::{Values, gather_weights};
use crate::check::{assert_values_close, random_ids};
use crate::device::{device, on_ranks};
use crate::optimizer_rule::Momentum;

const VOCAB: usize = 13;
const HIDDEN: usize = 12;
const INNER: usize = 18;
const HEADS: usize = 4;
const HEAD_DIM: usize = 3;
const BATCH: (usize, usize) = (2, 9);

/// Tokens with learned positions.
struct Embed {
    tokens: VocabParallelEmbedding,
    positions: Tensor,
    region: Region,
    dropout: f64,
}

impl PlainBlock for Embed {
    fn forward(&self, ids: &Tensor, pass: &Pass) -> Result<Tensor> {
        let xs = self.tokens.apply(ids, pass)?;
        let rows = pass.rows(0)?;
        let own = self.region.own_rows(rows.queries().num_rows());
        let positions = rows.queries().positions().skip(own.start).take(own.len());
        let positions: Vec<u32> = positions.map(|position| position as u32).collect();
        let positions = Tensor::new(positions, xs.device())?;
        let positions = self.positions.index_select(&positions, 0)?;
        let xs = (&xs + positions.reshape(xs.dims())?)?;
        pass.dropout(&xs, self.dropout, "residual", &self.region)
    }
}

/// Causal attention to q, k and v of some heads, one after the other in the last dim.
#[derive(Clone)]
struct Attend {
    context: ContextParallel,
    spec: AttentionSpec,
    num_heads: usize,
}

impl Attend {
    fn split(&self, qkv: &Tensor) -> Result<[Tensor; 3]> {
        let (b, t, width) = qkv.dims3()?;
        let heads = |index| {
            let part = qkv.narrow(2, index * width / 3, width / 3)?.contiguous()?;
            part.reshape((b, t, self.num_heads, HEAD_DIM))
        };
        Ok([heads(0)?, heads(1)?, heads(2)?])
    }
}

impl Layer for Attend {
    type Saved = (Tensor, Tensor, KeptAttention);

    fn forward(&self, qkv: &Tensor, pass: &Pass) -> Result<(Tensor, Self::Saved)> {
        let [q, k, v] = self.split(qkv)?;
        let Self { context, spec, .. } = self;
        let (ys, kept) = context.forward([&q, &k, &v], spec, pass, pass.rows(0)?)?;
        Ok((ys.flatten_from(2)?, (qkv.clone(), ys, kept)))
    }

    fn backward(
        &self,
        (qkv, ys, kept): Self::Saved,
        dy: &Tensor,
        pass: &Pass,
        _gradients: &mut dyn GradientSink,
    ) -> Result<Option<Tensor>> {
        let [q, k, v] = self.split(&qkv)?;
        let of_forward = (Some([&q, &k, &v]), &ys);
        let dys = dy.reshape(ys.shape())?;
        let Self { context, spec, .. } = self;
        let grads = context.backward(kept, of_forward, &dys, spec, pass)?;
        let [dq, dk, dv] = grads.map(|grad| grad.flatten_from(2));
        Tensor::cat(&[dq?, dk?, dv?], 2).map(Some)
    }

    fn weights(&self) -> Vec<&Tensor> {
        Vec::new()
    }
}

struct Attention {
    norm: Tensor,
    qkv: ColumnParallelLinear,
    attend: Attend,
    out: RowParallelLinear,
    features: Shard,
    region: Region,
    dropout: f64,
}

impl Attention {
    fn new(model: &Model, vb: ParamBuilder) -> Result<Self> {
        let region = &model.region;
        // Parallel layers know what their own weights are.
        let vb = vb.outside(region);
        let heads = HeadPartition::new(HEADS, HEADS, region.tp())?;
        let features = heads.query.scaled(HEAD_DIM);
        let qkv = Shard::fused(&vec![features.clone(); 3])?;
        let out = features.along(1);
        Ok(Self {
            norm: vb.get(HIDDEN, "norm", Init::Const(1.0))?,
            qkv: column_parallel_linear_shard(HIDDEN, qkv, true, region, vb.pp("qkv"))?,
            attend: Attend {
                context: model.context.clone(),
                spec: AttentionSpec::new(1.0 / (HEAD_DIM as f32).sqrt(), heads.groups),
                num_heads: heads.query.len(),
            },
            out: row_parallel_linear_shard(out, HIDDEN, true, region, vb.pp("out"))?,
            features: features.along(2),
            region: region.clone(),
            dropout: model.dropout,
        })
    }
}

impl PlainBlock for Attention {
    fn forward(&self, xs: &Tensor, pass: &Pass) -> Result<Tensor> {
        let normed = rms_norm(xs, &self.norm, 1e-5)?;
        let ys = self.attend.apply(&self.qkv.apply(&normed, pass)?, pass)?;
        let ys = pass.dropout_sharded(&ys, self.dropout, "inner", &self.features)?;
        let ys = self.out.apply(&ys, pass)?;
        xs + pass.dropout(&ys, self.dropout, "residual", &self.region)?
    }
}

/// xs + down(tanh(up(norm(xs)))) with bare weights between the two ends of a region.
struct Mlp {
    norm: Tensor,
    up: Tensor,
    down: Tensor,
    features: Shard,
    region: Region,
    dropout: f64,
}

impl Mlp {
    fn new(model: &Model, vb: ParamBuilder) -> Result<Self> {
        let region = &model.region;
        let features = Shard::even(0, INNER, region.tp())?;
        let (up, down) = ((INNER, HIDDEN), (HIDDEN, INNER));
        Ok(Self {
            norm: vb.outside(region).get(HIDDEN, "norm", Init::Const(1.0))?,
            up: vb.get_placed(up, "up", features.clone(), WEIGHT_INIT)?,
            down: vb.get_placed(down, "down", features.along(1), WEIGHT_INIT)?,
            features: features.along(2),
            region: region.clone(),
            dropout: model.dropout,
        })
    }
}

impl PlainBlock for Mlp {
    fn forward(&self, xs: &Tensor, pass: &Pass) -> Result<Tensor> {
        let inside = regions::enter(&rms_norm(xs, &self.norm, 1e-5)?, &self.region, pass)?;
        let inner = inside.broadcast_matmul(&self.up.t()?)?.tanh()?;
        let inner = pass.dropout_sharded(&inner, self.dropout, "inner", &self.features)?;
        let ys = inner.broadcast_matmul(&self.down.t()?)?;
        let ys = regions::leave(&ys, &self.region, pass)?;
        xs + pass.dropout(&ys, self.dropout, "residual", &self.region)?
    }
}

struct Model {
    region: Region,
    context: ContextParallel,
    dropout: f64,
}

impl Model {
    fn new(mesh: &Mesh, is_sequence_parallel: bool, dropout: f64) -> Result<Self> {
        let heads = HEADS / mesh.tp.world_size();
        let config = ContextConfig::default();
        Ok(Self {
            region: if is_sequence_parallel {
                Region::sequence_parallel(&mesh.tp)
            } else {
                Region::from(&mesh.tp)
            },
            context: ContextParallel::new(mesh, &config, (heads, heads), DType::F32)?,
            dropout,
        })
    }

    fn block(&self, index: usize, vb: ParamBuilder) -> Result<Block> {
        let vb = vb.pp(index);
        Ok(match index {
            0 => plain_block(Embed {
                tokens: vocab_parallel_embedding(VOCAB, HIDDEN, &self.region, vb.pp("tokens"))?,
                positions: vb.outside(&self.region).get(
                    (BATCH.1, HIDDEN),
                    "positions",
                    WEIGHT_INIT,
                )?,
                region: self.region.clone(),
                dropout: self.dropout,
            }),
            1 | 3 => plain_block(Attention::new(self, vb)?),
            2 | 4 => plain_block(Mlp::new(self, vb)?),
            _ => head_block(vocab_parallel_head(VOCAB, HIDDEN, &self.region, vb)?),
        })
    }
}

#[derive(Clone, Copy, Debug)]
struct Layout {
    degrees: Degrees,
    is_sequence_parallel: bool,
    zero: ZeroStage,
    recompute: Recompute,
}

fn layout(pp: usize, dp: usize, cp: usize, tp: usize) -> Layout {
    Layout {
        degrees: Degrees { pp, dp, cp, tp },
        is_sequence_parallel: false,
        zero: ZeroStage::Zero,
        recompute: Recompute::None,
    }
}

/// The loss of a step of four sequences, and the weights after it: large multiples of the gradients, beside which the values before vanish.
fn step(layout: Layout, dropout: f64) -> (f64, Values) {
    let Degrees { pp, dp, cp, tp } = layout.degrees;
    let all = on_ranks(pp * dp * cp * tp, |world| {
        let mesh = Mesh::new(world, layout.degrees)?;
        let model = Model::new(&mesh, layout.is_sequence_parallel, dropout)?;
        let store = ParamStore::init(5).with_data_parallel(layout.zero);
        let vb = store.builder(DType::F32, &device());
        let build = |index, vb| model.block(index, vb).map(Block::of_rows);
        let part = ModelPart::build(&mesh, &vb, 6, HIDDEN, build)?;
        let part = part.with_region(model.region.clone());
        let part = part.with_recompute(|_| layout.recompute);
        let ids = |seed| Tensor::from_vec(random_ids(seed, 18, VOCAB), BATCH, &Device::Cpu);
        let own = 2 / dp;
        let micro_batches = (mesh.dp.rank() * own..(mesh.dp.rank() + 1) * own)
            .map(|index| Ok(Pass::train(ids(index as u64)?, ids(10 + index as u64)?)));
        let micro_batches = micro_batches.collect::<Result<Vec<_>>>()?;
        let mut gradients = Gradients::new(part.params(), &mesh)?;
        let mut optimizer = DistributedOptimizer::new(part.params(), &mesh, Momentum)?;
        let pipeline = Pipeline::new(Schedule::OneForwardOneBackward, &mesh);
        pipeline.forward_backward(&part, &micro_batches, &mut gradients)?;
        let report = optimizer.step(&mut gradients, 1e4, None)?;
        Ok((report.loss.mean, gather_weights(&part, &mesh)?))
    });
    all.into_iter().next().unwrap()
}

#[test]
fn blocks_with_dropout_are_those_of_one_rank_on_every_layout() {
    let (loss, weights) = step(layout(1, 1, 1, 1), 0.3);
    let without = step(layout(1, 1, 1, 1), 0.0);
    assert!((loss - without.0).abs() > 1e-4, "nothing was dropped");
    let sequence_parallel = |layout| Layout {
        is_sequence_parallel: true,
        ..layout
    };
    let recomputed = |layout| Layout {
        recompute: Recompute::Full,
        ..layout
    };
    let zero_3 = |layout| Layout {
        zero: ZeroStage::Three,
        ..layout
    };
    let layouts = [
        recomputed(layout(1, 1, 1, 1)),
        layout(1, 1, 1, 2),
        sequence_parallel(layout(1, 1, 1, 2)),
        sequence_parallel(layout(1, 1, 1, 4)),
        layout(1, 1, 2, 1),
        sequence_parallel(layout(1, 1, 2, 2)),
        layout(2, 1, 1, 1),
        zero_3(layout(1, 2, 1, 1)),
        recomputed(zero_3(sequence_parallel(layout(2, 1, 2, 2)))),
    ];
    for layout in layouts {
        let (got_loss, got) = step(layout, 0.3);
        assert!(
            (got_loss - loss).abs() <= 1e-6 * loss,
            "{layout:?}: loss {got_loss}, not {loss}"
        );
        assert_eq!(
            Vec::from_iter(got.keys()),
            Vec::from_iter(weights.keys()),
            "{layout:?}"
        );
        for (name, want) in &weights {
            assert_values_close(&format!("{layout:?} {name}"), &got[name], want);
        }
    }
}
