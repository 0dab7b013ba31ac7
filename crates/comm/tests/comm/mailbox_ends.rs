//! What a rank hears of another one's end, and who is kept out.

use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use candle_comm::{Departure, Mailbox, MailboxConfig, message_of};
use candle_core::{DType, Device, Tensor};

use crate::mailbox::{BOTH, Over, boxes, config, left, mail, numbers};

/// Rank 2 knows rank 1 by way of rank 0 alone.
#[test]
fn who_fails_because_of_another_rank_tells_of_that_one() {
    for over in BOTH {
        let [zero, one, two] = boxes(over, &config());
        one.fail("its disk\0 is full");
        left(zero.recv(Some(1), None).unwrap());
        assert_eq!(zero.blame(2..3), None);
        let culprit = zero.blame(0..3).unwrap();
        let why = culprit.why.as_deref().unwrap();
        assert_eq!((culprit.rank, why.starts_with("its disk")), (1, true));
        zero.fail("there is no rank 1");
        let zero = left(two.recv(Some(0), None).unwrap());
        assert_eq!(zero.why.as_deref(), Some("there is no rank 1"));
        assert_eq!(zero.culprit(), &culprit);
        assert_eq!(two.blame(0..1), Some(culprit));
    }
}

#[test]
fn the_end_of_a_rank_comes_after_what_it_sent_and_names_it() {
    for over in BOTH {
        let [zero, done, failed] = boxes(over, &config());
        done.send(0, 0, &[numbers(&[1.0])]).unwrap();
        done.leave();
        assert_eq!(mail(zero.recv(None, None).unwrap()).from, 1);
        assert_eq!(
            left(zero.recv(Some(1), None).unwrap()),
            Departure {
                rank: 1,
                why: None,
                because_of: None
            }
        );
        failed.send(0, 5, &[]).unwrap();
        failed.fail("its disk is full");
        // Each once, for who receives from any; for ever, for who asks for that rank.
        let mut gone = [
            left(zero.recv(None, Some(4)).unwrap()),
            left(zero.recv(None, Some(4)).unwrap()),
        ];
        gone.sort_by_key(|departure| departure.rank);
        assert_eq!(gone[0].why, None);
        assert_eq!(gone[1].why.as_deref(), Some("its disk is full"));
        assert_eq!(left(zero.recv(Some(2), Some(4)).unwrap()), gone[1]);
        // What it had sent is there still.
        assert_eq!(mail(zero.recv(None, None).unwrap()).tag, 5);
        let error = zero.recv(None, None).unwrap_err().to_string();
        assert!(
            error.contains("all ranks that could send one are gone"),
            "{error}"
        );
        let error = zero.send(2, 0, &[]).unwrap_err().to_string();
        assert!(
            error.contains("rank 2 is gone: its disk is full"),
            "{error}"
        );
    }
}

#[test]
fn a_panic_and_a_drop_are_ends_with_words() {
    for over in BOTH {
        let [zero, one, two] = boxes(over, &config());
        let panicking = thread::spawn(move || {
            let _mailbox = one;
            std::panic::resume_unwind(Box::new(()));
        });
        assert!(panicking.join().is_err());
        drop(two);
        let why = |rank| left(zero.recv(Some(rank), None).unwrap()).why.unwrap();
        assert_eq!(why(1), "it panicked");
        assert_eq!(why(2), "it ended before it had left");
    }
}

/// Ranks 1 and 2 receive nothing, and threads are blocked in what they send to them.
#[test]
fn a_failure_is_heard_at_once_by_who_listens() {
    let config = MailboxConfig {
        inbox_bytes: 1,
        ..config()
    };
    let [zero, one, two, three] = boxes(Over::Connections, &config);
    let large = Tensor::zeros(8 << 20, DType::F32, &Device::Cpu).unwrap();
    thread::scope(|scope| {
        for to in [1, 2] {
            let (zero, large) = (&zero, &large);
            scope.spawn(move || while zero.send(to, 0, std::slice::from_ref(large)).is_ok() {});
        }
        for deaf in [&one, &two] {
            scope.spawn(|| deaf.recv(Some(3), None));
        }
        thread::sleep(Duration::from_millis(500));
        let begun = Instant::now();
        scope.spawn(|| zero.fail("its disk is full"));
        let departure = left(three.recv(Some(0), None).unwrap());
        assert_eq!(departure.why.as_deref(), Some("its disk is full"));
        assert!(begun.elapsed() < Duration::from_secs(1));
        three.leave();
    });
}

