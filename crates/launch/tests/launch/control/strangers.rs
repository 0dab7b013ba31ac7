//! Who has no business in a run neither joins, ends nor delays it.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use candle_launch::{Control, ControlConfig};

use super::ranks::{config, frame, free_listener, prove, shake_hands};

/// More than any join of two ranks takes here, and less than a second attempt after a stranger has had its time.
const AT_ONCE: Duration = Duration::from_millis(1500);

const HELLO: &str =
    r#"{"rank": 1, "world_size": 2, "host": "b", "pid": 7, "fingerprint": [["--lr", "1e-4"]]}"#;

/// Lets two ranks of this host join, with what `meanwhile` gets the port for going on before the second one comes; returns how
/// long that one took.
fn join_with<T: Send>(meanwhile: impl FnOnce(u16) -> T + Send) -> Duration {
    let (listener, port) = free_listener();
    std::thread::scope(|scope| {
        let zero = scope.spawn(|| Control::join_at(&config(0, 2, port), Some(listener)).unwrap());
        let kept = meanwhile(port);
        let begun = Instant::now();
        let one = Control::join_at(&config(1, 2, port), None).unwrap();
        let time = begun.elapsed();
        let zero = zero.join().unwrap();
        drop(kept);
        // Nobody has come between them.
        let gathered = scope.spawn(move || {
            let gathered = one.gather("all", &[1]).unwrap();
            one.leave().unwrap();
            gathered
        });
        assert_eq!(zero.gather("all", &[0]).unwrap(), [[0], [1]]);
        zero.leave().unwrap();
        gathered.join().unwrap();
        time
    })
}

/// Whether the other end closes the connection without a word.
fn is_turned_away(mut stream: TcpStream) -> bool {
    let limit = Some(Duration::from_secs(10));
    stream.set_read_timeout(limit).unwrap();
    !matches!(stream.read(&mut [0; 64]), Ok(1..))
}

#[test]
fn who_speaks_something_else_or_too_much() {
    let time = join_with(|port| {
        let mut garbage = TcpStream::connect(("127.0.0.1", port)).unwrap();
        garbage.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        assert!(is_turned_away(garbage));
        // A message that claims to be huge, from somebody who knows the secret.
        let mut huge = shake_hands(port, "secret", 5).unwrap();
        huge.write_all(&[0xff; 8]).unwrap();
        assert!(is_turned_away(huge));
    });
    assert!(time < AT_ONCE, "{time:?}");
}

#[test]
fn who_does_not_know_the_secret() {
    let time = join_with(|port| {
        assert!(shake_hands(port, "guessed", 5).is_err());
        // What anybody hears has nothing of the secret in it: random bytes, and zeros to no proof, to these bytes, to a proof for other ones.
        for lie in ["", "echo", "stale"] {
            let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
            let opening = [b"\x89candle\n\x05\0\0\0".as_slice(), &[7; 32]].concat();
            stream.write_all(&opening).unwrap();
            let mut random = [0; 32];
            stream.read_exact(&mut random).unwrap();
            let limit = Some(Duration::from_millis(100));
            stream.set_read_timeout(limit).unwrap();
            assert!(stream.read(&mut [0]).is_err(), "it says more at once");
            let proof = match lie {
                "echo" => random.to_vec(),
                "stale" => prove("secret", "rank", &opening, &[7; 32]),
                _ => vec![0; 32],
            };
            stream.write_all(&proof).unwrap();
            // It may have closed already.
            let _ = stream.write_all(&frame(HELLO));
            stream.set_read_timeout(None).unwrap();
            let mut refusal = Vec::new();
            let _ = stream.read_to_end(&mut refusal);
            assert!(refusal == [0; 32], "{lie:?}: {refusal:?}");
        }
    });
    assert!(time < AT_ONCE, "{time:?}");
}

/// Rank 0 shows nobody that it knows the secret who would pass that on to a launcher, or to a peer.
#[test]
fn who_comes_for_something_else() {
    let time = join_with(|port| {
        for purpose in [1 << 31, 1 << 30] {
            let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
            let version: u32 = purpose | 5;
            let opening = [b"\x89candle\n".as_slice(), &version.to_le_bytes(), &[7; 32]].concat();
            stream.write_all(&opening).unwrap();
            assert!(is_turned_away(stream));
        }
    });
    assert!(time < AT_ONCE, "{time:?}");
}

