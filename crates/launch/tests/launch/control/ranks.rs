//! Ranks as threads with a `Control` each.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use candle_launch::{Control, ControlConfig, Operation, RankGroup, Result, WaitNotices};
use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

/// A rank's configuration for a run at `port` of this host.
pub fn config(rank: usize, world_size: usize, port: u16) -> ControlConfig {
    ControlConfig {
        rank,
        world_size,
        host: format!("host-{rank}"),
        master: ("127.0.0.1".into(), port),
        is_one_host: true,
        secret: "secret".into(),
        is_guessable: false,
        fingerprint: vec![("--lr".into(), "1e-4".into())],
        cannot_start: None,
        join_timeout: Duration::from_secs(20),
        wait_notices: WaitNotices::default(),
        deadline: Duration::from_secs(20),
        rank_timeout: Duration::from_secs(6),
        ends_process: false,
    }
}

/// A listener on a free port, and the port.
pub fn free_listener() -> (TcpListener, u16) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    (listener, port)
}

/// Joins with a configuration each, after `change`, and returns what `run` makes of it, by rank.
pub fn ranks_with<T: Send>(
    world_size: usize,
    change: impl Fn(&mut ControlConfig) + Sync,
    run: impl Fn(Result<Arc<Control>>) -> T + Sync,
) -> Vec<T> {
    let (listener, port) = free_listener();
    let mut listener = Some(listener);
    let (change, run) = (&change, &run);
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..world_size)
            .map(|rank| {
                let listener = listener.take();
                scope.spawn(move || {
                    let mut config = config(rank, world_size, port);
                    change(&mut config);
                    run(Control::join_at(&config, listener))
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// The same for ranks that all join.
pub fn ranks<T: Send>(world_size: usize, run: impl Fn(Arc<Control>) -> T + Sync) -> Vec<T> {
    ranks_with(world_size, |_| {}, |control| run(control.unwrap()))
}

/// An operation of a group, called here.
#[track_caller]
pub fn operation(group: &Arc<RankGroup>, seq: u64, call: &str) -> Operation {
    Operation {
        group: group.clone(),
        seq: Some(seq),
        call: call.into(),
        site: std::panic::Location::caller(),
    }
}

/// A connection in bare bytes, by somebody who believes in this secret and says that its messages are of this version; fails if the
/// other end does not know it.
pub fn shake_hands(port: u16, secret: &str, version: u32) -> std::io::Result<TcpStream> {
    let mut stream = TcpStream::connect(("127.0.0.1", port))?;
    let version = version.to_le_bytes();
    let opening = [b"\x89candle\n".as_slice(), &version, &[7; 32]].concat();
    stream.write_all(&opening)?;
    let [mut random, mut proof] = [[0; 32]; 2];
    stream.read_exact(&mut random)?;
    stream.write_all(&prove(secret, "rank", &opening, &random))?;
    stream.read_exact(&mut proof)?;
    if proof[..] != prove(secret, "server", &opening, &random) {
        return Err(std::io::Error::other("the server does not know the secret"));
    }
    Ok(stream)
}

/// What shows that one knows the secret.
pub fn prove(secret: &str, who: &str, opening: &[u8], random: &[u8]) -> Vec<u8> {
    let mac = Hmac::<Sha256>::new_from_slice(secret.as_bytes()).unwrap();
    let mac = mac.chain_update(who).chain_update(opening);
    mac.chain_update(random).finalize().into_bytes().to_vec()
}

/// A message without a body.
pub fn frame(json: &str) -> Vec<u8> {
    let len = u32::try_from(json.len()).unwrap().to_le_bytes();
    [len.as_slice(), &[0; 4], json.as_bytes()].concat()
}
