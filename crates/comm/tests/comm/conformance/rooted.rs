//! Collectives with a root: reduce, scatter and gather.

use candle_comm::ProcessGroup;
use candle_core::{DType, Result, Tensor};

use super::{Launch, for_all, ops};
use crate::reference::{assert_same, cat, input, inputs, on, reduce};

pub fn reduce_to_root(launch: &impl Launch) -> Result<()> {
    let shapes: [&[usize]; 6] = [&[], &[0], &[1], &[7], &[3, 5], &[4099]];
    for_all(launch, &shapes, |world, dims, dtype| {
        let n = world.world_size();
        for (number, op) in ops(dtype).into_iter().enumerate() {
            let root = number % n;
            let all = inputs(14, n, dims, dtype)?;
            let got = world.reduce(&on(world, &all[world.rank()])?, root, op)?;
            let what = format!("reduce({op}, root {root}) {dims:?}");
            check(world, root, &what, got, &reduce(&all, op)?)?;
        }
        Ok(())
    })
}

/// What the root has got, and the others have not.
fn check(
    world: &ProcessGroup,
    root: usize,
    what: &str,
    got: Option<Tensor>,
    expected: &Tensor,
) -> Result<()> {
    assert_eq!(got.is_some(), world.rank() == root, "{what}");
    got.map_or(Ok(()), |got| assert_same(what, &got, expected))
}

/// Sizes for each rank, that differ and are 0 for some.
fn sizes_of(num_ranks: usize, most: usize) -> Vec<usize> {
    let size = |rank: usize| (rank * 7 + most) % (most + 1);
    (0..num_ranks).map(size).collect()
}

/// Each rank's tensor, with its size along `dim`.
fn parts_of(sizes: &[usize], dims: &[usize], dim: usize, dtype: DType) -> Result<Vec<Tensor>> {
    let part = |(rank, size): (usize, &usize)| {
        let mut dims = dims.to_vec();
        dims[dim] = *size;
        input(15, rank, &dims, dtype)
    };
    sizes.iter().enumerate().map(part).collect()
}

/// All parts, one after the other.
fn joined(parts: &[Tensor], dim: usize) -> Result<Tensor> {
    let filled = parts.iter().filter(|part| part.elem_count() > 0);
    match &filled.cloned().collect::<Vec<_>>()[..] {
        [] => cat(parts, dim),
        filled => cat(filled, dim),
    }
}

/// Equal sizes and others, along all dims, from and to every root.
pub fn scatter_and_gather(launch: &impl Launch) -> Result<()> {
    let shapes: [&[usize]; 4] = [&[1], &[3, 5], &[2, 1, 3], &[2, 0, 3]];
    for_all(launch, &shapes, |world, dims, dtype| {
        let (rank, n) = (world.rank(), world.world_size());
        for (dim, root) in (0..dims.len()).flat_map(|dim| (0..n).map(move |root| (dim, root))) {
            for sizes in [vec![2; n], sizes_of(n, 3), vec![0; n]] {
                let what = format!("{dims:?} root {root} sizes {sizes:?} dim {dim}");
                let parts = parts_of(&sizes, dims, dim, dtype)?;
                let all = joined(&parts, dim)?;
                // What the others have does not matter: nothing, or something.
                let mine = match (rank == root, root % 2) {
                    (true, _) => all.clone(),
                    (false, 0) => all.narrow(dim, 0, 0)?,
                    (false, _) => parts[rank].clone(),
                };
                let got = world.scatter(&on(world, &mine)?, &sizes, root, dim)?;
                assert_same(&format!("scatter {what}"), &got, &parts[rank])?;
                let mine = on(world, &parts[rank])?;
                let got = world.gather(&mine, &sizes, root, dim)?;
                check(world, root, &format!("gather {what}"), got, &all)?;
            }
        }
        Ok(())
    })
}

/// Started together with others, waited for in another order, and dropped: what was given up is overwritten at once.
pub fn rooted_in_flight(launch: &impl Launch) -> Result<()> {
    for &world_size in launch.world_sizes() {
        launch.run(world_size, |world| {
            let (rank, n) = (world.rank(), world_size);
            for round in 0..8 {
                let root = round % n;
                let sizes = sizes_of(n, 5000 * (round % 3) + 1);
                let parts = parts_of(&sizes, &[0, 3], 0, DType::F32)?;
                let all = joined(&parts, 0)?;
                let mine = on(&world, &parts[rank])?.copy()?;
                let whole = on(&world, &all)?.copy()?;
                let gathered = world.start_gather(&mine, &sizes, root)?;
                let scattered = world.start_scatter(&whole, &sizes, n - 1 - root)?;
                let summed = world.start_reduce(&whole, root, candle_comm::ReduceOp::Max)?;
                if round == 5 {
                    drop((gathered, scattered));
                    if n > 1 && mine.elem_count() > 0 {
                        mine.zero_set()?;
                    }
                } else {
                    assert_same("scattered", &scattered.wait()?, &parts[rank])?;
                    check(&world, root, "gathered", gathered.wait()?, &all)?;
                }
                check(&world, root, "summed", summed.wait()?, &all)?;
            }
            Ok(())
        })?;
    }
    Ok(())
}

/// Large enough for the work to be shared out or done in the background.
pub fn large_with_root(launch: &impl Launch) -> Result<()> {
    for (world_size, dtype) in [(2, DType::F32), (3, DType::BF16), (5, DType::F32)] {
        launch.run(world_size, |world| {
            let (rank, n) = (world.rank(), world_size);
            let all = inputs(16, n, &[n * 60_013, 3], dtype)?;
            for op in ops(dtype) {
                let got = world.reduce(&on(&world, &all[rank])?, n - 1, op)?;
                check(&world, n - 1, "reduce", got, &reduce(&all, op)?)?;
            }
            let sizes: Vec<usize> = (0..n).map(|rank| 60_013 * (rank % 3) + rank).collect();
            let parts = parts_of(&sizes, &[0, 3], 0, dtype)?;
            let whole = joined(&parts, 0)?;
            let got = world.scatter(&on(&world, &whole)?, &sizes, 1, 0)?;
            assert_same("scatter", &got, &parts[rank])?;
            let got = world.gather(&on(&world, &parts[rank])?, &sizes, 1, 0)?;
            check(&world, 1, "gather", got, &whole)
        })?;
    }
    Ok(())
}