/// A stream to a mailbox of rank 0, for what no mailbox would say.
fn raw(config: &MailboxConfig) -> (Mailbox, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (other, _) = listener.accept().unwrap();
    let zero = Mailbox::of_process(0, vec![None, Some(other)], config).unwrap();
    (zero, stream)
}

#[test]
fn who_dies_in_the_middle_of_a_message_or_sends_noise_is_gone() {
    use std::io::Write;
    let head = |head: &str| {
        let len = (head.len() as u32).to_le_bytes();
        [&1u32.to_le_bytes(), &len, head.as_bytes()].concat()
    };
    let half = [head("7;f32 1000"), vec![0; 1000]].concat();
    let noise = b"GET / HTTP/1.1\r\n\r\n".to_vec();
    for (said, expected) in [
        (half, "it died: its connection closed"),
        (noise, "it sent what is no message"),
        (head("7;f32 18446744073709551615 16"), "a tensor of shape"),
        (
            head("7;f99"),
            "it sent what is no message (a message with the head \"7;f99\")",
        ),
        (head("7;f32 2 x"), "with the head"),
        (
            head("7;f8e4m3 2"),
            "it sent what is no message (ranks exchange f32,",
        ),
        (
            head(""),
            "it sent what is no message (a message with the head \"\")",
        ),
    ] {
        let (zero, mut stream) = raw(&config());
        stream.write_all(&said).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let begun = Instant::now();
        let departure = left(zero.recv(None, None).unwrap());
        assert!(
            departure.why.clone().unwrap().contains(expected),
            "{departure}"
        );
        assert!(begun.elapsed() < Duration::from_secs(2));
    }
}

/// A tensor is as large as it may be, or refused when its head has come, of whatever is behind that nothing.
#[test]
fn who_announces_more_than_is_expected_is_gone_before_there_is_memory_for_it() {
    use std::io::Write;
    let head = |num_values: usize| {
        // The first tensor is small, and its values are not there either.
        let head = format!("7;f32 4;f32 {num_values}");
        let len = (head.len() as u32).to_le_bytes();
        [&1u32.to_le_bytes(), &len, head.as_bytes()].concat()
    };
    let config = MailboxConfig {
        largest_tensor_bytes: 1000,
        ..config()
    };
    // A bound that is too small for what ranks say of each other is larger.
    for (expected, largest) in [
        (None, 1000),
        (Some(20 << 20), 20 << 20),
        (Some(1), 16 << 20),
    ] {
        let (zero, mut stream) = raw(&config);
        if let Some(expected) = expected {
            zero.bound_tensors(expected);
        }
        stream.write_all(&head(largest / 4)).unwrap();
        let wait = Duration::from_millis(200);
        assert!(zero.recv_timeout(None, None, wait).unwrap().is_none());
        let (zero, mut stream) = raw(&config);
        if let Some(expected) = expected {
            zero.bound_tensors(expected);
        }
        stream.write_all(&head(1 + largest / 4)).unwrap();
        let why = left(zero.recv(None, None).unwrap()).why.unwrap();
        let said = format!(
            "it sent what is no message (a tensor of shape [{}] in f32, expected at most {largest} bytes)",
            1 + largest / 4
        );
        assert_eq!(why, said);
    }
}

