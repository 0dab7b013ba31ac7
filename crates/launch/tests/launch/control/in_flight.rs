//! Which rank is named when one is late and the others have several operations in flight.

use std::sync::Arc;
use std::time::{Duration, Instant};

use candle_launch::{Control, FailureKind, RankGroup};

use super::ranks::{operation, ranks_with};

/// What ranks with a short deadline hear of why the run ends. Each does `act`, and keeps what it gives until then.
fn deadline_report<T>(world_size: usize, act: impl Fn(&Control) -> T + Sync) -> String {
    let reports = ranks_with(
        world_size,
        |config| config.deadline = Duration::from_millis(600),
        |control| {
            let control = control.unwrap();
            let _in_flight = act(&control);
            while control.failure().is_none() {
                std::thread::sleep(Duration::from_millis(10));
            }
            control.failure().unwrap().message
        },
    );
    assert!(reports.iter().all(|report| *report == reports[0]));
    reports.into_iter().next().unwrap()
}

fn line(report: &str, rank: usize) -> &str {
    let start = format!("  rank {rank} on host");
    report
        .lines()
        .find(|line| line.starts_with(&start))
        .unwrap()
}

#[test]
fn a_rank_that_waits_in_a_later_operation_has_come_to_the_earlier() {
    let report = deadline_report(3, |control| {
        let group = Arc::new(RankGroup::world(3));
        let begin = |seq| control.begin(operation(&group, seq, "all_reduce(sum) of f32 [8]"));
        drop(begin(39));
        if control.rank() == 2 {
            return Vec::new();
        }
        let tickets = vec![begin(40), begin(41), begin(42)];
        tickets.iter().for_each(|ticket| ticket.started());
        // Rank 1 waits in the order in which it needs the results.
        tickets[2 * control.rank()].waits();
        tickets
    });
    // Whichever rank says it first.
    let place = "the deadline, in operation number";
    let expected = [
        format!("{place} 40 of group [0, 1, 2], which rank 2 did not call\n"),
        format!(
            "{place} 42 of group [0, 1, 2], which rank 2 did not call, nor number 40 before it\n"
        ),
    ];
    assert!(
        expected.iter().any(|expected| report.contains(expected)),
        "{report}"
    );
    assert!(
        line(&report, 1).contains("operation number 42); 2 more in flight, the oldest"),
        "{report}"
    );
    assert!(
        line(&report, 1).ends_with("operation number 40)"),
        "{report}"
    );
    assert!(
        line(&report, 2).contains(": finished all_reduce(sum) of f32 [8] at "),
        "{report}"
    );
}

fn group(id: &str, members: &[usize]) -> Arc<RankGroup> {
    Arc::new(RankGroup {
        id: id.into(),
        members: members.to_vec(),
    })
}

/// Rank 0 waits for rank 1, that for rank 2, and that for rank 0, while rank 3 waits for one of them.
#[test]
fn ranks_that_wait_for_each_other_in_a_circle_are_named_long_before_the_deadline() {
    let begin = Instant::now();
    let reports = ranks_with(
        4,
        |config| config.deadline = Duration::from_secs(60),
        |control| {
            let control = control.unwrap();
            let rank = control.rank();
            let members = [vec![0, 1, 3], vec![1, 2], vec![0, 2], vec![0, 1, 3]][rank].clone();
            let of = group(&format!("{members:?}"), &members);
            // The others have called this one.
            drop(control.begin(operation(&of, 0, "barrier")));
            let _in_flight = control.begin(operation(&of, 1, "barrier"));
            while control.failure().is_none() {
                std::thread::sleep(Duration::from_millis(10));
            }
            control.failure().unwrap()
        },
    );
    assert!(begin.elapsed() < Duration::from_secs(30));
    for failure in reports {
        assert_eq!((failure.kind, failure.rank), (FailureKind::Deadlock, None));
        let first = failure.message.lines().next().unwrap();
        assert_eq!(
            first,
            "ranks 0, 1, 2 wait for each other in different groups"
        );
        assert!(failure.message.contains("\nhint: every rank must call"));
    }
}

/// Of two ranks that seem to wait for each other one may still call what is missing: only its GPU waits, or another thread, or there is one.
#[test]
fn ranks_that_may_go_on_are_no_circle() {
    for goes_on_by in ["GPU", "another thread", "a thread that waits"] {
        let reports = ranks_with(
            2,
            |config| config.deadline = Duration::from_secs(60),
            |control| {
                let control = control.unwrap();
                let (own, other) = (group("a", &[0, 1]), group("b", &[0, 1]));
                let (own, other) = match control.rank() {
                    0 => (own, other),
                    _ => (other, own),
                };
                let waiting = control.begin(operation(&own, 0, "barrier"));
                if control.rank() == 1 {
                    let other = || drop(control.begin(operation(&group("c", &[1]), 0, "barrier")));
                    std::thread::scope(|threads| match goes_on_by {
                        "GPU" => waiting.gpu_waits(),
                        "another thread" => drop(threads.spawn(other)),
                        _ => drop(threads.spawn(|| waiting.waits())),
                    });
                }
                std::thread::sleep(Duration::from_secs(5));
                let failure = control.failure();
                drop(control.begin(operation(&other, 0, "barrier")));
                failure
            },
        );
        assert_eq!(reports, [None, None], "{goes_on_by}");
    }
}

/// Ranks 0 and 2 are one group, ranks 2 and 3 another, in which rank 2 waits for rank 3.
#[test]
fn the_rank_that_another_group_waits_for_is_named() {
    let report = deadline_report(4, |control| {
        let (dp, tp) = (group("dp", &[0, 2]), group("tp", &[2, 3]));
        match control.rank() {
            0 => {
                // Known before it is late.
                std::thread::sleep(Duration::from_millis(200));
                Some(control.begin(operation(&dp, 0, "all_reduce(sum) of f32 [8]")))
            }
            2 => {
                let ticket = control.begin(operation(&tp, 0, "barrier"));
                ticket.started();
                std::thread::sleep(Duration::from_millis(400));
                ticket.waits();
                Some(ticket)
            }
            _ => None,
        }
    });
    let expected = "in operation number 0 of group [0, 2], which rank 2 did not call: rank 2 is in operation number 0 of \
                    group [2, 3], which rank 3 did not call\n";
    assert!(report.contains(expected), "{report}");
}

#[test]
fn a_rank_whose_gpu_is_late_is_named() {
    let report = deadline_report(2, |control| {
        let group = Arc::new(RankGroup::world(2));
        let begin = |seq| control.begin(operation(&group, seq, "all_reduce(sum) of f32 [8]"));
        let tickets = [begin(0), begin(1)];
        tickets.iter().for_each(|ticket| ticket.queued());
        if control.rank() == 0 {
            tickets[0].gpu_waits();
        }
        tickets
    });
    let expected =
        "in operation number 0 of group [0, 1], to which the GPU of rank 1 has not come\n";
    assert!(report.contains(expected), "{report}");
    assert!(
        line(&report, 1).contains(": called all_reduce(sum) of f32 [8] at "),
        "{report}"
    );
    assert!(
        line(&report, 1).contains(" s ago, its GPU has not come to it; 1 more in flight"),
        "{report}"
    );
}
