//! Operations that do not fit together, and arguments that cannot be right, are errors that name everything.

use candle_comm::{LocalConfig, P2p, ProcessGroup, ReduceOp, Scope, launch};
use candle_core::{DType, Device, Result, Tensor};

fn zeros(dims: &[usize], dtype: DType) -> Tensor {
    Tensor::zeros(dims, dtype, &Device::Cpu).unwrap()
}

/// Each rank's error from `run`, which must fail on all ranks.
fn errors(world_size: usize, run: impl Fn(&ProcessGroup) -> Result<()> + Sync) -> Vec<String> {
    launch::threads_with(
        LocalConfig {
            delays: Some(5),
            ..LocalConfig::new(world_size)
        },
        |world| {
            let error = run(&world).map(|()| format!("rank {} did not fail", world.rank()));
            // The group is still usable: all ranks failed in the same operation.
            world.barrier()?;
            Ok(error.unwrap_or_else(|error| error.to_string()))
        },
    )
    .unwrap()
}

#[track_caller]
fn assert_all_say(errors: &[String], words: &[&str]) {
    for (rank, error) in errors.iter().enumerate() {
        for word in words {
            assert!(
                error.contains(word),
                "rank {rank} should say {word:?}: {error}"
            );
        }
    }
}

#[test]
fn the_same_operation_for_different_parts_of_the_work() {
    let backward_pass = |block: usize, number: u64| Scope {
        what: "backward pass",
        block,
        number,
    };
    let of_ranks = |scopes: [Scope; 2], num_before: [usize; 2]| {
        errors(2, |world| {
            let xs = zeros(&[2, 3], DType::F32);
            let rank = world.rank();
            let others = [world.split(0, rank)?, ProcessGroup::single(Device::Cpu)];
            let work = || {
                // Those of other groups do not belong to it.
                for other in &others {
                    other.all_reduce(&xs, ReduceOp::Sum)?;
                }
                for _ in 0..num_before[rank] {
                    world.barrier()?;
                }
                world.all_reduce(&xs, ReduceOp::Sum).map(|_| ())
            };
            let (result, number) = scopes[rank].run(world, work);
            assert_eq!(number, 1 + num_before[rank] as u64);
            // Outside of the scope the calls are equal.
            world.all_reduce(&xs, ReduceOp::Sum)?;
            result
        })
    };
    let got = of_ranks([backward_pass(2, 1), backward_pass(3, 1)], [0, 0]);
    let words = [
        "rank 0: all_reduce(sum) of f32 [2, 3] (backward pass 1 of block 2, collective 0) at ",
        "rank 1: all_reduce(sum) of f32 [2, 3] (backward pass 1 of block 3, collective 0) at ",
    ];
    assert_all_say(&got, &words);
    let got = of_ranks([backward_pass(2, 1), backward_pass(2, 3)], [0, 0]);
    assert_all_say(
        &got,
        &["backward pass 1 of block 2", "backward pass 3 of block 2"],
    );
    let same = [backward_pass(2, 1), backward_pass(2, 1)];
    let got = of_ranks(same, [1, 1]);
    assert_all_say(&got, &["did not fail"]);
}

#[test]
fn different_operations() {
    let got = errors(2, |world| {
        let xs = zeros(&[2, 3], DType::F32);
        match world.rank() {
            0 => world.all_reduce(&xs, ReduceOp::Sum).map(|_| ()),
            _ => world.all_gather(&xs, 0).map(|_| ()),
        }
    });
    let words = ["ranks disagree in group [0, 1], operation number 0"];
    assert_all_say(&got, &words);
    assert_all_say(
        &got,
        &[
            "rank 0: all_reduce(sum) of f32 [2, 3] at ",
            "rank 1: all_gather of f32 [2, 3] at ",
        ],
    );
    assert_all_say(&got, &["mismatches.rs:", "hint: "]);
}

