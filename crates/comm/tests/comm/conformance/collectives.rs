//! Each collective on its own.

use candle_comm::ReduceOp;
use candle_core::{D, DType, Result, Tensor};

use super::{Launch, for_all, large_with_root, ops};
use crate::reference::{assert_same, cat, input, inputs, on, part, reduce};

pub fn all_reduce(launch: &impl Launch) -> Result<()> {
    let shapes: [&[usize]; 7] = [&[], &[0], &[1], &[7], &[3, 5], &[2, 0, 3], &[4099]];
    for_all(launch, &shapes, |world, dims, dtype| {
        for op in ops(dtype) {
            let all = inputs(1, world.world_size(), dims, dtype)?;
            let got = world.all_reduce(&on(world, &all[world.rank()])?, op)?;
            assert_same(
                &format!("all_reduce({op}) {dims:?}"),
                &got,
                &reduce(&all, op)?,
            )?;
        }
        Ok(())
    })
}

pub fn all_gather(launch: &impl Launch) -> Result<()> {
    let shapes: [&[usize]; 6] = [&[0], &[1], &[7], &[3, 5], &[2, 1, 3], &[2, 0, 3]];
    for_all(launch, &shapes, |world, dims, dtype| {
        for dim in 0..dims.len() {
            let all = inputs(2, world.world_size(), dims, dtype)?;
            let got = world.all_gather(&on(world, &all[world.rank()])?, dim)?;
            assert_same(
                &format!("all_gather {dims:?} dim {dim}"),
                &got,
                &cat(&all, dim)?,
            )?;
        }
        Ok(())
    })
}

pub fn reduce_scatter(launch: &impl Launch) -> Result<()> {
    let shapes: [&[usize]; 5] = [&[0], &[1], &[3, 5], &[2, 1, 3], &[2, 0, 3]];
    for_all(launch, &shapes, |world, dims, dtype| {
        for (dim, op) in
            (0..dims.len()).flat_map(|dim| ops(dtype).into_iter().map(move |op| (dim, op)))
        {
            let mut dims = dims.to_vec();
            dims[dim] *= world.world_size();
            let all = inputs(3, world.world_size(), &dims, dtype)?;
            let got = world.reduce_scatter(&on(world, &all[world.rank()])?, op, dim)?;
            let expected = part(&reduce(&all, op)?, dim, world.rank(), world.world_size())?;
            assert_same(
                &format!("reduce_scatter({op}) {dims:?} dim {dim}"),
                &got,
                &expected,
            )?;
        }
        Ok(())
    })
}

/// In a view of a larger buffer, of which the rest stays as it is.
pub fn in_place(launch: &impl Launch) -> Result<()> {
    let shapes: [&[usize]; 5] = [&[0], &[1], &[3, 5], &[2, 1, 3], &[2, 0, 3]];
    for_all(launch, &shapes, |world, dims, dtype| {
        let (rank, n) = (world.rank(), world.world_size());
        let mut dims = dims.to_vec();
        dims[0] *= n;
        let around = |xs: &Tensor| Tensor::cat(&[xs, xs, xs], 0);
        for op in ops(dtype) {
            let all = inputs(11, n, &dims, dtype)?;
            let what = format!("all_reduce({op}) in place {dims:?}");
            let buffer = on(world, &around(&all[rank])?)?;
            let mine = buffer.narrow(0, dims[0], dims[0])?;
            let got = world.start_all_reduce_in_place(&mine, op)?.wait()?;
            let expected = reduce(&all, op)?;
            assert_same(&what, &got, &expected)?;
            let expected = cat(&[all[rank].clone(), expected, all[rank].clone()], 0)?;
            assert_same(&what, &buffer, &expected)?;
            let what = format!("reduce_scatter({op}) in place {dims:?}");
            let buffer = on(world, &around(&all[rank])?)?;
            let mine = buffer.narrow(0, dims[0], dims[0])?;
            let got = world.start_reduce_scatter_in_place(&mine, op)?.wait()?;
            let expected = part(&reduce(&all, op)?, 0, rank, n)?;
            assert_same(&what, &got, &expected)?;
            let mut slices = (0..n)
                .map(|slice| part(&all[rank], 0, slice, n))
                .collect::<Result<Vec<_>>>()?;
            slices[rank] = expected;
            let expected = cat(&[all[rank].clone(), cat(&slices, 0)?, all[rank].clone()], 0)?;
            assert_same(&what, &buffer, &expected)?;
        }
        let all = inputs(12, n, &dims, dtype)?;
        let what = format!("all_gather in place {dims:?}");
        let buffer = on(world, &around(&all[rank])?)?;
        let mine = buffer.narrow(0, dims[0], dims[0])?;
        let got = world.start_all_gather_in_place(&mine)?.wait()?;
        let slices = (0..n)
            .map(|slice| part(&all[slice], 0, slice, n))
            .collect::<Result<Vec<_>>>()?;
        let expected = cat(&slices, 0)?;
        assert_same(&what, &got, &expected)?;
        let expected = cat(&[all[rank].clone(), expected, all[rank].clone()], 0)?;
        assert_same(&what, &buffer, &expected)
    })
}

