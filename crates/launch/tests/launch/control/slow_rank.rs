//! A rank that does not read what it is sent.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use candle_launch::{Control, RankGroup, Verdict};

use super::ranks::{config, frame, free_listener, operation, shake_hands};

const NUM_GATHERS: usize = 32;

/// Rank 2 in bare bytes: it asks for much, and reads nothing.
fn slow_rank(port: u16) -> TcpStream {
    let fingerprint = r#"[["--lr", "1e-4"]]"#;
    let hello = format!(
        r#"{{"rank": 2, "world_size": 3, "host": "slow", "pid": 1, "fingerprint": {fingerprint}}}"#
    );
    let mut stream = shake_hands(port, "secret", 5).unwrap();
    stream.write_all(&frame(&hello)).unwrap();
    stream.read_exact(&mut [0; 8]).unwrap();
    for id in 0..NUM_GATHERS {
        let question = format!(r#"{{"Gather": {{"key": "big {id}"}}}}"#);
        let ask = format!(r#"{{"Ask": {{"id": {id}, "question": {question}}}}}"#);
        stream.write_all(&frame(&ask)).unwrap();
    }
    stream
}

fn checks(control: &Control, group: &Arc<RankGroup>) {
    for seq in 0..20 {
        let verdict = control.check(&operation(group, seq, "barrier")).unwrap();
        assert_eq!(verdict, Verdict::Agree);
    }
}

#[test]
fn a_rank_that_does_not_read_stalls_nobody() {
    let (listener, port) = free_listener();
    let mut listener = Some(listener);
    std::thread::scope(|scope| {
        let fast: Vec<_> = (0..2)
            .map(|rank| {
                let listener = listener.take();
                scope.spawn(move || Control::join_at(&config(rank, 3, port), listener).unwrap())
            })
            .collect();
        let mut slow = slow_rank(port);
        let fast: Vec<_> = fast.into_iter().map(|rank| rank.join().unwrap()).collect();
        // 64 MiB for the slow rank, far more than its connection holds.
        std::thread::scope(|scope| {
            for control in &fast {
                scope.spawn(|| {
                    for id in 0..NUM_GATHERS {
                        control.gather(&format!("big {id}"), &[7; 1 << 20]).unwrap();
                    }
                });
            }
        });
        let group = Arc::new(RankGroup {
            id: "fast".into(),
            members: vec![0, 1],
        });
        let begun = Instant::now();
        std::thread::scope(|scope| {
            for control in &fast {
                scope.spawn(|| checks(control, &group));
            }
        });
        assert!(
            begun.elapsed() < Duration::from_secs(3),
            "{:?}",
            begun.elapsed()
        );
        slow.write_all(&frame(r#""Leave""#)).unwrap();
        fast[1].leave().unwrap();
        fast[0].leave().unwrap();
    });
}
