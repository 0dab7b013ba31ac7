//! A chain with a block of a test's own, trained for a few steps.

use candle_comm::Mesh;
use candle_core::{DType, Result};
use candle_parallel::{
    AdamWConfig, Block, DistributedOptimizer, Gradients, ModelPart, ParamBuilder, ParamStore,
    Pipeline, Schedule, ZeroStage,
};

use crate::chain::{Chain, HIDDEN};
use crate::device::device;

/// Loss and gradient norm of each step.
pub type Numbers = Vec<(f64, f64)>;

/// The chain, with the blocks that `own` gives in place of its own.
pub fn build(
    mesh: &Mesh,
    store: &ParamStore,
    own: impl Fn(usize, ParamBuilder) -> Result<Option<Block>>,
) -> Result<ModelPart> {
    let chain = Chain::default();
    let vb = store.builder(DType::F32, &device());
    ModelPart::build(
        mesh,
        &vb,
        chain.num_blocks(),
        HIDDEN,
        |index, vb| match own(index, vb.clone())? {
            Some(block) => Ok(block),
            None => chain.block(index, &mesh.tp, &vb),
        },
    )
}

/// The chain with this as block 2.
pub fn with_block(
    mesh: &Mesh,
    zero: ZeroStage,
    block: impl Fn(ParamBuilder) -> Result<Block>,
) -> Result<ModelPart> {
    let store = ParamStore::init(5).with_data_parallel(zero);
    build(mesh, &store, |index, vb| match index {
        2 => block(vb).map(Some),
        _ => Ok(None),
    })
}

/// Trains on two micro-batches a step, which the replicas divide.
pub fn train(mesh: &Mesh, part: &ModelPart, num_steps: u64) -> Result<Numbers> {
    train_on((2, 3), mesh, part, num_steps)
}

/// As [`train`], on micro-batches of this shape.
pub fn train_on(
    dims: (usize, usize),
    mesh: &Mesh,
    part: &ModelPart,
    num_steps: u64,
) -> Result<Numbers> {
    let config = AdamWConfig::default();
    let mut optimizer = DistributedOptimizer::adamw(part.params(), mesh, config)?;
    let mut gradients = Gradients::new(part.params(), mesh)?;
    let pipeline = Pipeline::new(Schedule::OneForwardOneBackward, mesh);
    let (rank, dp) = (mesh.dp.rank(), mesh.dp.world_size());
    let mut numbers = Numbers::new();
    for step in 0..num_steps {
        let batches = Chain::default().micro_batches_of(dims, 10 * step, 2)?;
        let own = &batches[rank * 2 / dp..(rank + 1) * 2 / dp];
        pipeline.forward_backward(part, own, &mut gradients)?;
        let report = optimizer.step(&mut gradients, 0.05, Some(1.0))?;
        numbers.push((report.loss.mean, report.grad_norm));
    }
    Ok(numbers)
}

/// Asserts that losses and norms are equal up to the order of sums.
#[track_caller]
pub fn same(got: &Numbers, want: &Numbers) {
    assert_eq!(got.len(), want.len());
    for ((loss, norm), (want_loss, want_norm)) in got.iter().zip(want) {
        let is_close = |got: f64, want: f64| (got - want).abs() <= 1e-5 * want.abs();
        assert!(
            is_close(*loss, *want_loss) && is_close(*norm, *want_norm),
            "{got:?}, expected {want:?}"
        );
    }
}
