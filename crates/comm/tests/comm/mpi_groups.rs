//! Groups over MPI: they are split off while others are, and several of their sums are under way.

use candle_comm::{ProcessGroup, ReduceOp};
use candle_core::{DType, Device, Result, Tensor};

use crate::mpirun::run;

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

/// Several are under way, on two groups, waited for in another order on each rank, and some are given up.
#[test]
fn several_sums_are_under_way() {
    let test = "mpi_groups::several_sums_are_under_way";
    run(test, 3, |world| {
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