/// Passes on what two ends say to each other, and returns what each of them said.
fn overhear(listener: &TcpListener, port: u16) -> [Vec<u8>; 2] {
    let (rank, _) = listener.accept().unwrap();
    let server = TcpStream::connect(("127.0.0.1", port)).unwrap();
    let pass_on = |mut from: TcpStream, mut to: TcpStream| {
        let (mut said, mut buffer) = (Vec::new(), [0; 4096]);
        while let Ok(len @ 1..) = from.read(&mut buffer) {
            said.extend(&buffer[..len]);
            to.write_all(&buffer[..len]).unwrap();
        }
        let _ = to.shutdown(Shutdown::Write);
        said
    };
    let (rank_end, server_end) = (rank.try_clone().unwrap(), server.try_clone().unwrap());
    let there = std::thread::spawn(move || pass_on(rank_end, server));
    [pass_on(server_end, rank), there.join().unwrap()]
}

#[test]
fn who_repeats_what_a_rank_and_a_server_have_said() {
    // A run that somebody listens to, at another port than that of its server.
    let (listener, port) = free_listener();
    let (between, port_between) = free_listener();
    let [server_said, rank_said] = std::thread::scope(|scope| {
        let heard = scope.spawn(|| overhear(&between, port));
        let zero = scope.spawn(|| {
            let zero = Control::join_at(&config(0, 2, port), Some(listener)).unwrap();
            zero.leave().unwrap();
        });
        let one = Control::join_at(&config(1, 2, port_between), None).unwrap();
        one.leave().unwrap();
        drop(one);
        zero.join().unwrap();
        heard.join().unwrap()
    });
    assert!(!contains(&server_said, b"secret") && !contains(&rank_said, b"secret"));
    // As a rank of the next run with that secret.
    let time = join_with(|port| {
        let mut again = TcpStream::connect(("127.0.0.1", port)).unwrap();
        again.write_all(&rank_said).unwrap();
        let _ = again.shutdown(Shutdown::Write);
        let mut answer = Vec::new();
        let _ = again.read_to_end(&mut answer);
        // Its challenge and zeros, but no word to a rank.
        assert!(answer.len() <= 64, "{answer:?}");
    });
    assert!(time < AT_ONCE, "{time:?}");
    // As its server.
    let error = refused_by_false_server(move |mut stream| {
        let _ = stream.write_all(&server_said);
        let _ = stream.read_to_end(&mut Vec::new());
    });
    assert!(error.contains("does not know this run's secret"), "{error}");
}

fn contains(said: &[u8], word: &[u8]) -> bool {
    said.windows(word.len()).any(|window| window == word)
}

/// What a rank says that has only found a false server, which does `act` with each connection.
fn refused_by_false_server(act: impl Fn(TcpStream) + Send + Sync + 'static) -> String {
    let (listener, port) = free_listener();
    let act = Arc::new(act);
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let act = act.clone();
            std::thread::spawn(move || act(stream));
        }
    });
    let config = ControlConfig {
        join_timeout: Duration::from_millis(300),
        ..config(1, 2, port)
    };
    Control::join(&config).err().unwrap().to_string()
}

#[test]
fn a_false_server_hears_no_more_of_a_rank_than_its_proof() {
    let (said, heard) = std::sync::mpsc::channel();
    let error = refused_by_false_server(move |mut stream| {
        let mut words = vec![0; 44];
        stream.read_exact(&mut words).unwrap();
        // The rank's own random bytes, and for a proof its own.
        stream.write_all(&words[12..]).unwrap();
        let mut proof = [0; 32];
        stream.read_exact(&mut proof).unwrap();
        stream.write_all(&proof).unwrap();
        stream.read_to_end(&mut words).unwrap();
        said.send(words).unwrap();
    });
    assert!(error.contains("does not know this run's secret"), "{error}");
    // The first 44 bytes, and nothing behind the proof.
    assert_eq!(heard.recv().unwrap().len(), 44);
}

/// One that was there before rank 0 and says nothing holds a rank up for a moment only.
#[test]
fn a_false_server_that_goes_leaves_its_place_to_rank_0() {
    let (listener, port) = free_listener();
    std::thread::scope(|scope| {
        let one = scope.spawn(|| Control::join(&config(1, 2, port)).unwrap());
        let (held, _) = listener.accept().unwrap();
        drop(listener);
        let zero = scope.spawn(|| Control::join(&config(0, 2, port)).unwrap());
        let begun = Instant::now();
        let one = one.join().unwrap();
        assert!(begun.elapsed() < Duration::from_secs(6));
        drop(held);
        let zero = zero.join().unwrap();
        one.leave().unwrap();
        zero.leave().unwrap();
    });
}