pub fn broadcast(launch: &impl Launch) -> Result<()> {
    let shapes: [&[usize]; 5] = [&[], &[0], &[7], &[3, 5], &[4099]];
    for_all(launch, &shapes, |world, dims, dtype| {
        for root in 0..world.world_size() {
            let mine = on(world, &input(4, world.rank(), dims, dtype)?)?;
            let got = world.broadcast(&mine, root)?;
            assert_same(
                &format!("broadcast {dims:?} root {root}"),
                &got,
                &input(4, root, dims, dtype)?,
            )?;
        }
        Ok(())
    })
}

pub fn all_to_all(launch: &impl Launch) -> Result<()> {
    let shapes: [&[usize]; 5] = [&[0], &[1], &[3, 5], &[2, 1, 3], &[2, 0, 3]];
    for_all(launch, &shapes, |world, dims, dtype| {
        for dim in 0..dims.len() {
            let n = world.world_size();
            let mut dims = dims.to_vec();
            dims[dim] *= n;
            let all = inputs(5, n, &dims, dtype)?;
            let got = world.all_to_all(&on(world, &all[world.rank()])?, dim)?;
            let parts = all
                .iter()
                .map(|xs| part(xs, dim, world.rank(), n))
                .collect::<Result<Vec<_>>>()?;
            assert_same(
                &format!("all_to_all {dims:?} dim {dim}"),
                &got,
                &cat(&parts, dim)?,
            )?;
        }
        Ok(())
    })
}

/// Parts of all sizes, none at all among them, of tensors with and without elements.
pub fn all_to_all_uneven(launch: &impl Launch) -> Result<()> {
    let shapes: [&[usize]; 4] = [&[1], &[5], &[3, 2], &[0]];
    for_all(launch, &shapes, |world, dims, dtype| {
        let (rank, n) = (world.rank(), world.world_size());
        for most in [0, 1, 2, 5] {
            // Rows from one rank to another.
            let size = |from: usize, to: usize| (from * 7 + to * 5 + from * to) % (most + 1);
            let sent = |from: usize| -> Vec<usize> { (0..n).map(|to| size(from, to)).collect() };
            let input_of = |from: usize| {
                let mut dims = dims.to_vec();
                dims.insert(0, sent(from).iter().sum());
                input(13, from, &dims, dtype)
            };
            let receives: Vec<usize> = (0..n).map(|from| size(from, rank)).collect();
            let mine = on(world, &input_of(rank)?)?;
            let got = world
                .start_all_to_all_uneven(&mine, &sent(rank), &receives)?
                .wait()?;
            let parts = (0..n).map(|from| {
                let first = sent(from)[..rank].iter().sum();
                input_of(from)?.narrow(0, first, size(from, rank))
            });
            let parts = parts.filter(|part| part.as_ref().is_ok_and(|part| part.elem_count() > 0));
            let what = format!("all_to_all of at most {most} rows of {dims:?}");
            match &parts.collect::<Result<Vec<_>>>()?[..] {
                [] => assert_eq!(got.dims()[0], receives.iter().sum::<usize>(), "{what}"),
                parts => assert_same(&what, &got, &cat(parts, 0)?)?,
            }
            if n > 1 && got.elem_count() > 0 {
                got.zero_set()?;
                assert_same("its input", &mine, &input_of(rank)?)?;
            }
        }
        Ok(())
    })
}

/// Large enough for the work to be shared out or done in the background, with sizes that nothing divides.
pub fn large(launch: &impl Launch) -> Result<()> {
    large_with_root(launch)?;
    for (world_size, dtype) in [(2, DType::F32), (3, DType::BF16), (5, DType::F32)] {
        launch.run(world_size, |world| {
            let (rank, n) = (world.rank(), world_size);
            let all = inputs(7, n, &[n * 60_013, 3], dtype)?;
            let sum = reduce(&all, ReduceOp::Sum)?;
            let mine = &on(&world, &all[rank])?;
            assert_same("all_reduce", &world.all_reduce(mine, ReduceOp::Sum)?, &sum)?;
            assert_same(
                "reduce_scatter",
                &world.reduce_scatter(mine, ReduceOp::Sum, 0)?,
                &part(&sum, 0, rank, n)?,
            )?;
            assert_same("all_gather", &world.all_gather(mine, 0)?, &cat(&all, 0)?)?;
            assert_same(
                "all_gather dim 1",
                &world.all_gather(mine, D::Minus1)?,
                &cat(&all, 1)?,
            )?;
            let parts = all
                .iter()
                .map(|xs| part(xs, 0, rank, n))
                .collect::<Result<Vec<_>>>()?;
            assert_same("all_to_all", &world.all_to_all(mine, 0)?, &cat(&parts, 0)?)?;
            assert_same("broadcast", &world.broadcast(mine, n - 1)?, &all[n - 1])?;
            let whole = &mine.force_contiguous()?;
            world
                .start_all_reduce_in_place(whole, ReduceOp::Sum)?
                .wait()?;
            assert_same("all_reduce in place", whole, &sum)?;
            let whole = &mine.force_contiguous()?;
            let slice = world.start_reduce_scatter_in_place(whole, ReduceOp::Sum)?;
            let slice = slice.wait()?;
            assert_same("reduce_scatter in place", &slice, &part(&sum, 0, rank, n)?)?;
            world.start_all_gather_in_place(whole)?.wait()?;
            assert_same("all_gather in place", whole, &sum)
        })?;
    }
    Ok(())
}
