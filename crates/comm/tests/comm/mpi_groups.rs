//! Groups over MPI: they are split off while others are, and may add by MPI's own reductions.

use candle_comm::{MpiConfig, MpiReduction, ProcessGroup, ReduceOp};
use candle_core::{DType, Device, Result, Tensor};

use crate::mpirun::{config, output_with, run, run_adding, said};
use crate::reference::{DTYPES, Random};

const NATIVE: MpiReduction = MpiReduction::Native;

/// Two threads of each rank split two groups at once, in either order, and use what they got in between.
fn split_from_two_threads(world: &ProcessGroup) -> Result<()> {
    let groups = [
        world.split(0, 0)?,
        world.split(0, world.world_size() - world.rank())?,
    ];
    let splits = |first: usize| {
        for round in 0..30 {
            let group = &groups[first];
            let part = group.split(group.rank() % 2, 0)?;
            let mine = Tensor::new(&[(group.rank() + round) as f32], &Device::Cpu)?;
            let sum = part.all_reduce(&mine, ReduceOp::Sum)?.to_vec1::<f32>()?[0];
            let members = (0..group.world_size()).filter(|rank| rank % 2 == group.rank() % 2);
            let expected: usize = members.map(|rank| rank + round).sum();
            assert_eq!(sum, expected as f32, "round {round} of group {first}");
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        // The other way round on odd ranks, so that the second thread often comes first.
        let first = world.rank() % 2;
        let other = scope.spawn(move || splits(first));
        splits(1 - first)?;
        other.join().unwrap()
    })
}

#[test]
fn two_threads_split_two_groups_at_once() {
    let test = "mpi_groups::two_threads_split_two_groups_at_once";
    run(test, 4, |world| split_from_two_threads(&world));
}

#[test]
fn two_threads_split_two_groups_that_add_by_mpi() {
    let test = "mpi_groups::two_threads_split_two_groups_that_add_by_mpi";
    run_adding(test, 4, NATIVE, |world| split_from_two_threads(&world));
}

/// Those that need it are told which rank it is; the groups without it go on.
#[test]
fn a_rank_that_is_gone_before_a_split_is_named() {
    let test = "mpi_groups::a_rank_that_is_gone_before_a_split_is_named";
    run(test, 5, |world| {
        let part = world.split(world.rank() / 3, 0)?;
        match world.rank() {
            4 => return Ok(()),
            3 => {
                let error = part.split(0, 0).map(|_| ()).unwrap_err().to_string();
                let words = ["split at ", "mpi_groups.rs:", "rank 4 has left"];
                assert!(words.iter().all(|words| error.contains(words)), "{error}");
            }
            _ => {
                let again = part.split(0, 0)?;
                let ones = Tensor::ones(5000, DType::F32, &Device::Cpu)?;
                let sum = again.all_reduce(&ones, ReduceOp::Sum)?;
                assert_eq!(sum.to_vec1::<f32>()?, [3.0; 5000]);
                let error = world.split(0, 0).map(|_| ()).unwrap_err().to_string();
                assert!(error.contains("rank 4 has left"), "{error}");
            }
        }
        Ok(())
    });
}

/// Whole numbers below 16, whose sums have no rounding but that to bf16 or f16.
fn whole(world: &ProcessGroup, rows: usize, dtype: DType) -> Result<Tensor> {
    let mut random = Random::new(7 + world.rank() as u64);
    let values: Vec<f32> = (0..rows * 3).map(|_| (random.next() % 16) as f32).collect();
    Tensor::from_vec(values, (rows, 3), &Device::Cpu)?.to_dtype(dtype)
}

fn same(got: &Tensor, expected: &Tensor) -> Result<()> {
    assert_eq!(
        (got.dims(), got.dtype()),
        (expected.dims(), expected.dtype())
    );
    let [got, expected] =
        [got, expected].map(|xs| xs.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>());
    assert!(got? == expected?, "sums differ");
    Ok(())
}

/// The sum of all ranks' tensors, from what they are.
fn summed(world: &ProcessGroup, xs: &Tensor) -> Result<Tensor> {
    let all = world.all_gather(&xs.to_dtype(DType::F64)?.unsqueeze(0)?, 0)?;
    all.sum(0)?.to_dtype(xs.dtype())
}