#[test]
fn connections_that_say_nothing() {
    let time = join_with(|port| {
        let connect = |_| TcpStream::connect(("127.0.0.1", port)).unwrap();
        let silent: Vec<TcpStream> = (0..400).map(connect).collect();
        silent
    });
    assert!(time < AT_ONCE, "{time:?}");
}

#[test]
fn one_that_sends_a_byte_now_and_then_is_cut_off() {
    join_with(|port| {
        let begun = Instant::now();
        let mut slow = TcpStream::connect(("127.0.0.1", port)).unwrap();
        let opening = [b"\x89candle\n\x05\0\0\0".as_slice(), &[7; 1000]].concat();
        let cut_off = opening.iter().position(|byte| {
            std::thread::sleep(Duration::from_millis(100));
            slow.write_all(&[*byte]).is_err()
        });
        assert!(cut_off.is_some());
        assert!(begun.elapsed() < Duration::from_secs(5));
    });
}

/// Connections without end, before and after the start of the run, some of which say the first words.
#[test]
fn a_flood() {
    let over = Arc::new(AtomicBool::new(false));
    let flood = |port| {
        let over = over.clone();
        std::thread::spawn(move || {
            let mut kept = std::collections::VecDeque::new();
            let mut number = 0;
            while !over.load(Ordering::Acquire) {
                if let Ok(mut stream) = TcpStream::connect(("127.0.0.1", port)) {
                    let words = if number % 2 == 0 { "\u{89}" } else { "" };
                    let _ = stream.write_all(words.as_bytes());
                    kept.push_back(stream);
                }
                if kept.len() > 300 {
                    kept.pop_front();
                }
                number += 1;
            }
            number
        })
    };
    let mut num_connections = None;
    let time = join_with(|port| {
        // The server is there.
        drop(shake_hands(port, "secret", 5).unwrap());
        let flood = flood(port);
        std::thread::sleep(Duration::from_millis(800));
        num_connections = Some(flood);
    });
    over.store(true, Ordering::Release);
    let num_connections = num_connections.unwrap().join().unwrap();
    assert!(num_connections > 300, "{num_connections}");
    assert!(time < 3 * AT_ONCE, "{time:?}");
}

#[test]
fn who_comes_when_the_run_has_started() {
    let (listener, port) = free_listener();
    std::thread::scope(|scope| {
        let zero = scope.spawn(|| Control::join_at(&config(0, 2, port), Some(listener)).unwrap());
        let one = Control::join_at(&config(1, 2, port), None).unwrap();
        let zero = zero.join().unwrap();
        // Not the process that is rank 1: that one may come again until it has spoken.
        let late = ControlConfig {
            host: "host-9".into(),
            ..config(1, 2, port)
        };
        let late = Control::join_at(&late, None).err().unwrap().to_string();
        let expected = "rank 1 on host host-9 comes too late";
        assert!(late.contains(expected), "{late}");
        let mut garbage = TcpStream::connect(("127.0.0.1", port)).unwrap();
        garbage.write_all(&[7; 64]).unwrap();
        assert!(is_turned_away(garbage));
        assert_eq!((zero.failure(), one.failure()), (None, None));
        scope.spawn(move || one.leave().unwrap());
        zero.leave().unwrap();
    });
}

#[test]
fn rank_0_listens_at_its_own_address_only() {
    let (listener, port) = free_listener();
    drop(listener);
    let at = |rank| ControlConfig {
        master: ("127.0.0.2".into(), port),
        // Several hosts, for all that the ranks know.
        is_one_host: false,
        ..config(rank, 2, port)
    };
    std::thread::scope(|scope| {
        let zero = scope.spawn(|| Control::join(&at(0)).unwrap());
        let one = Control::join(&at(1)).unwrap();
        let zero = zero.join().unwrap();
        assert!(TcpStream::connect(("127.0.0.1", port)).is_err());
        assert!(TcpStream::connect(("127.0.0.2", port)).is_ok());
        one.leave().unwrap();
        zero.leave().unwrap();
    });
}

#[test]
fn two_runs_with_one_port_but_not_one_secret() {
    let (listener, port) = free_listener();
    std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            let other = ControlConfig {
                secret: "another".into(),
                join_timeout: Duration::from_secs(1),
                ..config(1, 2, port)
            };
            Control::join_at(&other, None).err().unwrap().to_string()
        });
        let zero = scope.spawn(|| Control::join_at(&config(0, 2, port), Some(listener)).unwrap());
        let other = other.join().unwrap();
        assert!(other.contains("does not know this run's secret"), "{other}");
        let one = Control::join_at(&config(1, 2, port), None).unwrap();
        let zero = zero.join().unwrap();
        one.leave().unwrap();
        zero.leave().unwrap();
    });
}
