//! Gathers, checks and goodbyes.

use std::sync::Arc;
use std::time::Duration;

use candle_launch::{RankGroup, Verdict};

use super::ranks::{operation, ranks};

#[test]
fn a_gather_has_all_ranks_bytes_in_order() {
    let gathered = ranks(4, |control| {
        let mine = vec![control.rank() as u8; control.rank() * 1000];
        let first = control.gather("sizes", &mine).unwrap();
        control.gather("between", &[]).unwrap();
        let again = control.gather("sizes", &[9]).unwrap();
        assert_eq!(again, vec![vec![9]; 4]);
        control.leave().unwrap();
        first
    });
    let expected: Vec<Vec<u8>> = (0..4).map(|rank| vec![rank as u8; rank * 1000]).collect();
    assert_eq!(gathered, vec![expected; 4]);
}

#[test]
fn a_check_finds_who_called_something_else() {
    let verdicts = ranks(3, |control| {
        let group = Arc::new(RankGroup {
            id: "world/0:1".into(),
            members: vec![0, 2],
        });
        let verdicts = (control.rank() != 1).then(|| {
            let same = control.check(&operation(&group, 0, "barrier")).unwrap();
            let len = control.rank() + 4;
            let call = format!("all_reduce(sum) of f32 [{len}]");
            (same, control.check(&operation(&group, 1, &call)).unwrap())
        });
        control.leave().unwrap();
        verdicts
    });
    let (same, differ) = verdicts[0].clone().unwrap();
    assert_eq!((same, &verdicts[1]), (Verdict::Agree, &None));
    assert_eq!(verdicts[2], verdicts[0]);
    let Verdict::Differ { first, second } = differ else {
        panic!("{differ:?}");
    };
    assert_eq!((first.0, second.0), (0, 2));
    assert!(
        first.1.starts_with("all_reduce(sum) of f32 [4] at "),
        "{first:?}"
    );
    assert!(
        second.1.starts_with("all_reduce(sum) of f32 [6] at "),
        "{second:?}"
    );
    assert!(second.1.contains("exchange.rs:"), "{second:?}");
}

#[test]
fn what_needs_a_rank_that_has_left_does_not_wait_for_it() {
    let answers = ranks(2, |control| {
        if control.rank() == 1 {
            control.leave().unwrap();
            return None;
        }
        let verdict = control
            .check(&operation(control.world(), 0, "barrier"))
            .unwrap();
        let gather = control.gather("late", &[]).unwrap_err().to_string();
        control.leave().unwrap();
        Some((verdict, gather))
    });
    let (verdict, gather) = answers[0].clone().unwrap();
    let Verdict::Left { rank: 1, report } = verdict else {
        panic!("{verdict:?}");
    };
    assert!(report.contains("rank 1 on host host-1"), "{report}");
    assert!(report.contains("then left the run"), "{report}");
    assert!(gather.contains("rank 1 has left the run"), "{gather}");
}

#[test]
fn ranks_leave_in_any_order() {
    for last in 0..3 {
        ranks(3, |control| {
            if control.rank() == last {
                std::thread::sleep(Duration::from_millis(150));
            }
            control.leave().unwrap();
            assert_eq!(control.failure(), None);
        });
    }
}

#[test]
fn many_ranks_join_and_gather() {
    let sums = ranks(64, |control| {
        let gathered = control.gather("ranks", &[control.rank() as u8]).unwrap();
        control.leave().unwrap();
        gathered
            .iter()
            .map(|bytes| usize::from(bytes[0]))
            .sum::<usize>()
    });
    assert_eq!(sums, vec![2016; 64]);
}
