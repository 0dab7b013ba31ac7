//! Bytes that a step moves over data-parallel ranks, read from the counters: 2Ψ(N−1)/N values for ZeRO-0 and ZeRO-1; for ZeRO-2 as
//! many, and Ψ(N−1)/N more for each further micro-batch; for ZeRO-3 3Ψ(N−1)/N for each micro-batch, less Ψ(N−1)/N of the head's values, which
//! are needed in the backward half alone, and of a block's that two passes need one after the other.

use std::collections::BTreeMap;

use candle_parallel::{
    AdamWConfig, DistributedOptimizer, Gradients, Instruction, Instructions, ModelPart, ParamStore,
    Pipeline, Schedule, ZeroStage,
};

use crate::chain::{Chain, one_target};
use crate::check::{ZERO_STAGES, on_mesh};

const BYTES: usize = 4;

/// This rank's buckets, each a block and a number of values: one per block, and one for what tensor-parallel ranks have copies of, each replica's
/// part padded to 64.
pub fn padded_buckets(part: &ModelPart, dp: usize, tp: usize) -> Vec<(usize, usize)> {
    aligned_buckets(part, dp, tp, 1)
}

/// [`padded_buckets`] whose parameters begin at multiples of `alignment` values.
fn aligned_buckets(
    part: &ModelPart,
    dp: usize,
    tp: usize,
    alignment: usize,
) -> Vec<(usize, usize)> {
    let mut by_bucket: BTreeMap<(usize, bool), usize> = BTreeMap::new();
    for param in part.params().iter() {
        let is_copied = tp > 1 && param.shard().is_none();
        *by_bucket.entry((param.blocks[0], is_copied)).or_default() +=
            param.num_values().next_multiple_of(alignment);
    }
    let lens = by_bucket.into_iter();
    lens.map(|((block, _), len)| (block, len.next_multiple_of(alignment.max(64) * dp)))
        .collect()
}

/// Values of the buckets of gradients or weights that move in 8 or 4 bits.
pub fn quantized_values(part: &ModelPart, dp: usize) -> Vec<usize> {
    let buckets = aligned_buckets(part, dp, 1, 256).into_iter();
    buckets.map(|(_, len)| len).collect()
}

/// Their values, the head's at the end.
pub fn padded_values(part: &ModelPart, dp: usize, tp: usize) -> Vec<usize> {
    let buckets = padded_buckets(part, dp, tp).into_iter();
    buckets.map(|(_, len)| len).collect()
}

/// The blocks whose weights the passes of a 1f1b step gather with ZeRO-3: each time that another one was needed before.
pub fn gathered_blocks(part: &ModelPart, pp_rank: usize, num_micro_batches: usize) -> Vec<usize> {
    let list = Schedule::OneForwardOneBackward;
    let list = list
        .of_rank(part.layout(), pp_rank, num_micro_batches)
        .unwrap();
    let blocks: Vec<usize> = part.block_indices().collect();
    let head = part.layout().num_blocks() - 1;
    let needed = list.iter().flat_map(|instruction| {
        let mut needed = blocks.clone();
        match instruction {
            Instruction::Forward(_) => needed.retain(|block| *block != head),
            _ => needed.reverse(),
        }
        needed
    });
    let mut gathered: Vec<usize> = needed.collect();
    gathered.dedup();
    gathered
}

