//! Ranks as threads with a `Control` each.

use std::net::TcpListener;
use std::sync::Arc;
use std::time::Duration;

use candle_launch::{Control, ControlConfig, Operation, RankGroup, Result};

/// A rank's configuration for a run at `port` of this host.
pub fn config(rank: usize, world_size: usize, port: u16) -> ControlConfig {
    ControlConfig {
        rank,
        world_size,
        host: format!("host-{rank}"),
        master: ("127.0.0.1".into(), port),
        is_one_host: true,
        token: "secret".into(),
        fingerprint: vec![("--lr".into(), "1e-4".into())],
        cannot_start: None,
        join_timeout: Duration::from_secs(20),
        deadline: Duration::from_secs(20),
        ends_process: false,
    }
}

/// A listener on a free port, and the port.
pub fn free_listener() -> (TcpListener, u16) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    (listener, port)
}

/// Joins as rank 0 at the listener, or as another rank.
pub fn join(config: &ControlConfig, listener: Option<TcpListener>) -> Result<Arc<Control>> {
    match listener {
        Some(listener) => Control::join_at(config, listener),
        None => Control::join(config),
    }
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
                    run(join(&config, listener))
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