#[test]
fn different_shapes_dtypes_roots_and_reductions() {
    let shapes = errors(3, |world| {
        let dims = [[2, 3], [2, 3], [2, 4]][world.rank()];
        world
            .all_reduce(&zeros(&dims, DType::F32), ReduceOp::Sum)
            .map(|_| ())
    });
    assert_all_say(
        &shapes,
        &[
            "all_reduce(sum) of f32 [2, 3]",
            "rank 2: all_reduce(sum) of f32 [2, 4]",
        ],
    );
    let dtypes = errors(2, |world| {
        let dtype = [DType::BF16, DType::F16][world.rank()];
        world.all_gather(&zeros(&[2], dtype), 0).map(|_| ())
    });
    assert_all_say(
        &dtypes,
        &[
            "rank 0: all_gather of bf16 [2]",
            "rank 1: all_gather of f16 [2]",
        ],
    );
    let roots = errors(2, |world| {
        world
            .broadcast(&zeros(&[2], DType::F32), world.rank())
            .map(|_| ())
    });
    assert_all_say(
        &roots,
        &[
            "rank 0: broadcast(root 0) of f32",
            "rank 1: broadcast(root 1) of f32",
        ],
    );
    let ops = errors(2, |world| {
        let op = [ReduceOp::Sum, ReduceOp::Max][world.rank()];
        world
            .reduce_scatter(&zeros(&[2], DType::F32), op, 0)
            .map(|_| ())
    });
    assert_all_say(
        &ops,
        &["rank 0: reduce_scatter(sum)", "rank 1: reduce_scatter(max)"],
    );
    let roots = errors(3, |world| {
        let root = usize::from(world.rank() == 2);
        world
            .reduce(&zeros(&[2], DType::F32), root, ReduceOp::Min)
            .map(|_| ())
    });
    assert_all_say(
        &roots,
        &[
            "reduce(min, root 0) of f32 [2] at ",
            "rank 2: reduce(min, root 1) of f32 [2] at ",
        ],
    );
    let roots = errors(2, |world| {
        world
            .scatter(&zeros(&[3, 4], DType::F32), &[1, 2], world.rank(), 0)
            .map(|_| ())
    });
    assert_all_say(
        &roots,
        &[
            "rank 0: scatter(root 0, sizes [1, 2]) of f32 [3, 4] at ",
            "rank 1: scatter(root 1, sizes [1, 2]) of f32 [3, 4] at ",
        ],
    );
    let lengths = errors(2, |world| {
        let sizes = [[2, 3], [2, 4]][world.rank()];
        let xs = zeros(&[sizes[world.rank()], 5], DType::F32);
        world.gather(&xs, &sizes, 1, 0).map(|_| ())
    });
    assert_all_say(
        &lengths,
        &[
            "rank 0: gather(root 1, sizes [2, 3]) of f32 [5, 5] at ",
            "rank 1: gather(root 1, sizes [2, 4]) of f32 [6, 5] at ",
        ],
    );
    let kinds = errors(2, |world| match world.rank() {
        0 => world.barrier(),
        _ => world.split(0, 0).map(|_| ()),
    });
    assert_all_say(&kinds, &["rank 0: barrier at", "rank 1: split at"]);
}

#[test]
fn started_operations_fail_at_the_wait() {
    let got = errors(2, |world| {
        let good = world.start_all_reduce(&zeros(&[3], DType::F32), ReduceOp::Sum)?;
        let bad = world.start_all_reduce(&zeros(&[3 + world.rank()], DType::F32), ReduceOp::Sum)?;
        let also_good = world.start_all_gather(&zeros(&[1], DType::U8))?;
        assert_eq!(also_good.wait()?.dims(), [2]);
        good.wait()?;
        bad.wait().map(|_| ())
    });
    assert_all_say(&got, &["operation number 1", "f32 [3]", "f32 [4]"]);
}

