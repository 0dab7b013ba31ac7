//! Ranks that are killed, fail, hang or are stopped for a while.

use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use super::processes::{Rank, start};
use super::ranks::ranks;

/// Lets `happen` come to the last of the ranks, and returns how the others end. They do within 10 s.
fn others_after(what: &[&str], happen: impl FnOnce(&mut Rank)) -> Vec<super::processes::End> {
    let mut ranks = start(what);
    let mut last = ranks.pop().unwrap();
    let begun = Instant::now();
    happen(&mut last);
    let ends = ranks.into_iter().map(Rank::end).collect();
    assert!(begun.elapsed() < Duration::from_secs(10));
    // A rank that is still there has no part in what the others said.
    last.child.kill().unwrap();
    last.child.wait().unwrap();
    ends
}

#[test]
fn a_killed_rank_is_named_with_its_last_operation() {
    let ends = others_after(&["work", "stuck", "hold"], |rank| {
        rank.wait_for("holding");
        // Longer than a beat: what it does is known.
        std::thread::sleep(Duration::from_millis(700));
        rank.signal(Signal::SIGKILL);
    });
    for end in ends {
        end.because_of_another(&[
            "rank 2 on host host-2 (process ",
            "died: its connection closed without a goodbye",
            "s in all_reduce(sum) of f32 [8] at crates/launch/tests/launch/control/processes.rs:",
            "(group [0, 1, 2], operation number 41); step 3, forward",
        ]);
    }
}

#[test]
fn rank_0_may_be_the_one_that_is_killed() {
    let mut ranks = start(&["hold", "work", "stuck"]);
    let mut zero = ranks.remove(0);
    zero.wait_for("holding");
    std::thread::sleep(Duration::from_millis(1200));
    zero.signal(Signal::SIGKILL);
    let begun = Instant::now();
    for end in ranks.into_iter().map(Rank::end) {
        end.because_of_another(&[
            "rank 0 on host host-0 died: ",
            "s in all_reduce(sum) of f32 [8] at ",
            "operation number 41); step 3, forward",
        ]);
    }
    assert!(begun.elapsed() < Duration::from_secs(5));
    assert_eq!(zero.end().signal, Some(9));
}

#[test]
fn a_rank_that_fails_or_panics_or_ends_is_named_with_its_message() {
    for (what, said) in [
        ("fail", "rank 2 on host host-2 (process "),
        ("fail", "failed: the disk is full"),
        ("panic", "failed: it panicked"),
        ("end", "died: its connection closed without a goodbye"),
    ] {
        for end in others_after(&["work", "stuck", what], |_| {}) {
            end.because_of_another(&[said]);
        }
    }
}

#[test]
fn a_failure_of_rank_0_reaches_all() {
    for (what, said) in [
        ("fail", "rank 0 on host host-0 (process "),
        ("panic", "failed: it panicked"),
        ("end", "rank 0 on host host-0 died: its connection closed"),
    ] {
        let mut ranks = start(&[what, "work", "stuck"]);
        let zero = ranks.remove(0).end();
        assert!(matches!(zero.code, Some(0 | 1 | 101)), "{zero:?}");
        for end in ranks.into_iter().map(Rank::end) {
            end.because_of_another(&[said]);
        }
    }
}

#[test]
fn the_deadline_report_shows_who_is_missing() {
    let ends = start(&["work 1000", "work 1000", "stuck 1000"])
        .into_iter()
        .map(Rank::end);
    for end in ends {
        end.because_of_another(&[
            "is blocked for more than 1 s, the deadline, in an operation of group [0, 1, 2]\n",
            "  rank 0 on host host-0 (process ",
            "  rank 1 on host host-1 (process ",
            "s in gather(\"work\") at crates/launch/tests/launch/control/processes.rs:",
            "finished gather(\"all here\") at ",
            "hint: ",
        ]);
    }
}

/// All at once, as each of them mostly waits.
#[test]
fn stopped_ranks() {
    std::thread::scope(|scope| {
        scope.spawn(|| goes_on_after_a_stop(&[0], 4));
        scope.spawn(|| goes_on_after_a_stop(&[1], 4));
        scope.spawn(|| goes_on_after_a_stop(&[0, 1], 8));
        scope.spawn(a_rank_that_stays_stopped_is_taken_for_dead);
        scope.spawn(a_second_may_be_enough);
    });
}

