//! A model that is not a Llama, trained with a loop of one's own: a byte-level language model whose layers mix each
//! position with the one before. Two pipeline stages of two tensor-parallel ranks, in two replicas with ZeRO-1.

use candle_comm::{Degrees, Mesh, ProcessGroup, ReduceOp, launch};
use candle_core::{DType, Module, Result, Tensor};
use candle_nn::Init;
use candle_ops::rms_norm;
use candle_parallel::{
    AdamWConfig, Block, ColumnParallelLinear, Gradients, MicroBatch, Optimizer, ParamBuilder,
    ParamStore, Pipeline, RowParallelLinear, Schedule, Shard, Stage, VocabParallelEmbedding,
    ZeroStage, column_parallel_linear, row_parallel_linear, vocab_parallel_cross_entropy,
    vocab_parallel_embedding,
};

const TEXT: &[u8] = include_bytes!("assets/alice.txt");
const VOCAB: usize = 256;
const HIDDEN: usize = 64;
const LAYERS: usize = 4;
const STEPS: usize = 100;

struct Embedding(VocabParallelEmbedding);

impl Block for Embedding {
    fn forward(&self, tokens: &Tensor, _batch: &MicroBatch) -> Result<Tensor> {
        self.0.forward(tokens)
    }
}

struct Layer(Tensor, ColumnParallelLinear, RowParallelLinear);

impl Block for Layer {
    fn forward(&self, xs: &Tensor, _batch: &MicroBatch) -> Result<Tensor> {
        let (_b, t, _hidden) = xs.dims3()?;
        let before = xs.pad_with_zeros(1, 1, 0)?.narrow(1, 0, t)?;
        let normed = rms_norm(&((xs + before)? * 0.5)?, &self.0, 1e-5)?;
        xs + self.2.forward(&self.1.forward(&normed)?.gelu()?)?
    }
}

struct Head(ColumnParallelLinear, ProcessGroup);

impl Block for Head {
    fn forward(&self, xs: &Tensor, batch: &MicroBatch) -> Result<Tensor> {
        let logits = self.0.forward(xs)?.flatten_to(1)?;
        let Some(targets) = &batch.targets else {
            candle_core::bail!("this model is only trained: it needs targets");
        };
        let shard = Shard::even(0, VOCAB, &self.1)?;
        vocab_parallel_cross_entropy(&logits, &targets.flatten_all()?, &shard, &self.1)?.sum_all()
    }
}

fn block(index: usize, tp: &ProcessGroup, vb: ParamBuilder) -> Result<Box<dyn Block>> {
    let vb = vb.pp("blocks").pp(index);
    Ok(match index {
        0 => Box::new(Embedding(vocab_parallel_embedding(VOCAB, HIDDEN, tp, vb)?)),
        _ if index <= LAYERS => Box::new(Layer(
            vb.get(HIDDEN, "norm", Init::Const(1.0))?,
            column_parallel_linear(HIDDEN, 4 * HIDDEN, true, tp, vb.pp("up"))?,
            row_parallel_linear(4 * HIDDEN, HIDDEN, true, tp, vb.pp("down"))?,
        )),
        _ => Box::new(Head(
            column_parallel_linear(HIDDEN, VOCAB, false, tp, vb)?,
            tp.clone(),
        )),
    })
}

/// Two micro-batches of 8 sequences of 32 bytes for this replica.
fn micro_batches(step: usize, mesh: &Mesh) -> Result<Vec<MicroBatch>> {
    let (b, t) = (8, 32);
    let bytes = |first: usize, shift: usize| {
        let ids: Vec<u32> = (first..first + b)
            .flat_map(|i| (0..t).map(move |j| u32::from(TEXT[(i * 997 + j + shift) % TEXT.len()])))
            .collect();
        Tensor::from_vec(ids, (b, t), mesh.world.device())
    };
    let batch = |m: usize| {
        let first = ((step * mesh.dp.world_size() + mesh.dp.rank()) * 2 + m) * b;
        Ok(MicroBatch {
            tokens: bytes(first, 0)?,
            targets: Some(bytes(first, 1)?),
        })
    };
    (0..2).map(batch).collect()
}

fn main() -> Result<()> {
    let degrees = Degrees {
        pp: 2,
        dp: 2,
        cp: 1,
        tp: 2,
    };
    launch::threads(8, |world| {
        let mesh = Mesh::new(world, degrees)?;
        let vb = ParamStore::init(0).builder(DType::F32, mesh.world.device());
        let build = |index, vb| block(index, &mesh.tp, vb);
        let stage = Stage::build(&mesh, &vb, LAYERS + 2, HIDDEN, build)?;
        let pipeline = Pipeline::new(Schedule::OneForwardOneBackward, mesh.pp.clone());
        let mut gradients = Gradients::new(stage.params(), &mesh)?;
        let mut optimizer = Optimizer::new(
            stage.params(),
            &mesh,
            ZeroStage::One,
            AdamWConfig::default(),
        )?;
        for step in 0..STEPS {
            let batches = micro_batches(step, &mesh)?;
            let mut num_targets = 0;
            for batch in &batches {
                num_targets += batch.num_targets()? * mesh.dp.world_size();
            }
            let report =
                pipeline.forward_backward(&stage, &batches, num_targets, &mut gradients)?;
            let norm = optimizer.step(&mut gradients, 3e-3, Some(1.0))?;
            if let Some(loss) = report.loss_sum {
                // The last stages have the sum of their replica's losses.
                let sum = mesh
                    .dp
                    .all_reduce(&Tensor::new(&[loss], mesh.dp.device())?, ReduceOp::Sum)?;
                if mesh.dp.rank() == 0 && mesh.tp.rank() == 0 && (step + 1) % 10 == 0 {
                    let loss = sum.to_vec1::<f64>()?[0] / num_targets as f64;
                    println!("step {} loss {loss:.4} gradient norm {norm:.3}", step + 1);
                }
            }
        }
        Ok(())
    })?;
    Ok(())
}