#[test]
fn who_says_nothing_is_gone_and_who_computes_is_not() {
    let config = MailboxConfig {
        silence: Duration::from_millis(400),
        ..config()
    };
    let (zero, silent) = raw(&config);
    let departure = left(zero.recv(None, None).unwrap());
    assert!(
        departure
            .why
            .unwrap()
            .starts_with("nothing was heard of it for 0.4 s")
    );
    drop(silent);
    let [zero, computing] = boxes(Over::Connections, &config);
    thread::sleep(Duration::from_millis(1500));
    assert!(
        zero.recv_timeout(None, None, Duration::ZERO)
            .unwrap()
            .is_none()
    );
    computing.leave();
    zero.leave();
}

#[test]
fn strangers_neither_join_nor_delay_the_ranks() {
    use std::io::Read;
    let is_over = AtomicBool::new(false);
    let begun = Instant::now();
    let ports = || {
        let table = std::fs::read_to_string("/proc/self/net/tcp").unwrap();
        let listening = table
            .lines()
            .filter(|line| line.split_whitespace().nth(3) == Some("0A"));
        let port = |line: &str| {
            u16::from_str_radix(line.split_whitespace().nth(1)?.split_once(':')?.1, 16).ok()
        };
        listening.filter_map(port).collect::<Vec<_>>()
    };
    thread::scope(|scope| {
        // Connects to whatever listens here, again and again, with half of a handshake or none.
        scope.spawn(|| {
            let mut open = Vec::new();
            while !is_over.load(Ordering::Relaxed) {
                for port in ports() {
                    let Ok(mut stream) = TcpStream::connect(("127.0.0.1", port)) else {
                        continue;
                    };
                    let said = std::io::Write::write_all(
                        &mut stream,
                        b"\x89candle\n\x05\0\0\0 and no proof",
                    );
                    drop(said);
                    open.push(stream);
                }
                thread::sleep(Duration::from_millis(5));
            }
            for mut stream in open.into_iter().take(5) {
                stream
                    .set_read_timeout(Some(Duration::from_secs(5)))
                    .unwrap();
                let mut answer = Vec::new();
                // At most the server's random bytes and zeros, after which it hangs up.
                let _ = stream.read_to_end(&mut answer);
                assert!(answer.len() <= 64, "{} bytes", answer.len());
            }
        });
        let [zero, one, two] = boxes(Over::Connections, &config());
        let time = begun.elapsed();
        one.send(0, 0, &[]).unwrap();
        two.send(1, 0, &[]).unwrap();
        assert_eq!(mail(zero.recv(None, None).unwrap()).from, 1);
        assert_eq!(mail(one.recv(None, None).unwrap()).from, 2);
        is_over.store(true, Ordering::Relaxed);
        assert!(time < Duration::from_secs(5), "{time:?}");
        thread::scope(|scope| {
            for mailbox in [zero, one, two] {
                scope.spawn(move || mailbox.leave());
            }
        });
    });
}

#[test]
fn ranks_that_fail_or_panic_end_none_of_the_others() {
    let env = candle_comm::RankEnv::from_lookup("host", &|_| None).unwrap();
    let config = candle_comm::RunConfig::of_mailboxes(env, candle_comm::Degrees::default());
    let run = |mailbox: &Arc<Mailbox>| match mailbox.rank() {
        1 => Err(candle_core::Error::msg("its disk is full")),
        2 => panic!("an index is out of range"),
        3 => Ok(Vec::new()),
        _ => {
            let mut whys: Vec<_> = (0..3)
                .map(|_| left(mailbox.recv(None, None).unwrap()))
                .collect();
            whys.sort_by_key(|departure| departure.rank);
            Ok(whys.into_iter().map(|departure| departure.why).collect())
        }
    };
    let results = candle_comm::launch::mailboxes(&config, (4, 1), run).unwrap();
    let whys = ["its disk is full", "panicked: an index is out of range"];
    let [zero, one, two, three] = <[_; 4]>::try_from(results).ok().unwrap();
    let expected = [Some(whys[0].to_string()), Some(whys[1].to_string()), None];
    assert_eq!(zero.unwrap(), expected);
    assert_eq!(message_of(&one.unwrap_err()), whys[0]);
    assert_eq!(message_of(&two.unwrap_err()), whys[1]);
    assert!(three.unwrap().is_empty());
}
