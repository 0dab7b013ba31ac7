//! Who is let into a run, and what is said to whom when one is not.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::time::{Duration, Instant};

use candle_launch::{Control, ControlConfig, Error};
use nix::sys::signal::Signal;

use super::processes::Rank;
use super::ranks::{config, frame, free_listener, ranks_with, shake_hands};

/// How the start of a run of three fails when the last rank is changed: on all ranks with the same message.
fn refused_on_all(change: impl Fn(&mut ControlConfig) + Sync) -> String {
    let last = |config: &mut ControlConfig| {
        if config.rank == 2 {
            change(config);
        }
    };
    let errors = ranks_with(3, last, |control| control.err().unwrap().to_string());
    assert_eq!((&errors[1], &errors[2]), (&errors[0], &errors[0]));
    errors[0].clone()
}

#[test]
fn a_rank_with_other_flags_is_named_on_all_ranks() {
    let error = refused_on_all(|config| {
        config.fingerprint = vec![
            ("--lr".into(), "1e-3".into()),
            ("data".into(), "b.txt".into()),
        ];
    });
    assert_eq!(
        error,
        "the run cannot start: rank 2 on host host-2: --lr is 1e-3, expected 1e-4 as on rank 0; data is b.txt, expected \
         not given as on rank 0\nhint: start all ranks with the same program, flags and data"
    );
}

#[test]
fn a_rank_of_another_world_size_is_named_on_all_ranks() {
    let error = refused_on_all(|config| config.world_size = 4);
    let expected = "rank 2 on host host-2: its world size is 4, expected 3 as on rank 0\n";
    assert!(error.contains(expected), "{error}");
}

#[test]
fn a_rank_that_does_not_exist_is_named_on_all_ranks() {
    let error = refused_on_all(|config| config.rank = 3);
    let expected = "rank 3 on host host-2: expected a rank below the world size, 3";
    assert!(error.contains(expected), "{error}");
}

/// A second process with the number of a rank is told so at once, before and after the run has begun, and the run starts and goes on.
#[test]
fn a_rank_that_comes_twice_or_too_late_is_refused_alone() {
    let (listener, port) = free_listener();
    let of = |rank: usize, host: &str| ControlConfig {
        host: host.into(),
        ..config(rank, 3, port)
    };
    let refused = |rank: usize| {
        let begun = Instant::now();
        let error = Control::join(&of(rank, "other")).err().unwrap();
        assert!(begun.elapsed() < Duration::from_secs(5));
        error.to_string()
    };
    std::thread::scope(|scope| {
        let zero = scope.spawn(|| Control::join_at(&of(0, "a"), Some(listener)).unwrap());
        let one = scope.spawn(|| Control::join(&of(1, "b")).unwrap());
        let again = refused(0);
        assert!(
            again.starts_with("rank 0 on host other (process "),
            "{again}"
        );
        assert!(
            again.contains("this rank is there already, from host a "),
            "{again}"
        );
        std::thread::sleep(Duration::from_secs(2));
        let twice = refused(1);
        assert!(
            twice.contains("this rank is there already, from host b "),
            "{twice}"
        );
        let two = Control::join(&of(2, "c")).unwrap();
        let (zero, one) = (zero.join().unwrap(), one.join().unwrap());
        for rank in 0..3 {
            let late = refused(rank);
            let said = format!(
                "rank {rank} on host other comes too late: all 3 ranks of the run are there already"
            );
            assert!(late.contains(&said), "{late}");
        }
        // Of a number that the run does not have, too.
        assert!(refused(7).contains("rank 7 on host other comes too late"));
        std::thread::scope(|scope| {
            for control in [&zero, &one, &two] {
                scope.spawn(|| control.gather("all", &[]).unwrap());
            }
        });
        [two, one]
            .iter()
            .for_each(|control| control.leave().unwrap());
        zero.leave().unwrap();
    });
}

