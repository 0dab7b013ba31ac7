//! Weights that a program sets between two updates are those values on every layout, and what writes past `set` is named.

use candle_core::{DType, Result, Tensor};
use candle_parallel::{DataParallel, ParamStore, ZeroStage};

use crate::chain::Chain;
use crate::check::{ZERO_STAGES, assert_says, message, on_mesh, single_mesh};
use crate::device::device;
use crate::mistaken::{Numbers, same};
use crate::rank::{Rank, adamw};

/// Trains two steps, halves all weights, and trains two more.
fn halved(layout: (usize, usize, usize), replicas: DataParallel, dtype: DType) -> Vec<Numbers> {
    on_mesh(layout, |mesh| {
        let mut rank = Rank::chain(&mesh, replicas, dtype)?;
        let mut numbers = vec![rank.step(1)?, rank.step(11)?];
        let params = rank.part.params().clone();
        for index in 0..params.len() {
            params.set(index, &(params.values(index)? * 0.5)?)?;
        }
        numbers.extend([rank.step(21)?, rank.step(31)?]);
        Ok(numbers)
    })
}

#[test]
fn a_weight_that_a_program_sets_is_the_same_on_every_layout() {
    let want = halved((1, 1, 1), ZeroStage::Zero.into(), DType::F32).remove(0);
    for layout in [(1, 2, 1), (1, 2, 2), (2, 2, 1)] {
        for zero in ZERO_STAGES {
            for overlap in [false, true] {
                let replicas = DataParallel {
                    zero,
                    overlap,
                    ..DataParallel::default()
                };
                for got in halved(layout, replicas, DType::F32) {
                    same(&got, &want);
                }
            }
        }
    }
}

#[test]
fn masters_follow_values_that_are_set() {
    for dtype in [DType::BF16, DType::F16, DType::F32] {
        for (dp, zero) in [
            (1, ZeroStage::Zero),
            (2, ZeroStage::One),
            (2, ZeroStage::Three),
        ] {
            on_mesh((1, dp, 1), |mesh| {
                let mut rank = Rank::chain(&mesh, zero, dtype)?;
                rank.step(1)?;
                let params = rank.part.params().clone();
                // Not a value of 16 bits.
                let value = 0.123_456_79_f32;
                for (index, param) in params.iter().enumerate() {
                    let values = Tensor::full(value, param.local_shape(), &device())?;
                    params.set(index, &values)?;
                    let rounded = values.to_dtype(dtype)?.to_dtype(DType::F32)?;
                    let held = params.values(index)?.to_dtype(DType::F32)?;
                    let distance = (held - rounded)?.abs()?.max_all()?.to_scalar::<f32>()?;
                    assert_eq!(distance, 0.0, "{dtype:?} {zero:?} {}", param.name);
                }
                let states = rank.optimizer.state()?;
                let masters = states.iter().filter(|state| state.kind == "master");
                let values: Vec<f32> = masters.flat_map(|state| state.values.clone()).collect();
                assert_eq!(values.is_empty(), dtype == DType::F32);
                assert!(
                    values.iter().all(|held| *held == value),
                    "{dtype:?} {zero:?}"
                );
                rank.step(2)?;
                Ok(())
            });
        }
    }
}

/// Trains two steps, changes weights for a moment, and trains two more: the numbers, and what the weights are in the end.
fn swapped(
    (dp, zero, dtype): (usize, ZeroStage, DType),
    swap: impl Fn(&Rank) -> Result<()> + Sync,
) -> Vec<(Numbers, Vec<Vec<f32>>)> {
    on_mesh((1, dp, 1), |mesh| {
        let mut rank = Rank::chain(&mesh, zero, dtype)?;
        let mut numbers = vec![rank.step(1)?, rank.step(11)?];
        swap(&rank)?;
        numbers.extend([rank.step(21)?, rank.step(31)?]);
        let indices = 0..rank.part.params().len();
        let values = indices.map(|index| {
            let values = rank.optimizer.values_f32(index)?;
            values.flatten_all()?.to_vec1::<f32>()
        });
        Ok((numbers, values.collect::<Result<_>>()?))
    })
}

#[test]
fn weights_that_are_changed_and_given_back_are_those_that_they_were() {
    for dtype in [DType::BF16, DType::F16, DType::F32] {
        for (dp, zero) in [
            (1, ZeroStage::Zero),
            (2, ZeroStage::One),
            (2, ZeroStage::Three),
        ] {
            let want = swapped((dp, zero, dtype), |_| Ok(()));
            // In f32, by the masters, which may have followed in between.
            for follows in [false, true] {
                let got = swapped((dp, zero, dtype), |rank| {
                    let params = rank.part.params();
                    let mut before = Vec::new();
                    for index in 0..params.len() {
                        before.push(rank.optimizer.values_f32(index)?);
                        params.set(index, &(&before[index] * 0.5)?)?;
                    }
                    if follows {
                        rank.optimizer.state()?;
                    }
                    for (index, before) in before.iter().enumerate() {
                        params.set(index, before)?;
                    }
                    Ok(())
                });
                assert_eq!(got, want, "{dtype:?} {zero:?} {follows}");
            }
            // In the model's type, before anything follows.
            let got = swapped((dp, zero, dtype), |rank| {
                let params = rank.part.params();
                for index in 0..params.len() {
                    let before = params.values(index)?.copy()?;
                    params.set(index, &(&before * 0.5)?)?;
                    params.set(index, &before)?;
                }
                Ok(())
            });
            assert_eq!(got, want, "{dtype:?} {zero:?}");
        }
    }
}