#[test]
fn bytes_per_step_equal_the_formula() {
    let chain = Chain::default();
    for (pp, dp, tp) in [
        (1, 1, 1),
        (1, 2, 1),
        (1, 3, 1),
        (1, 4, 2),
        (2, 3, 1),
        (2, 1, 2),
    ] {
        let cases = ZERO_STAGES
            .into_iter()
            .flat_map(|zero| [(zero, 1), (zero, 2)]);
        for (zero, num_micro_batches) in cases {
            on_mesh((pp, dp, tp), |mesh| {
                let part = chain.part(&mesh, &ParamStore::init(5).with_data_parallel(zero))?;
                let config = AdamWConfig::default();
                let mut optimizer = DistributedOptimizer::adamw(part.params(), &mesh, config)?;
                let mut gradients = Gradients::new(part.params(), &mesh)?;
                let pipeline = Pipeline::new(Schedule::OneForwardOneBackward, &mesh);
                let batches = chain.micro_batches(mesh.dp.rank() as u64, num_micro_batches)?;
                // In the first step copies are compared.
                for _step in 0..2 {
                    mesh.dp.reset_counters();
                    pipeline.forward_backward(&part, &batches, &mut gradients)?;
                    optimizer.step(one_target(&mut gradients, &mesh), 0.1, Some(1.0))?;
                    // Updated weights are on their way until somebody wants them.
                    part.params().wait_for_updates()?;
                }
                let counters = mesh.dp.counters();
                let buckets = padded_buckets(&part, dp, tp);
                let num_values: usize = buckets.iter().map(|(_, len)| len).sum();
                let bytes_of = |num_values: usize| (num_values * BYTES / dp * (dp - 1)) as u64;
                let once = bytes_of(num_values);
                let calls = if dp == 1 { 0 } else { buckets.len() as u64 };
                let what = format!("pp {pp} dp {dp} tp {tp} {zero:?}, {num_micro_batches}");
                let m = num_micro_batches as u64;
                let gathered = gathered_blocks(&part, mesh.pp.rank(), num_micro_batches);
                let gathered = gathered.iter().flat_map(|block| {
                    let of_block = buckets.iter().filter(move |bucket| bucket.0 == *block);
                    of_block.map(|(_, len)| bytes_of(*len))
                });
                let (all_reduces, reduce_scatters, all_gathers) = match zero {
                    ZeroStage::Zero => (1, 0, (0, 0)),
                    ZeroStage::One => (0, 1, (once, calls)),
                    ZeroStage::Two => (0, m, (once, calls)),
                    ZeroStage::Three if dp == 1 => (0, m, (0, 0)),
                    ZeroStage::Three => (0, m, (gathered.clone().sum(), gathered.count() as u64)),
                };
                let expected = [
                    ("all_reduce", 2 * all_reduces * once, all_reduces * calls),
                    (
                        "reduce_scatter",
                        reduce_scatters * once,
                        reduce_scatters * calls,
                    ),
                    ("all_gather", all_gathers.0, all_gathers.1),
                ];
                let mut total = 0;
                for (operation, bytes, calls) in expected {
                    assert_eq!(counters.bytes(operation), bytes, "{what} {operation}");
                    assert_eq!(counters.calls(operation), calls, "{what} {operation}");
                    total += bytes;
                }
                assert_eq!(counters.total().bytes, total, "{what}");
                Ok(())
            });
        }
    }
}

#[test]
fn one_rank_moves_nothing() {
    on_mesh((1, 1, 1), |mesh| {
        let chain = Chain::default();
        let part = chain.part(&mesh, &ParamStore::init(5))?;
        let config = AdamWConfig::default();
        let mut optimizer = DistributedOptimizer::adamw(part.params(), &mesh, config)?;
        let mut gradients = Gradients::new(part.params(), &mesh)?;
        let pipeline = Pipeline::new(Schedule::OneForwardOneBackward, &mesh);
        let batches = chain.micro_batches(1, 2)?;
        pipeline.forward_backward(&part, &batches, &mut gradients)?;
        optimizer.step(one_target(&mut gradients, &mesh), 0.1, Some(1.0))?;
        for group in [&mesh.world, &mesh.pp, &mesh.dp, &mesh.cp, &mesh.tp] {
            assert_eq!(group.counters().total(), Default::default());
        }
        Ok(())
    });
}

#[test]
fn a_pipeline_moves_one_activation_and_one_gradient_per_border_and_micro_batch() {
    let bytes = on_mesh((3, 1, 1), |mesh| {
        let chain = Chain::default();
        let part = chain.part(&mesh, &ParamStore::init(5))?;
        let mut gradients = Gradients::new(part.params(), &mesh)?;
        let pipeline = Pipeline::new(Schedule::OneForwardOneBackward, &mesh);
        let batches = chain.micro_batches(1, 5)?;
        mesh.pp.reset_counters();
        pipeline.forward_backward(&part, &batches, &mut gradients)?;
        Ok(mesh.pp.counters().bytes("batch_send_recv"))
    });
    // 5 micro-batches of (2, 3, 6) f32: the ends of the pipeline send one way, the middle both.
    let one_way = 5 * 2 * 3 * 6 * 4;
    assert_eq!(bytes, [one_way, 2 * one_way, one_way]);
}
