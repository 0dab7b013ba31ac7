//! Packed documents: the loss and every gradient are those of the documents alone.

use std::sync::Mutex;

use candle_comm::Mesh;
use candle_core::{DType, Device, Result, Tensor};
use candle_ops::{DocumentStarts, IGNORE_INDEX};
use candle_parallel::{Gradients, Pass, Pipeline, Recompute, ZeroStage};

use crate::fixture::{ALL, Fixture};
use crate::run::{Layout, Variant, gather, launch, load_variant};
use crate::tensors::{Tensors, assert_close};

/// Tokens of a row of packed documents.
const ROW: usize = 24;

/// A document's tokens, and the targets of each.
type Document = (Vec<u32>, Vec<u32>);

/// Rows of documents that fill them, but for some padding at the end of the last. Some tokens have no target.
fn rows(vocab: u32) -> Vec<Vec<Document>> {
    let mut random = 7u32;
    let mut next = || {
        // Numerical Recipes' generator.
        random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        1 + (random >> 8) % (vocab - 1)
    };
    let mut row = |lens: &[usize]| -> Vec<Document> {
        let mut document = |&len: &usize| {
            let ids: Vec<u32> = (0..len).map(|_| next()).collect();
            let mut targets = [&ids[1..], &[IGNORE_INDEX]].concat();
            targets[..len / 3].fill(IGNORE_INDEX);
            (ids, targets)
        };
        lens.iter().map(&mut document).collect()
    };
    vec![
        row(&[5, 1, 11, 7]),
        row(&[ROW]),
        row(&[3, 2, 19]),
        row(&[9, 4]),
    ]
}

/// One sequence of these documents, padded to `len` tokens.
fn packed(documents: &[Document], len: usize) -> Result<Pass> {
    let (mut tokens, mut targets, mut starts) = (Vec::<u32>::new(), Vec::<u32>::new(), Vec::new());
    let used: usize = documents.iter().map(|(ids, _)| ids.len()).sum();
    let padding: Document = (vec![0; len - used], vec![IGNORE_INDEX; len - used]);
    for (ids, of_ids) in documents.iter().chain([&padding]) {
        starts.extend(vec![tokens.len() as u32; ids.len()]);
        tokens.extend(ids);
        targets.extend(of_ids);
    }
    let tokens = Tensor::from_vec(tokens, (1, len), &Device::Cpu)?;
    let targets = Tensor::from_vec(targets, (1, len), &Device::Cpu)?;
    let documents = DocumentStarts::new(starts, (1, len))?;
    Ok(Pass::train(tokens, targets).with_documents(documents))
}

/// The loss and the gradients of each replica's rows, packed or not.
fn pass(
    fixture: &Fixture,
    layout: Layout,
    recompute: Recompute,
    is_packed: bool,
) -> Result<(f64, Tensors)> {
    let outcome = Mutex::new(None);
    launch(layout, |world| {
        let mesh = Mesh::new(world, layout.degrees())?;
        let variant = Variant {
            recompute,
            ..Variant::default()
        };
        let part = load_variant(fixture, &mesh, (layout, variant))?;
        let rows = rows(fixture.config().vocab_size as u32);
        let num_rows = rows.len() / layout.dp;
        let rows = rows.chunks(num_rows).nth(mesh.dp.rank()).unwrap();
        let micro_batches: Result<Vec<_>> = match is_packed {
            true => rows.iter().map(|row| packed(row, ROW)).collect(),
            false => {
                let documents = rows.iter().flatten();
                let alone = |(ids, targets): &Document| {
                    let of = |ids: &[u32]| Tensor::from_slice(ids, (1, ids.len()), &Device::Cpu);
                    Ok(Pass::train(of(ids)?, of(targets)?))
                };
                documents.map(alone).collect()
            }
        };
        let mut gradients = Gradients::new(part.params(), &mesh)?;
        let pipeline = Pipeline::new(layout.schedule, &mesh);
        pipeline.forward_backward(&part, &micro_batches?, &mut gradients)?;
        let reduced = gradients.reduce()?;
        let loss = reduced.loss().mean;
        let local = reduced.local_gradients()?;
        let whole = gather(&part, &mesh, |index| match local.get(&index) {
            Some(grad) => Ok(grad.clone()),
            None => Tensor::zeros(
                part.params().get(index).local_shape(),
                DType::F32,
                part.device(),
            ),
        })?;
        if mesh.world.rank() == 0 {
            *outcome.lock().unwrap() = Some((loss, whole));
        }
        Ok(())
    })?;
    Ok(outcome.into_inner().unwrap().unwrap())
}

#[test]
fn packed_documents_equal_documents_alone() {
    for name in ALL {
        let fixture = Fixture::new(name);
        let (loss, gradients) =
            pass(&fixture, Layout::new(1, 1, 1), Recompute::None, false).unwrap();
        for (pp, dp, tp) in [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 2)] {
            for (zero, recompute) in [
                (ZeroStage::One, Recompute::None),
                (ZeroStage::Three, Recompute::Full),
            ] {
                let layout = Layout {
                    zero,
                    ..Layout::new(pp, dp, tp)
                };
                let what = format!("{name} {layout:?}");
                let (ours, of_ours) = pass(&fixture, layout, recompute, true).unwrap();
                assert!(
                    (ours - loss).abs() <= 1e-5 * loss,
                    "{what}: {ours}, not {loss}"
                );
                assert_close(&of_ours, &gradients, 1e-4, &what);
            }
        }
    }
}

#[test]
fn tensor_parallel_ranks_with_different_documents_are_told() {
    let fixture = Fixture::new("gqa");
    let layout = Layout::new(1, 1, 2);
    let result = launch(layout, |world| {
        let mesh = Mesh::new(world, layout.degrees())?;
        let part = load_variant(&fixture, &mesh, (layout, Variant::default()))?;
        let mut batch = packed(&rows(40)[0], ROW)?;
        if mesh.tp.rank() == 1 {
            batch = batch.with_documents(None);
        }
        let mut gradients = Gradients::new(part.params(), &mesh)?;
        let pipeline = Pipeline::new(layout.schedule, &mesh);
        pipeline.forward_backward(&part, &[batch], &mut gradients)?;
        Ok(())
    });
    let message = result.unwrap_err().to_string();
    assert!(
        message.contains("the documents of micro-batch 0 differ"),
        "{message}"
    );
}
