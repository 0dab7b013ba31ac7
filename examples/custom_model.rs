//! A model that is not a Llama, trained with a loop of one's own: a byte-level language model whose layers mix each
//! position with the one before. Two pipeline stages of two tensor-parallel ranks, in two replicas with ZeRO-1.

use candle_comm::{Degrees, Mesh, ProcessGroup, launch};
use candle_core::{DType, Result, Tensor};
use candle_nn::Init;
use candle_ops::rms_norm;
use candle_parallel::*;

const TEXT: &[u8] = include_bytes!("assets/alice.txt");
const VOCAB: usize = 256;
const HIDDEN: usize = 64;
const LAYERS: usize = 4;
const BATCH: (usize, usize) = (8, 32);

struct Mixing(Tensor, ColumnParallelLinear, RowParallelLinear);
impl PlainBlock for Mixing {
    fn forward(&self, xs: &Tensor, pass: &Pass) -> Result<Tensor> {
        let before = xs.pad_with_zeros(1, 1, 0)?.narrow(1, 0, xs.dim(1)?)?;
        let normed = rms_norm(&((xs + before)? * 0.5)?, &self.0, 1e-5)?;
        let inner = self.1.apply(&normed, pass)?.gelu()?;
        xs + self.2.apply(&inner, pass)?
    }
}

struct LastBlock(ColumnParallelLinear, ProcessGroup);
impl PlainHead for LastBlock {
    fn loss(&self, xs: &Tensor, pass: &Pass) -> Result<Loss> {
        let logits = self.0.apply(xs, pass)?.flatten_to(1)?;
        let targets = pass.targets()?.flatten_all()?;
        let shard = Shard::even(0, VOCAB, &self.1)?;
        let losses = vocab_parallel_cross_entropy(&logits, &targets, &shard, &self.1)?;
        Ok(Loss::new(losses.sum_all()?, pass.num_targets()? as f64))
    }
}

fn block(index: usize, tp: &ProcessGroup, vb: ParamBuilder) -> Result<Block> {
    let vb = vb.pp("blocks").pp(index);
    Ok(match index {
        0 => layer_block(vocab_parallel_embedding(VOCAB, HIDDEN, tp, vb)?),
        _ if index > LAYERS => {
            let head = column_parallel_linear(HIDDEN, VOCAB, false, tp, vb)?;
            plain_head(LastBlock(head, tp.clone()))
        }
        _ => plain_block(Mixing(
            vb.get(HIDDEN, "norm", Init::Const(1.0))?,
            column_parallel_linear(HIDDEN, 4 * HIDDEN, true, tp, vb.pp("up"))?,
            row_parallel_linear(4 * HIDDEN, HIDDEN, true, tp, vb.pp("down"))?,
        )),
    })
}

/// Sequences of bytes from all over the text; `index` tells apart micro-batches of all steps and replicas.
fn micro_batch(index: usize) -> Result<Pass> {
    let bytes = |shift: usize| {
        let starts = (0..BATCH.0).map(|b| (index * BATCH.0 + b) * 997 + shift);
        let bytes = starts.flat_map(|start| (start..start + BATCH.1).map(|i| TEXT[i % TEXT.len()]));
        Tensor::from_iter(bytes.map(u32::from), &candle_core::Device::Cpu)?.reshape(BATCH)
    };
    Ok(Pass::train(bytes(0)?, bytes(1)?))
}

fn main() -> Result<()> {
    let degrees = Degrees {
        pp: 2,
        dp: 2,
        tp: 2,
        ..Degrees::default()
    };
    launch::threads(8, |world| {
        let mesh = Mesh::new(world, degrees)?;
        let vb = ParamStore::init(0).builder(DType::F32, mesh.world.device());
        let build = |index, vb| block(index, &mesh.tp, vb);
        let part = ModelPart::build(&mesh, &vb, LAYERS + 2, HIDDEN, build)?;
        let schedule = Schedule::OneForwardOneBackward;
        let mut training = Training::new(part, &mesh, schedule, AdamW::default())?;
        for step in 0..100 {
            let first = 2 * (step * mesh.dp.world_size() + mesh.dp.rank());
            let batches = [micro_batch(first)?, micro_batch(first + 1)?];
            let report = training.step(&batches, 3e-3, Some(1.0))?;
            if mesh.world.rank() == 0 && step % 10 == 9 {
                let (loss, norm) = (report.loss.mean, report.grad_norm);
                println!("step {} loss {loss:.4} gradient norm {norm:.3}", step + 1);
            }
        }
        Ok(())
    })?;
    Ok(())
}