#[test]
fn what_is_refilled_after_it_was_set_is_not_set_again() {
    for zero in [ZeroStage::One, ZeroStage::Three] {
        on_mesh((1, 2, 1), |mesh| {
            let mut rank = Rank::chain(&mesh, zero, DType::BF16)?;
            rank.step(1)?;
            let params = rank.part.params();
            let values = Tensor::full(0.123f32, params.get(1).local_shape(), &device())?;
            params.set(1, &values)?;
            let refilled = (values.zeros_like()? + 2.0)?.to_dtype(DType::BF16)?;
            params.refill(1, &refilled)?;
            let held = rank.optimizer.values_f32(1)?.flatten_all()?;
            for value in held.to_vec1::<f32>()? {
                assert!((value - 2.0).abs() < 0.02, "{zero:?} {value}");
            }
            Ok(())
        });
    }
}

#[test]
fn weights_that_are_set_by_another_model_of_their_store_are_set() {
    for dtype in [DType::BF16, DType::F32] {
        on_mesh((1, 2, 1), |mesh| {
            let store = ParamStore::init(5).with_data_parallel(ZeroStage::One);
            let chain = Chain {
                dtype,
                ..Chain::default()
            };
            let other = chain.part(&mesh, &store)?;
            let mut rank = Rank::new(&mesh, chain.part(&mesh, &store)?, adamw())?;
            rank.step(1)?;
            let value = 0.123_456_79_f32;
            for (index, param) in other.params().iter().enumerate() {
                let values = Tensor::full(value, param.local_shape(), &device())?;
                other.params().set(index, &values)?;
            }
            for index in 0..other.params().len() {
                let held = rank.optimizer.values_f32(index)?.flatten_all()?;
                assert!(held.to_vec1::<f32>()?.iter().all(|held| *held == value));
            }
            rank.step(2)?;
            // A refill is no write past the other model either.
            let values = other.params().values(0)?.zeros_like()?;
            other.params().refill(0, &values)?;
            for step in 0..4 {
                rank.step(3 + step)?;
            }
            Ok(())
        });
    }
}

#[test]
fn values_that_cannot_be_set_are_refused() -> Result<()> {
    let mesh = single_mesh();
    let part = Chain::default().part(&mesh, &ParamStore::init(5))?;
    let (params, values) = (part.params(), part.params().values(0)?);
    let said = message(params.set(0, &values.narrow(0, 0, 2)?));
    assert_says(&said, &["embed.weight", "expected F32", "[13, 6]"]);
    let said = message(params.set(0, &values.to_dtype(DType::F64)?));
    assert_says(&said, &["embed.weight", "F64", "expected F32"]);
    Ok(())
}

#[test]
fn a_weight_that_one_replica_sets_alone_is_named() {
    for zero in ZERO_STAGES {
        let results = on_mesh((1, 2, 1), |mesh| {
            let mut rank = Rank::chain(&mesh, zero, DType::F32)?;
            rank.step(1)?;
            let params = rank.part.params().clone();
            let values = (params.values(1)? * 0.5)?;
            if mesh.world.rank() == 1 {
                params.set(1, &values)?;
            }
            Ok((params.get(1).name.clone(), rank.step(2)))
        });
        for (name, result) in results {
            let words = [&name, "was set on rank 1 and not on rank 0", "hint"];
            assert_says(&message(result), &words);
        }
    }
}

#[test]
fn a_weight_that_is_written_past_set_is_found() {
    for (layout, zero) in [
        ((1, 1, 1), ZeroStage::Zero),
        ((1, 2, 1), ZeroStage::Zero),
        ((1, 2, 1), ZeroStage::Two),
        ((1, 1, 2), ZeroStage::One),
    ] {
        let results = on_mesh(layout, |mesh| {
            let last = mesh.world.world_size() - 1;
            // A clamp of all weights is found at once, one weight after each bucket has had its turn.
            let mut said = Vec::new();
            for all in [true, false] {
                let mut rank = Rank::chain(&mesh, zero, DType::F32)?;
                let params = rank.part.params().clone();
                let write = |index: usize| -> Result<()> {
                    let values = params.values(index)?;
                    values.slice_set(&(&values * 0.5)?, 0, 0)
                };
                rank.step(1)?;
                let found = (0..=params.num_buckets()).find_map(|step| {
                    if mesh.world.rank() == last {
                        let written = if all { 0..params.len() } else { 0..1 };
                        written.into_iter().try_for_each(write).unwrap();
                    }
                    Some((step, rank.step(10 + step as u64).err()?.to_string()))
                });
                let (step, message) = found.expect("an error");
                assert!(!all || step == 0, "found after {step} steps");
                said.push(message);
            }
            Ok((last, said))
        });
        for (last, said) in results {
            for said in said {
                let on_rank = format!("written on rank {last} between two updates");
                assert_says(&said, &[&on_rank, "Parameters::set", "hint"]);
            }
        }
    }
}
