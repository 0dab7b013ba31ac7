//! Values that are not rounded on the way: of what was not trained, into the masters, and from the masters into files.

use std::collections::BTreeMap;
use std::path::Path;

use candle_comm::Mesh;
use candle_core::{DType, Result};
use candle_nn::Init;
use candle_parallel::checkpoint::{HfSave, WEIGHTS_FILE, save_hf};
use candle_parallel::{
    AdamWConfig, DistributedOptimizer, Gradients, ModelPart, OptimizerState, ParamStore, Shard,
    ZeroStage,
};
use half::{bf16, f16};
use tempfile::{TempDir, tempdir};

use crate::chain::{Chain, HIDDEN, one_target};
use crate::check::{on_mesh, random, single_mesh};
use crate::device::device;
use crate::folder::{read_file, read_folder};

pub type Layout = (usize, usize, usize);

const LAYOUTS: [Layout; 6] = [
    (1, 1, 1),
    (1, 3, 1),
    (2, 1, 3),
    (1, 2, 2),
    (2, 2, 2),
    (3, 2, 1),
];

/// The chain, with two fused weights in block 2, of each of which neighbouring tensor-parallel ranks hold one row both.
pub fn part(chain: Chain, mesh: &Mesh, store: ParamStore) -> Result<ModelPart> {
    const ROWS: usize = 5;
    let vb = store.builder(chain.dtype, &device());
    ModelPart::build(mesh, &vb, chain.num_blocks(), HIDDEN, |index, vb| {
        if index == 2 {
            let tp = mesh.tp.world_size();
            let end = |rank: usize| ((rank + 1) * ROWS / tp + 1).min(ROWS);
            let rows = |rank: usize| rank * ROWS / tp..end(rank);
            let part = Shard::of_ranks(0, ROWS, &mesh.tp, rows);
            let shard = Shard::fused(&[part.clone(), part])?;
            let init = Init::Uniform { lo: 0.5, up: 1.5 };
            vb.pp("shared")
                .get_placed((2 * ROWS, 3), "rows", shard, init)?;
        }
        chain.block(index, &mesh.tp, &vb)
    })
}

/// A chain that computes in bf16.
pub fn narrow(tied: bool) -> Chain {
    Chain {
        tied,
        dtype: DType::BF16,
        ..Chain::default()
    }
}

/// A folder with the chain's initial weights, stored as `dtype`.
pub fn folder(tied: bool, dtype: DType) -> TempDir {
    let (dir, mesh) = (tempdir().unwrap(), single_mesh());
    let wide = Chain {
        tied,
        ..Chain::default()
    };
    let part = part(wide, &mesh, ParamStore::init(5)).unwrap();
    save_hf(part.params(), &mesh, &to(dir.path(), Some(dtype))).unwrap();
    dir
}

pub fn to(dir: &Path, dtype: Option<DType>) -> HfSave {
    HfSave {
        dtype,
        overwrite: true,
        ..HfSave::new(dir, Vec::new())
    }
}

pub fn optimizer(part: &ModelPart, mesh: &Mesh) -> Result<DistributedOptimizer> {
    DistributedOptimizer::adamw(part.params(), mesh, AdamWConfig::default())
}

/// A step with any gradients.
pub fn step(part: &ModelPart, mesh: &Mesh, optimizer: &mut DistributedOptimizer) -> Result<()> {
    let mut gradients = Gradients::new(part.params(), mesh)?;
    for (index, param) in part.params().iter().enumerate() {
        if param.trainable {
            let grad = random((100 * mesh.dp.rank() + index) as u64, param.local_shape())?;
            gradients.accumulate(index, &grad)?;
        }
    }
    optimizer.step(one_target(&mut gradients, mesh), 0.01, Some(1.0))?;
    Ok(())
}

/// Every tensor of a folder: its bytes.
fn stored(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let tensors = read_file(&dir.join(WEIGHTS_FILE)).into_iter();
    tensors.map(|(name, _, _, bytes)| (name, bytes)).collect()
}

/// f32 values as they are stored in `dtype`.
fn in_dtype(values: &[f32], dtype: DType) -> Vec<u8> {
    let bytes = |x: &f32| match dtype {
        DType::BF16 => bf16::from_f32(*x).to_le_bytes().to_vec(),
        DType::F16 => f16::from_f32(*x).to_le_bytes().to_vec(),
        _ => x.to_le_bytes().to_vec(),
    };
    values.iter().flat_map(bytes).collect()
}

/// Asserts that `saved` has, as `dtype`, the masters in `states`, which must be there for every value but the frozen.
fn assert_masters(
    what: &str,
    saved: &BTreeMap<String, Vec<u8>>,
    states: &[OptimizerState],
    dtype: DType,
    is_frozen: fn(&str) -> bool,
) {
    let size = dtype.size_in_bytes();
    let mut seen: BTreeMap<&str, Vec<bool>> = BTreeMap::new();
    for state in states.iter().filter(|state| state.kind == "master") {
        let bytes = &saved[&state.name];
        let seen = seen.entry(&state.name);
        let seen = seen.or_insert_with(|| vec![false; bytes.len() / size]);
        let mut values = state.values.as_slice();
        for offsets in &state.offsets {
            let (here, rest) = values.split_at(offsets.len());
            let saved = &bytes[offsets.start * size..offsets.end * size];
            assert!(saved == in_dtype(here, dtype), "{what}: {}", state.name);
            seen[offsets.clone()].fill(true);
            values = rest;
        }
    }
    for name in saved.keys().filter(|name| !is_frozen(name)) {
        let seen = seen.get(name.as_str());
        assert!(
            seen.is_some_and(|seen| seen.iter().all(|seen| *seen)),
            "{what}: {name}"
        );
    }
}