#[test]
fn a_mismatch_is_found_before_the_last_rank_arrives() {
    // Rank 2 arrives only after the others have reported their errors to it.
    let got = errors(3, |world| {
        let xs = zeros(&[1 + world.rank()], DType::F32);
        if world.rank() == 2 {
            let done = || P2p::Recv {
                shape: 1.into(),
                dtype: DType::F32,
                src: 0,
            };
            world.batch_send_recv(&[
                done(),
                P2p::Recv {
                    shape: 1.into(),
                    dtype: DType::F32,
                    src: 1,
                },
            ])?;
            return world.all_reduce(&xs, ReduceOp::Sum).map(|_| ());
        }
        let result = world.all_reduce(&xs, ReduceOp::Sum).map(|_| ());
        world.batch_send_recv(&[P2p::Send {
            xs: &zeros(&[1], DType::F32),
            dst: 2,
        }])?;
        result
    });
    assert_all_say(
        &got,
        &[
            "rank 0: all_reduce(sum) of f32 [1]",
            "rank 1: all_reduce(sum) of f32 [2]",
        ],
    );
}

#[test]
fn a_split_group_names_world_ranks() {
    let error = launch::threads(4, |world| {
        let pair = world.split(world.rank() % 2, 0)?;
        let size = if world.rank() == 3 { 5 } else { 4 };
        pair.all_reduce(&zeros(&[size], DType::F32), ReduceOp::Sum)?;
        world.barrier()
    });
    let error = error.unwrap_err().to_string();
    assert!(
        error.starts_with("rank 1 failed: ") || error.starts_with("rank 3 failed: "),
        "{error}"
    );
    for word in [
        "group [1, 3]",
        "rank 1: all_reduce(sum) of f32 [4]",
        "rank 3: all_reduce(sum) of f32 [5]",
    ] {
        assert!(error.contains(word), "{error}");
    }
}

#[test]
fn messages_of_another_shape_or_dtype() {
    for (dims, dtype, expected) in [
        (vec![3], DType::F32, "receives f32 [3] at"),
        (vec![2, 1], DType::U8, "receives u8 [2, 1] at"),
    ] {
        let error = launch::threads(2, |world| {
            if world.rank() == 0 {
                world.batch_send_recv(&[P2p::Send {
                    xs: &zeros(&[2, 1], DType::F32),
                    dst: 1,
                }])?;
                return Ok(());
            }
            let recv = P2p::Recv {
                shape: dims.as_slice().into(),
                dtype,
                src: 0,
            };
            world.batch_send_recv(&[recv]).map(|_| ())
        });
        let error = error.unwrap_err().to_string();
        for word in [
            "rank 1 failed: ",
            "group [0, 1]",
            "rank 0: sent f32 [2, 1] at",
            expected,
            "mismatches.rs:",
        ] {
            assert!(error.contains(word), "{word}: {error}");
        }
    }
}

#[test]
fn uneven_parts_of_another_size() {
    let error = launch::threads(2, |world| {
        let (xs, rank) = (zeros(&[3, 2], DType::F32), world.rank());
        let sizes = [[1, 2], [2, 1]][rank];
        let receives = [[1, 2], [1, 1]][rank];
        world
            .start_all_to_all_uneven(&xs, &sizes, &receives)?
            .wait()
            .map(|_| ())
    });
    let error = error.unwrap_err().to_string();
    for word in [
        "rank 1 failed: a message does not match its receive, in group [0, 1]",
        "rank 0: sent f32 [2, 2] at",
        "rank 1: receives f32 [1, 2] at",
        "mismatches.rs:",
    ] {
        assert!(error.contains(word), "{word}: {error}");
    }
}