#[test]
fn sums_by_mpi_are_those_of_the_ranks() {
    let test = "mpi_groups::sums_by_mpi_are_those_of_the_ranks";
    run_adding(test, 4, NATIVE, |world| {
        let n = world.world_size();
        let pairs = world.split(world.rank() % 2, 0)?;
        let halves = Tensor::ones(5000, DType::BF16, &Device::Cpu)?;
        pairs.all_reduce(&halves, ReduceOp::Sum)?;
        let (bytes, sent_as_f32) = (pairs.counters().total().bytes, 4 * 5000);
        assert_eq!(bytes, sent_as_f32);
        for dtype in DTYPES {
            for rows in [n, n * 301, n * 5003] {
                let xs = whole(&world, rows, dtype)?;
                for group in [&world, &pairs] {
                    let expected = summed(group, &xs)?;
                    same(&group.all_reduce(&xs, ReduceOp::Sum)?, &expected)?;
                    let slice = rows / group.world_size();
                    let mine = expected.narrow(0, group.rank() * slice, slice)?;
                    same(&group.reduce_scatter(&xs, ReduceOp::Sum, 0)?, &mine)?;
                    let place = xs.copy()?;
                    let pending = group.start_reduce_scatter_in_place(&place, ReduceOp::Sum)?;
                    same(&pending.wait()?, &mine)?;
                    let place = xs.copy()?;
                    group
                        .start_all_reduce_in_place(&place, ReduceOp::Sum)?
                        .wait()?;
                    same(&place, &expected)?;
                }
            }
        }
        Ok(())
    });
}

/// Large ones are cut; several are under way, on two groups, waited for in another order on each rank, and some are given up.
#[test]
fn several_sums_by_mpi_are_under_way() {
    let test = "mpi_groups::several_sums_by_mpi_are_under_way";
    run_adding(test, 3, NATIVE, |world| {
        let other = world.split(0, 0)?;
        let large = Tensor::ones(17 << 20, DType::F32, &Device::Cpu)?;
        let mut pending = vec![(3.0, world.start_all_reduce(&large, ReduceOp::Sum)?)];
        for i in 0..8 {
            let xs = Tensor::full(i as f32, 10_007 + i, &Device::Cpu)?;
            let group = [&world, &other][(i + world.rank()) % 2];
            let another = [&world, &other][(i + world.rank() + 1) % 2];
            pending.push((3.0 * i as f32, group.start_all_reduce(&xs, ReduceOp::Sum)?));
            let xs = xs.copy()?;
            drop(another.start_all_reduce(&xs, ReduceOp::Sum)?);
            xs.zero_set()?;
        }
        if world.rank() == 1 {
            pending.reverse();
        }
        for (expected, pending) in pending {
            let sum = pending.wait()?;
            let [least, most] = [sum.min(0)?, sum.max(0)?].map(|x| x.to_scalar::<f32>());
            assert_eq!((least?, most?), (expected, expected));
        }
        Ok(())
    });
}

/// Largest values are ours, with their NaN.
#[test]
fn largest_values_are_not_left_to_mpi() {
    run_adding(
        "mpi_groups::largest_values_are_not_left_to_mpi",
        2,
        NATIVE,
        |world| {
            let value = [1.0, f32::NAN][world.rank()];
            let xs = Tensor::full(value, 5000, &Device::Cpu)?;
            let largest = world.all_reduce(&xs, ReduceOp::Max)?.to_vec1::<f32>()?;
            assert!(largest.iter().all(|x| x.is_nan()));
            Ok(())
        },
    );
}

#[test]
fn ranks_that_disagree_about_who_adds_are_told() {
    let is_first = std::env::var("OMPI_COMM_WORLD_RANK").is_ok_and(|rank| rank == "0");
    let config = MpiConfig {
        reduction: if is_first {
            MpiReduction::Exact
        } else {
            NATIVE
        },
        ..config()
    };
    let test = "mpi_groups::ranks_that_disagree_about_who_adds_are_told";
    if let Some(output) = output_with(test, 3, config, |world| world.barrier()) {
        let said = said(&output);
        assert!(!output.status.success(), "{said}");
        let words = "ranks disagree about who adds over MPI: exact on rank 0, native on rank 1";
        assert!(said.contains(words), "{said}");
    }
}