pub fn layouts_and_stages() -> impl Iterator<Item = ((usize, usize, usize), ZeroStage)> {
    let stages = [ZeroStage::Zero, ZeroStage::One, ZeroStage::Three];
    LAYOUTS
        .into_iter()
        .flat_map(move |layout| stages.map(|zero| (layout, zero)))
}

#[test]
fn what_was_not_trained_is_saved_as_it_was_read() {
    for (tied, dtype) in [
        (false, DType::F32),
        (true, DType::F32),
        (true, DType::BF16),
        (false, DType::F16),
    ] {
        let input = folder(tied, dtype);
        for (layout, zero) in layouts_and_stages() {
            let output = tempdir().unwrap();
            let [plain, with_masters] = ["plain", "masters"].map(|name| output.path().join(name));
            on_mesh(layout, |mesh| {
                let store = ParamStore::from_pretrained(input.path())?.with_data_parallel(zero);
                let part = part(narrow(tied), &mesh, store)?;
                save_hf(part.params(), &mesh, &to(&plain, None))?;
                optimizer(&part, &mesh)?.save_hf(&to(&with_masters, None))
            });
            let what = format!("{layout:?} {zero:?} tied {tied} {dtype:?}");
            let want = read_folder(input.path());
            assert!(read_folder(&plain) == want, "{what}");
            assert!(read_folder(&with_masters) == want, "{what}: masters");
        }
    }
}

#[test]
fn frozen_values_are_converted_once_and_trained_ones_are_masters() {
    let is_frozen: fn(&str) -> bool = |name| name.contains("layers.1") || name.ends_with("bias");
    let cases = layouts_and_stages().flat_map(|case| [(false, case), (true, case)]);
    for (tied, (layout, zero)) in cases {
        let input = folder(tied, DType::F32);
        let wide = stored(input.path());
        for dtype in [None, Some(DType::F16), Some(DType::BF16)] {
            let output = tempdir().unwrap();
            let states = on_mesh(layout, |mesh| {
                let store = ParamStore::from_pretrained(input.path())?
                    .with_data_parallel(zero)
                    .freeze(is_frozen);
                let part = part(narrow(tied), &mesh, store)?;
                let mut optimizer = optimizer(&part, &mesh)?;
                step(&part, &mesh, &mut optimizer)?;
                optimizer.save_hf(&to(output.path(), dtype))?;
                optimizer.state()
            });
            let what = format!("{layout:?} {zero:?} tied {tied} {dtype:?}");
            let (saved, dtype) = (stored(output.path()), dtype.unwrap_or(DType::F32));
            assert_masters(&what, &saved, &states.concat(), dtype, is_frozen);
            for (name, bytes) in saved.iter().filter(|(name, _)| is_frozen(name)) {
                let values = wide[name].chunks_exact(4);
                let values = values.map(|b| f32::from_le_bytes(b.try_into().unwrap()));
                let want = in_dtype(&values.collect::<Vec<_>>(), dtype);
                assert!(*bytes == want, "{what}: {name}");
            }
        }
    }
}

#[test]
fn masters_begin_with_the_values_that_were_rounded() {
    let input = folder(false, DType::F32);
    let want = stored(input.path());
    for (layout, zero) in layouts_and_stages() {
        for from_checkpoint in [false, true] {
            let states = on_mesh(layout, |mesh| {
                let store = match from_checkpoint {
                    true => ParamStore::from_pretrained(input.path())?,
                    false => ParamStore::init(5),
                };
                let store = store.with_data_parallel(zero);
                let part = part(narrow(false), &mesh, store)?;
                optimizer(&part, &mesh)?.state()
            });
            let what = format!("{layout:?} {zero:?} from a checkpoint {from_checkpoint}");
            assert_masters(&what, &want, &states.concat(), DType::F32, |_| false);
        }
    }
}

#[test]
fn values_that_were_put_in_are_what_counts_until_the_next_update() -> Result<()> {
    let (input, output, mesh) = (folder(false, DType::F32), tempdir().unwrap(), single_mesh());
    let store = ParamStore::from_pretrained(input.path())?;
    let part = part(narrow(false), &mesh, store)?;
    let first = optimizer(&part, &mesh)?;
    let saved = |optimizer: &DistributedOptimizer| {
        optimizer.save_hf(&to(output.path(), None))?;
        Ok::<_, candle_core::Error>(stored(output.path()))
    };
    let refill = || {
        for (index, param) in part.params().iter().enumerate() {
            part.params().refill(index, &(param.values()? * 1.5)?)?;
        }
        Ok::<_, candle_core::Error>(())
    };
    let weights = || {
        let params = part.params().iter();
        let values = params.map(|param| {
            let values = param.values()?.flatten_all()?.to_dtype(DType::F32)?;
            Ok((param.name.clone(), in_dtype(&values.to_vec1()?, DType::F32)))
        });
        values.collect::<Result<BTreeMap<_, _>>>()
    };
    refill()?;
    assert!(saved(&first)? == weights()?);
    drop(first);
    // Masters made now begin with the values that were put in.
    let mut trained = optimizer(&part, &mesh)?;
    assert_masters(
        "refilled",
        &weights()?,
        &trained.state()?,
        DType::F32,
        |_| false,
    );
    step(&part, &mesh, &mut trained)?;
    let after = saved(&trained)?;
    assert_masters("trained", &after, &trained.state()?, DType::F32, |_| false);
    assert!(after != weights()?);
    refill()?;
    assert!(saved(&trained)? == weights()?);
    Ok(())
}