#[test]
fn arguments() {
    let message = |run: &(dyn Fn(&ProcessGroup, &Tensor) -> Result<()> + Sync)| {
        let said = errors(3, |world| run(world, &zeros(&[4, 2], DType::F32)));
        said[0].clone()
    };
    let said = message(&|world, xs| world.reduce_scatter(xs, ReduceOp::Sum, 0).map(|_| ()));
    assert_eq!(
        said,
        "reduce_scatter along dim 0 of shape [4, 2]: 4 is not divisible by world_size(3)"
    );
    let said = message(&|world, xs| world.all_to_all(xs, 1).map(|_| ()));
    assert_eq!(
        said,
        "all_to_all along dim 1 of shape [4, 2]: 2 is not divisible by world_size(3)"
    );
    let said = message(&|world, xs| world.broadcast(xs, 3).map(|_| ()));
    assert_eq!(
        said,
        "broadcast: root 3 is not a rank of a group of world_size 3"
    );
    let said = message(&|world, xs| {
        world
            .batch_send_recv(&[P2p::Send { xs, dst: 7 }])
            .map(|_| ())
    });
    assert_eq!(
        said,
        "batch_send_recv: dst 7 is not a rank of a group of world_size 3"
    );
    let said = message(&|world, xs| {
        world
            .batch_send_recv(&[P2p::Send {
                xs,
                dst: world.rank(),
            }])
            .map(|_| ())
    });
    assert_eq!(said, "batch_send_recv: dst 0 is this rank itself");
    let uneven = |sends: &[usize], receives: &[usize]| {
        message(&|world, xs| {
            world
                .start_all_to_all_uneven(xs, sends, receives)
                .map(|_| ())
        })
    };
    assert_eq!(
        uneven(&[4, 0], &[4, 0]),
        "all_to_all of uneven parts: expected a size to send and one to receive for each of 3 ranks, got 2 and 2"
    );
    assert_eq!(
        uneven(&[1, 1, 1], &[1, 1, 1]),
        "all_to_all of uneven parts: the sizes to send, [1, 1, 1], do not add up to the 4 rows of the tensor"
    );
    let said = message(&|world, xs| {
        let mut receives = [0, 0, 0];
        receives[world.rank()] = 1;
        world
            .start_all_to_all_uneven(xs, &[0, 2, 2], &receives)
            .map(|_| ())
    });
    assert_eq!(
        said,
        "all_to_all of uneven parts: rank 0 sends itself 0 rows, but receives 1"
    );
    let said = message(&|world, xs| world.reduce(xs, 3, ReduceOp::Sum).map(|_| ()));
    assert_eq!(
        said,
        "reduce: root 3 is not a rank of a group of world_size 3"
    );
    let said = message(&|world, xs| world.gather(xs, &[4, 4], 1, 0).map(|_| ()));
    assert_eq!(
        said,
        "gather(root 1, sizes [4, 4]): expected a size for each of 3 ranks, got 2"
    );
    let said = message(&|world, xs| world.gather(xs, &[3, 3, 3], 1, 0).map(|_| ()));
    assert_eq!(
        said,
        "gather(root 1, sizes [3, 3, 3]): expected 3 rows on rank 0, got 4"
    );
    let said = message(&|world, xs| {
        let root = world.rank();
        world.scatter(xs, &[1, 1, 1], root, 0).map(|_| ())
    });
    assert_eq!(
        said,
        "scatter(root 0, sizes [1, 1, 1]): expected 3 rows on rank 0, got 4"
    );
    let said = message(&|world, _| {
        let xs = zeros(&[4], DType::I64);
        world.all_reduce(&xs, ReduceOp::Avg).map(|_| ())
    });
    assert_eq!(
        said,
        "all_reduce(avg) of i64: an average of integers is none\nhint: take the sum, or averages of f32 or f64"
    );
    let said = message(&|world, xs| world.all_gather(xs, 2).map(|_| ()));
    assert!(said.contains("[4, 2]") && said.contains('2'), "{said}");
    let said = message(&|world, _| world.start_all_gather(&zeros(&[], DType::F32)).map(|_| ()));
    assert!(
        said.contains("all_gather along dim 0: the tensor of shape [] has no such dim"),
        "{said}"
    );
    let said = message(&|world, _| {
        let xs = zeros(&[4], DType::F32).to_dtype(DType::F8E4M3)?;
        world.all_reduce(&xs, ReduceOp::Sum).map(|_| ())
    });
    assert!(said.contains("not f8e4m3"), "{said}");
}
