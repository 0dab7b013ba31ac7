//! What comparing a call across ranks costs, against one message there and back over the same loopback.
//!
//! `cargo run --release -p candle-launch --example bench_check [RANKS]`

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use candle_launch::{Control, ControlConfig, Operation, Result, Verdict, WaitNotices};

const ROUNDS: u32 = 2000;

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let world_size = match std::env::args().nth(1) {
        Some(ranks) => ranks.parse()?,
        None => 4,
    };
    let bare = ping()?;
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let port = listener.local_addr()?.port();
    let mut listener = Some(listener);
    let times: Result<Vec<Duration>> = std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..world_size)
            .map(|rank| {
                let listener = listener.take();
                scope.spawn(move || checks(&config(rank, world_size, port), listener))
            })
            .collect();
        let joined = ranks.into_iter().filter_map(|rank| rank.join().ok());
        joined.collect()
    });
    let check = times?.into_iter().max().unwrap_or_default();
    println!(
        "{world_size} ranks: {:.0} us per check, {:.0} us per bare message there and back: {:.1}x",
        check.as_secs_f64() * 1e6,
        bare.as_secs_f64() * 1e6,
        check.as_secs_f64() / bare.as_secs_f64()
    );
    Ok(())
}

fn config(rank: usize, world_size: usize, port: u16) -> ControlConfig {
    ControlConfig {
        rank,
        world_size,
        host: "here".into(),
        master: ("127.0.0.1".into(), port),
        is_one_host: true,
        secret: "bench".into(),
        is_guessable: false,
        fingerprint: Vec::new(),
        cannot_start: None,
        join_timeout: Duration::from_secs(20),
        wait_notices: WaitNotices::default(),
        deadline: Duration::from_secs(60),
        rank_timeout: Duration::from_secs(6),
        ends_process: false,
    }
}

/// The time of one check, as this rank sees it.
fn checks(config: &ControlConfig, listener: Option<TcpListener>) -> Result<Duration> {
    let control = Control::join_at(config, listener)?;
    control.gather("start", &[])?;
    let begun = Instant::now();
    for round in 0..ROUNDS {
        let operation = Operation {
            group: Arc::clone(control.world()),
            seq: Some(u64::from(round)),
            call: "all_reduce(sum) of f32 [4096, 4096]".into(),
            site: std::panic::Location::caller(),
        };
        let _ticket = control.begin(operation.clone());
        assert_eq!(control.check(&operation)?, Verdict::Agree);
    }
    let time = begun.elapsed() / ROUNDS;
    control.leave()?;
    Ok(time)
}

/// The time of one message there and back, over TCP with nothing around it.
fn ping() -> std::io::Result<Duration> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let mut near = TcpStream::connect(listener.local_addr()?)?;
    let (mut far, _) = listener.accept()?;
    near.set_nodelay(true)?;
    far.set_nodelay(true)?;
    std::thread::spawn(move || {
        let mut bytes = [0; 256];
        while far
            .read_exact(&mut bytes)
            .and_then(|()| far.write_all(&bytes))
            .is_ok()
        {}
    });
    let mut bytes = [0; 256];
    let begun = Instant::now();
    for _ in 0..ROUNDS {
        near.write_all(&bytes)?;
        near.read_exact(&mut bytes)?;
    }
    Ok(begun.elapsed() / ROUNDS)
}