/// It has hung up, and comes again, while rank 0 lets the last rank in; the end of its earlier connection is not its death.
#[test]
fn a_rank_that_has_not_heard_of_the_start_may_come_again() {
    let (listener, port) = free_listener();
    let hello = r#"{"rank": 1, "world_size": 2, "host": "slow", "pid": 1, "fingerprint": [["--lr", "1e-4"]]}"#;
    let call = || {
        let mut stream = shake_hands(port, "secret", 5).unwrap();
        stream.write_all(&frame(hello)).unwrap();
        stream
    };
    std::thread::scope(|scope| {
        let zero = scope.spawn(|| Control::join_at(&config(0, 2, port), Some(listener)).unwrap());
        let first = call();
        let zero = zero.join().unwrap();
        let mut again = call();
        let mut said = [0; 64];
        let num_bytes = again.read(&mut said).unwrap();
        let said = String::from_utf8_lossy(&said[..num_bytes]);
        assert!(said.contains("Welcome"), "{said}");
        drop(first);
        std::thread::sleep(Duration::from_secs(1));
        assert_eq!(zero.failure(), None);
        again.write_all(&frame("\"Leave\"")).unwrap();
        zero.leave().unwrap();
    });
}

#[test]
fn who_waits_says_for_whom_and_where() {
    let (listener, port) = free_listener();
    drop(listener);
    let master = format!("127.0.0.1:{port}");
    let patient = |rank| Rank::start(&[], &master, rank, 3, "patient");
    let wait = || std::thread::sleep(Duration::from_secs(3));
    let one = patient(1);
    wait();
    let zero = patient(0);
    wait();
    let two = patient(2);
    let [zero, one, two] = [zero, one, two].map(Rank::end);
    let said = format!("rank 1 on host host-1 waits for rank 0 at {master} (Connection refused");
    assert!(one.said.contains(&said), "{one:?}");
    let said = format!("rank 0 on host host-0 waits at {master} for rank 2, for ");
    assert!(zero.said.contains(&said), "{zero:?}");
    assert!(!two.said.contains("waits"), "{two:?}");
}

/// On one host it is rank 0 that says for whom all wait, unless it says nothing at all.
#[test]
fn a_rank_whose_rank_0_is_stopped_says_so() {
    let (listener, port) = free_listener();
    drop(listener);
    let master = format!("127.0.0.1:{port}");
    let patient = |rank| Rank::start(&[], &master, rank, 3, "patient 20000 1");
    let [zero, one] = [0, 1].map(patient);
    std::thread::sleep(Duration::from_secs(2));
    zero.signal(Signal::SIGSTOP);
    std::thread::sleep(Duration::from_secs(4));
    zero.signal(Signal::SIGCONT);
    let two = patient(2);
    let [zero, one, two] = [zero, one, two].map(Rank::end);
    let said = format!("rank 1 on host host-1 waits for rank 0 at {master} (");
    assert!(one.said.contains(&said), "{one:?}");
    for rank in [zero, one, two] {
        assert_eq!(rank.code, Some(0), "{rank:?}");
    }
}

#[test]
fn a_rank_of_another_version_is_named_on_all_ranks() {
    let (listener, port) = free_listener();
    std::thread::scope(|scope| {
        let zero = scope.spawn(|| {
            Control::join_at(&config(0, 2, port), Some(listener))
                .err()
                .unwrap()
        });
        let hello =
            r#"{"rank": 1, "world_size": 2, "host": "b", "pid": 7, "fingerprint": [], "new": 1}"#;
        let mut stream = shake_hands(port, "secret", 6).unwrap();
        stream.write_all(&frame(hello)).unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        let answer = String::from_utf8_lossy(&answer);
        let expected = "rank 1 on host b: it speaks version 6 of the control protocol, expected 5 as on rank 0";
        assert!(answer.contains(expected), "{answer:?}");
        assert!(zero.join().unwrap().to_string().contains(expected));
    });
}

#[test]
fn ranks_that_do_not_come_are_named() {
    let change = |config: &mut ControlConfig| {
        config.world_size = 5;
        config.rank *= 2;
        config.join_timeout = Duration::from_millis(700);
    };
    let errors = ranks_with(2, change, |control| control.err().unwrap().to_string());
    for error in errors {
        assert!(
            error.contains("of 5 ranks these have not come within 0.7 s: ranks 1, 3, 4\n"),
            "{error}"
        );
    }
}

