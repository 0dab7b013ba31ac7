//! Coordinates and groups of the mesh.

use candle_comm::{Degrees, Mesh, ProcessGroup, ReduceOp, launch};
use candle_core::{Device, Result, Tensor};

/// The world ranks of a group, in its order.
fn members(group: &ProcessGroup, world_rank: usize) -> Result<Vec<u32>> {
    group
        .all_gather(&Tensor::new(&[world_rank as u32], &Device::Cpu)?, 0)?
        .to_vec1::<u32>()
}

#[test]
fn coordinates_follow_the_formula() -> Result<()> {
    for (pp, dp, cp, tp) in [
        (1, 1, 1, 1),
        (2, 1, 1, 2),
        (1, 4, 1, 1),
        (2, 2, 1, 2),
        (1, 2, 3, 1),
        (2, 2, 2, 2),
        (3, 1, 1, 2),
    ] {
        let degrees = Degrees { pp, dp, cp, tp };
        launch::threads(pp * dp * cp * tp, |world| {
            let rank = world.rank();
            let mesh = Mesh::new(world, degrees)?;
            let at =
                |p: usize, d: usize, c: usize, t: usize| (((p * dp + d) * cp + c) * tp + t) as u32;
            let (p, d, c, t) = (
                mesh.pp.rank(),
                mesh.dp.rank(),
                mesh.cp.rank(),
                mesh.tp.rank(),
            );
            assert_eq!(at(p, d, c, t), rank as u32);
            assert_eq!(mesh.degrees, degrees);
            let axis =
                |size: usize, at: &dyn Fn(usize) -> u32| (0..size).map(at).collect::<Vec<_>>();
            // A group of one gathers its input.
            assert_eq!(members(&mesh.pp, rank)?, axis(pp, &|i| at(i, d, c, t)));
            assert_eq!(members(&mesh.dp, rank)?, axis(dp, &|i| at(p, i, c, t)));
            assert_eq!(members(&mesh.cp, rank)?, axis(cp, &|i| at(p, d, i, t)));
            assert_eq!(members(&mesh.tp, rank)?, axis(tp, &|i| at(p, d, c, i)));
            assert_eq!(
                mesh.world.counters().total().calls,
                0,
                "making a mesh counts nothing"
            );
            let ones = Tensor::new(&[1f32], &Device::Cpu)?;
            assert_eq!(
                mesh.tp.all_reduce(&ones, ReduceOp::Sum)?.to_vec1::<f32>()?,
                [tp as f32]
            );
            Ok(())
        })?;
    }
    Ok(())
}

#[test]
fn a_wrong_product_prints_the_equation() {
    let error = launch::threads(8, |world| {
        Mesh::new(
            world,
            Degrees {
                pp: 2,
                dp: 2,
                cp: 1,
                tp: 3,
            },
        )
    })
    .map(|_| ());
    let error = error.unwrap_err().to_string();
    assert!(
        error.contains("pp(2) * dp(2) * cp(1) * tp(3) = 12 != world_size(8)"),
        "{error}"
    );
}

#[test]
fn a_degree_of_zero_is_named() {
    let degrees = Degrees {
        dp: 0,
        ..Degrees::default()
    };
    let error = Mesh::new(ProcessGroup::single(Device::Cpu), degrees)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("pp(1) * dp(0) * cp(1) * tp(1): dp is 0"),
        "{error}"
    );
}

#[test]
fn an_overflow_is_an_error() {
    let degrees = Degrees {
        pp: usize::MAX,
        dp: 2,
        ..Degrees::default()
    };
    assert!(Mesh::new(ProcessGroup::single(Device::Cpu), degrees).is_err());
}

#[test]
fn ranks_must_agree_about_the_degrees() {
    let error = launch::threads(4, |world| {
        let pp = 1 + world.rank() / 3;
        Mesh::new(
            world,
            Degrees {
                pp,
                dp: 4 / pp,
                cp: 1,
                tp: 1,
            },
        )
    });
    let error = error.map(|_| ()).unwrap_err().to_string();
    assert!(
        error.contains("ranks disagree about the mesh") && error.contains("pp(2) * dp(2)"),
        "{error}"
    );
    assert!(error.contains("pp(1) * dp(4)"), "{error}");
}
