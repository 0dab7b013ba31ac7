//! Spans that a thread records of its operations.

use candle_comm::trace::{self, PassKind, Span, SpanKind};
use candle_comm::{Degrees, Mesh, ReduceOp, launch};
use candle_core::{Device, Result, Tensor};

fn operation(span: &Span) -> Option<(&'static str, &'static str)> {
    match &span.kind {
        SpanKind::Idle(op) => Some(("idle", op.operation)),
        SpanKind::Communication(op) => Some(("communication", op.operation)),
        _ => None,
    }
}

fn pass(pass: PassKind, micro_batch: usize) -> SpanKind {
    SpanKind::Pass {
        pass,
        stage: 1,
        micro_batch,
    }
}

#[test]
fn waits_lie_within_what_they_are_part_of_and_operations_last_from_call_to_end() {
    let recordings = launch::threads(2, |world| {
        let degrees = Degrees {
            tp: 2,
            ..Degrees::default()
        };
        let mesh = Mesh::new(world, degrees)?;
        let xs = Tensor::ones(1000, candle_core::DType::F32, &Device::Cpu)?;
        // Not recorded.
        mesh.tp.all_reduce(&xs, ReduceOp::Sum)?;
        trace::start(100);
        mesh.world.set_step(7, "test");
        let started = trace::record(pass(PassKind::Forward, 3), &Device::Cpu, || {
            mesh.tp.all_reduce(&xs, ReduceOp::Sum)?;
            mesh.tp.start_all_gather(&xs)
        })?;
        // All have started it, so it is there when it is waited for.
        mesh.world.barrier()?;
        started.wait()?;
        let recording = trace::stop();
        mesh.tp.all_reduce(&xs, ReduceOp::Sum)?;
        assert!(trace::stop().spans.is_empty());
        Ok(recording)
    })
    .unwrap();
    for recording in recordings {
        assert_eq!(recording.num_dropped, 0);
        let spans = recording.spans;
        assert!(spans.iter().all(|span| span.step == 7), "{spans:?}");
        let of = |kind, name| {
            let found = spans
                .iter()
                .filter(|it| operation(it) == Some((kind, name)));
            found.collect::<Vec<_>>()
        };
        let SpanKind::Communication(op) = &of("communication", "all_reduce")[0].kind else {
            unreachable!()
        };
        assert_eq!((op.group, op.num_ranks, op.bytes), ("tp", 2, 4000));
        let forward = spans
            .iter()
            .find(|it| it.kind == pass(PassKind::Forward, 3));
        let forward = forward.unwrap();
        for wait in of("idle", "all_reduce") {
            assert!(forward.start <= wait.start && wait.end <= forward.end);
        }
        let gather = of("communication", "all_gather");
        let [gather] = gather[..] else {
            panic!("{spans:?}")
        };
        assert!(forward.start <= gather.start && gather.start <= forward.end);
        // It was hidden: nobody waited for it.
        assert!(of("idle", "all_gather").is_empty(), "{spans:?}");
        assert_eq!(of("communication", "barrier").len(), 1);
    }
}

#[test]
fn what_has_no_room_is_counted() {
    trace::start(3);
    for micro_batch in 0..5 {
        let kind = pass(PassKind::Backward, micro_batch);
        let result: Result<()> = trace::record(kind, &Device::Cpu, || match micro_batch {
            1 => candle_core::bail!("it fails"),
            _ => Ok(()),
        });
        assert_eq!(result.is_err(), micro_batch == 1);
    }
    let recording = trace::stop();
    let kinds: Vec<_> = recording.spans.into_iter().map(|span| span.kind).collect();
    let expected = (0..3).map(|micro_batch| pass(PassKind::Backward, micro_batch));
    assert_eq!(kinds, expected.collect::<Vec<_>>());
    assert_eq!(recording.num_dropped, 2);
}