#[test]
fn nobody_at_the_meeting_point_is_an_error_in_time() {
    let (listener, port) = free_listener();
    drop(listener);
    let config = ControlConfig {
        join_timeout: Duration::from_millis(300),
        ..config(1, 2, port)
    };
    let begun = Instant::now();
    let error = Control::join(&config).err().unwrap().to_string();
    assert!(begun.elapsed() < Duration::from_secs(3));
    let expected =
        format!("rank 1 on host host-1 could not join the run at 127.0.0.1:{port} within 0.3 s: ");
    assert!(error.starts_with(&expected), "{error}");
    assert!(error.contains("refused"), "{error}");
}

#[test]
fn a_rank_that_came_first_finds_rank_0_later() {
    let (listener, port) = free_listener();
    drop(listener);
    std::thread::scope(|scope| {
        let one = scope.spawn(|| Control::join(&config(1, 2, port)).unwrap());
        std::thread::sleep(Duration::from_millis(300));
        let zero = Control::join(&config(0, 2, port)).unwrap();
        let one = one.join().unwrap();
        one.leave().unwrap();
        zero.leave().unwrap();
    });
}

#[test]
fn a_rank_that_is_alone_needs_no_meeting_point() {
    let alone = Control::join(&config(0, 1, 0)).unwrap();
    assert_eq!(alone.gather("all", &[7]).unwrap(), [[7]]);
    alone.leave().unwrap();
}

#[test]
fn a_port_that_somebody_else_has_is_an_error_of_rank_0() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || listener.incoming().for_each(drop));
    let config = ControlConfig {
        join_timeout: Duration::from_millis(300),
        ..config(0, 2, port)
    };
    let error = Control::join(&config).err().unwrap().to_string();
    assert!(error.contains(&format!("127.0.0.1:{port}")), "{error}");
    assert!(error.contains("another program listens there"), "{error}");
}

#[test]
fn what_all_ranks_find_wrong_is_said_without_naming_any() {
    let why = "there is no file data.txt\nhint: look";
    let errors = ranks_with(
        3,
        |config| {
            config.cannot_start = Some(why.into());
            // It was not looked at.
            config.fingerprint = Vec::new();
        },
        |control| control.err(),
    );
    for error in errors {
        assert!(matches!(error, Some(Error::CannotStart(said)) if said == why));
    }
}

#[test]
fn what_some_ranks_find_wrong_reaches_all_with_their_numbers() {
    for unable in [vec![0], vec![1, 3], vec![0, 2]] {
        let words = |rank: usize| match rank {
            3 => "no disk".to_string(),
            _ => "no file".to_string(),
        };
        let errors = ranks_with(
            4,
            |config| {
                if unable.contains(&config.rank) {
                    config.cannot_start = Some(words(config.rank));
                }
            },
            |control| control.err(),
        );
        let expected = match unable.as_slice() {
            [0] => "the run cannot start: rank 0: no file",
            [1, 3] => "the run cannot start: rank 1: no file\nrank 3: no disk",
            _ => "the run cannot start: ranks 0, 2: no file",
        };
        for error in errors {
            let Some(Error::CannotStart(said)) = error else {
                panic!("expected that no rank starts, got {error:?}");
            };
            assert_eq!(said, expected);
        }
    }
}

#[test]
fn ranks_that_have_not_come_keep_nobody_from_saying_what_is_wrong() {
    let (listener, port) = free_listener();
    let begun = Instant::now();
    let unable = ControlConfig {
        cannot_start: Some("no file".into()),
        ..config(0, 3, port)
    };
    let error = Control::join_at(&unable, Some(listener)).err().unwrap();
    assert_eq!(error.to_string(), "the run cannot start: rank 0: no file");
    // One second for the others' words, two to tell them, and room for a busy machine.
    assert!(begun.elapsed() < Duration::from_secs(15));
}
