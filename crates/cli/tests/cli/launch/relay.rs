//! Somebody between two launchers who does not know their secret.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;

use super::led::Hosts;
use nix::sys::signal::Signal;

/// The words of a server in the handshake: its random bytes, and its proof after that of the other end.
const HANDSHAKE: [usize; 2] = [32, 32];

/// Passes on what a member and the launcher at `front` say to each other, but for what that one says after the handshake, which is
/// `changed`; returns where it listens.
fn listen_between(
    front: &str,
    changed: impl Fn(&TcpStream) -> Vec<u8> + Send + Sync + 'static,
) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let (front, changed) = (front.to_string(), Arc::new(changed));
    std::thread::spawn(move || {
        for member in listener.incoming().flatten() {
            let (front, changed) = (TcpStream::connect(&front).unwrap(), changed.clone());
            let (mut from, mut to) = (member.try_clone().unwrap(), front.try_clone().unwrap());
            std::thread::spawn(move || {
                let _ = std::io::copy(&mut from, &mut to);
                let _ = to.shutdown(Shutdown::Write);
            });
            std::thread::spawn(move || {
                for num_bytes in HANDSHAKE {
                    let mut said = vec![0; num_bytes];
                    if (&front).read_exact(&mut said).is_err() {
                        return;
                    }
                    let _ = (&member).write_all(&said);
                }
                // The member may have hung up.
                let _ = (&member).write_all(&changed(&front));
                let _ = member.shutdown(Shutdown::Write);
            });
        }
    });
    address
}

/// A frame: the lengths of its message, which is the seal, and of its body, and both.
fn frame(seal: &str, order: &str) -> Vec<u8> {
    let len = |text: &str| u32::try_from(text.len()).unwrap().to_le_bytes();
    [&len(seal), &len(order), seal.as_bytes(), order.as_bytes()].concat()
}

/// The member that finds the launcher that leads, which waits for it, by way of this address ends and has run nothing.
fn is_refused(hosts: &Hosts, between: String) {
    let member = Hosts {
        rdzv: between,
        ..Hosts::new()
    };
    std::fs::copy(hosts.secret.path(), member.secret.path()).unwrap();
    let member_runs = member.start("b", 1, "2", &[], "true");
    let ended = member_runs.exits(2);
    let says = "what is said there is not from who has shown that it knows this run's secret";
    assert!(ended.sentence().contains(says), "{}", ended.err);
    assert!(!member.exists("told"));
}

#[test]
fn who_passes_on_a_handshake_cannot_give_orders() {
    let hosts = Hosts::new();
    let leader = hosts.start("a", 1, "3", &[], "true");
    let order = r#"{"Run":"touch told"}"#;
    let zeros = format!("{:?}", [0; 32]);
    let forged = frame(&zeros, order);
    is_refused(&hosts, listen_between(&hosts.rdzv, move |_| forged.clone()));
    leader.signal(Signal::SIGTERM);
    leader.wait();
}

#[test]
fn an_order_that_was_changed_is_refused() {
    let hosts = Hosts::new();
    let leader = hosts.start("a", 1, "2", &[], "true");
    // The agent's command: the last bytes of the order.
    let changed = |mut front: &TcpStream| {
        let mut passed_on = Vec::new();
        loop {
            let mut lens = [0; 8];
            if front.read_exact(&mut lens).is_err() {
                return passed_on;
            }
            let len = |at: usize| u32::from_le_bytes(lens[at..at + 4].try_into().unwrap()) as usize;
            let mut order = vec![0; len(0) + len(4)];
            front.read_exact(&mut order).unwrap();
            let text = String::from_utf8(order).unwrap();
            passed_on.extend(lens);
            passed_on.extend(text.replace(" agent\"}", " told!\"}").as_bytes());
            // Before, that there is none yet.
            if !text.ends_with("null") {
                assert!(text.ends_with(" agent\"}"), "{text}");
                return passed_on;
            }
        }
    };
    is_refused(&hosts, listen_between(&hosts.rdzv, changed));
    leader.signal(Signal::SIGTERM);
    leader.wait();
}
