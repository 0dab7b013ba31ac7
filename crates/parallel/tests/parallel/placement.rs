//! How parameters lie on the mesh: partial gradients of replicated weights, copies that drift apart, axes that nothing implements.

use candle_comm::{Degrees, Mesh};
use candle_core::{DType, Result, Tensor};
use candle_nn::Init;
use candle_parallel::checkpoint::{HfSave, save_hf};
use candle_parallel::{
    AdamWConfig, ColumnParallelLinear, DistributedOptimizer, Gradient, Gradients, Layer, ModelPart,
    ParamStore, Pass, Pipeline, Placement, PlainBlock, RowParallelLinear, Schedule, ZeroStage,
    column_parallel_linear, plain_block, row_parallel_linear,
};

use crate::chain::{Chain, HIDDEN, Values, gather};
use crate::check::{ZERO_STAGES, assert_says, assert_values_close, message, on_mesh};
use crate::device::{device, on_ranks};

/// Heads, which tensor-parallel ranks divide, and the values of each.
const HEADS: usize = 6;
const HEAD_DIM: usize = 4;

/// A layer with a scale of each head's values: every rank holds all of it and uses it on heads of its own.
struct HeadScale {
    up: ColumnParallelLinear,
    scale: Tensor,
    down: RowParallelLinear,
}

impl PlainBlock for HeadScale {
    fn forward(&self, xs: &Tensor, pass: &Pass) -> Result<Tensor> {
        let ys = self.up.apply(xs, pass)?;
        let (b, t, width) = ys.dims3()?;
        let heads = ys.reshape((b, t, width / HEAD_DIM, HEAD_DIM))?;
        let heads = heads.broadcast_mul(&self.scale)?.tanh()?;
        xs + self.down.apply(&heads.reshape((b, t, width))?, pass)?
    }
}

/// The chain with such a layer as block 2.
fn part(mesh: &Mesh, gradient: Gradient, zero: ZeroStage) -> Result<ModelPart> {
    let chain = Chain::default();
    let vb = ParamStore::init(5)
        .with_data_parallel(zero)
        .builder(DType::F32, &device());
    ModelPart::build(mesh, &vb, chain.num_blocks(), HIDDEN, |index, vb| {
        if index != 2 {
            return chain.block(index, &mesh.tp, &vb);
        }
        let placement = Placement::Replicated(gradient);
        let init = Init::Uniform { lo: 0.5, up: 1.5 };
        let width = HEADS * HEAD_DIM;
        Ok(plain_block(HeadScale {
            up: column_parallel_linear(HIDDEN, width, false, &mesh.tp, vb.pp("up"))?,
            scale: vb.get_placed(HEAD_DIM, "scale", placement, init)?,
            down: row_parallel_linear(width, HIDDEN, false, &mesh.tp, vb.pp("down"))?,
        }))
    })
}

/// Whole gradients by name, on rank 0, and the norm.
fn gradients(layout: (usize, usize, usize), zero: ZeroStage) -> (Values, f64) {
    let all = on_mesh(layout, |mesh| {
        let part = part(&mesh, Gradient::Partial, zero)?;
        let mut gradients = Gradients::new(part.params(), &mesh)?;
        let pipeline = Pipeline::new(Schedule::OneForwardOneBackward, &mesh);
        let (rank, dp) = (mesh.dp.rank(), mesh.dp.world_size());
        let batches = Chain::default().micro_batches(3, 2)?;
        let batches = &batches[rank * 2 / dp..(rank + 1) * 2 / dp];
        pipeline.forward_backward(&part, batches, &mut gradients)?;
        let reduced = gradients.reduce()?;
        let local = reduced.local_gradients()?;
        let grads = gather(&part, &mesh, |index| Ok(local[&index].clone()))?;
        Ok((grads, reduced.norm()))
    });
    all.into_iter().next().unwrap()
}

#[test]
fn partial_gradients_of_a_replicated_weight_are_summed() {
    let (want, want_norm) = gradients((1, 1, 1), ZeroStage::Zero);
    for layout in [(1, 1, 2), (1, 2, 3), (3, 1, 2)] {
        for zero in ZERO_STAGES {
            let (got, norm) = gradients(layout, zero);
            for (name, grad) in &want {
                assert_values_close(&format!("{layout:?} {zero:?} {name}"), &got[name], grad);
            }
            let error = (norm - want_norm).abs();
            assert!(error <= 1e-6 * want_norm, "{norm}, not {want_norm}");
        }
    }
}

#[test]
fn partial_gradients_that_were_declared_complete_are_found_in_the_first_step() {
    on_mesh((1, 1, 3), |mesh| {
        let part = part(&mesh, Gradient::Complete, ZeroStage::One)?;
        let config = AdamWConfig::default();
        let mut optimizer = DistributedOptimizer::adamw(part.params(), &mesh, config)?;
        let mut gradients = Gradients::new(part.params(), &mesh)?;
        let pipeline = Pipeline::new(Schedule::OneForwardOneBackward, &mesh);
        let batches = Chain::default().micro_batches(3, 2)?;
        pipeline.forward_backward(&part, &batches, &mut gradients)?;
        let said = message(optimizer.step(&mut gradients, 0.01, None));
        let words = [
            "the gradient of parameter scale differs",
            "ranks 0 and 1",
            "first step",
            "Gradient::Partial",
        ];
        assert_says(&said, &words);
        assert_eq!(optimizer.num_steps(), 0);
        Ok(())
    });
}

/// Multiplies this rank's copy of a parameter by two.
fn spoil(part: &ModelPart, name: &str) -> Result<()> {
    let params = part.params();
    let index = params.iter().position(|param| param.name == name).unwrap();
    params.refill(index, &(params.get(index).values()? * 2.0)?)
}

#[test]
fn copies_with_other_values_are_found_in_the_first_step_and_when_saved() {
    let folder = tempfile::tempdir().unwrap();
    on_mesh((1, 1, 2), |mesh| {
        let chain = Chain::default();
        let part = chain.part(&mesh, &ParamStore::init(5))?;
        if mesh.tp.rank() == 1 {
            spoil(&part, "layers.1.down.bias")?;
            spoil(&part, "layers.1.norm.weight")?;
        }
        let mut gradients = Gradients::new(part.params(), &mesh)?;
        let pipeline = Pipeline::new(Schedule::OneForwardOneBackward, &mesh);
        let batches = chain.micro_batches(3, 1)?;
        pipeline.forward_backward(&part, &batches, &mut gradients)?;
        let said = message(gradients.reduce().map(drop));
        assert_says(
            &said,
            &["parameter", "differs", "ranks 0 and 1", "first step"],
        );
        let save = HfSave::new(folder.path().join("out"), Vec::new());
        let said = message(save_hf(part.params(), &mesh, &save));
        let words = ["the value of parameter layers.1.", "saved"];
        assert_says(&said, &words);
        Ok(())
    });
    assert!(!folder.path().join("out").exists());
}

#[test]
fn blocks_that_do_not_say_how_they_attend_have_whole_sequences() {
    let degrees = Degrees {
        pp: 1,
        dp: 1,
        cp: 2,
        tp: 1,
    };
    on_ranks(2, |world| {
        let mesh = Mesh::new(world, degrees)?;
        let said = message(Chain::default().part(&mesh, &ParamStore::init(5)));
        assert_says(&said, &["block 0", "cp 2", "Block::of_rows", "hint"]);
        Ok(())
    });
}