fn goes_on_after_a_stop(stopped: &[usize], secs: u64) {
    let ranks = start(&["work", "work"]);
    let stopped = || stopped.iter().map(|rank| &ranks[*rank]);
    stopped().for_each(|rank| rank.signal(Signal::SIGSTOP));
    std::thread::sleep(Duration::from_secs(secs));
    stopped().for_each(|rank| rank.signal(Signal::SIGCONT));
    std::thread::sleep(Duration::from_millis(1500));
    for mut rank in ranks {
        assert_eq!(rank.child.try_wait().unwrap(), None);
        rank.child.kill().unwrap();
        rank.child.wait().unwrap();
    }
}

fn a_rank_that_stays_stopped_is_taken_for_dead() {
    let stop = |rank: &mut Rank| rank.signal(Signal::SIGSTOP);
    for end in others_after(&["work", "stuck", "hold"], stop) {
        end.because_of_another(&[
            "rank 2 on host host-2 (process ",
            "has not been heard of for ",
            "hint: its process is stopped, its host is down or the network between the hosts is cut",
        ]);
    }
}

fn a_second_may_be_enough() {
    let mut stopped = None;
    let ends = others_after(&["work 20000 1", "stuck 20000 1", "hold 20000 1"], |rank| {
        // Ranks that live are not taken for dead, and a moment's pause is no death.
        std::thread::sleep(Duration::from_secs(2));
        rank.signal(Signal::SIGSTOP);
        std::thread::sleep(Duration::from_millis(400));
        rank.signal(Signal::SIGCONT);
        std::thread::sleep(Duration::from_millis(500));
        rank.signal(Signal::SIGSTOP);
        stopped = Some(Instant::now());
    });
    // Before a run with the default would have begun to end.
    let time = stopped.unwrap().elapsed();
    assert!(time < Duration::from_secs(6), "{time:?}");
    for end in ends {
        end.because_of_another(&[
            "rank 2 on host host-2 (process ",
            "has not been heard of for 1 s",
        ]);
    }
}

#[test]
fn a_rank_that_is_told_to_end_dies_by_the_signal_and_is_named() {
    let mut ranks = start(&["work", "work", "stuck"]);
    let told = ranks.remove(1);
    told.signal(Signal::SIGTERM);
    let end = told.end();
    assert_eq!((end.signal, end.said.as_str()), (Some(15), ""));
    for end in ranks.into_iter().map(Rank::end) {
        end.because_of_another(&[
            "rank 1 on host host-1 (process ",
            "was told to end: signal SIGTERM",
        ]);
    }
}

#[test]
fn ranks_that_are_all_told_to_end_say_nothing() {
    let ranks = start(&["work", "work", "stuck"]);
    ranks.iter().for_each(|rank| rank.signal(Signal::SIGTERM));
    for end in ranks.into_iter().map(Rank::end) {
        assert_eq!((end.signal, end.said.as_str()), (Some(15), ""));
    }
}

#[test]
fn a_death_is_named_by_ranks_that_are_told_to_end_at_once() {
    let mut ranks = start(&["work", "work", "stuck"]);
    ranks[2].signal(Signal::SIGKILL);
    ranks[..2]
        .iter()
        .for_each(|rank| rank.signal(Signal::SIGTERM));
    ranks.truncate(2);
    for end in ranks.into_iter().map(Rank::end) {
        assert_eq!(end.signal, Some(15), "{end:?}");
        end.said_once("stops: rank 2 on host host-2 (process ");
    }
}

#[test]
fn what_all_ranks_fail_of_blames_none() {
    let failures = |words: fn(usize) -> &'static str| {
        ranks(3, |control| {
            let rank = control.rank();
            // They need not be equally fast.
            std::thread::sleep(Duration::from_millis(400 * rank as u64));
            control.fail(words(rank)).unwrap()
        })
    };
    for failure in failures(|_| "there is no tensor lm_head.weight") {
        assert!(failure.is_of_all());
        assert_eq!(failure.message, "there is no tensor lm_head.weight");
    }
    for failure in failures(|rank| ["no disk", "no tensor", "no tensor"][rank]) {
        assert_eq!(failure.rank, Some(0));
        let said = "rank 0 on host host-0 (process ";
        assert!(failure.message.starts_with(said), "{}", failure.message);
        assert!(failure.message.contains("failed: no disk"));
    }
}
