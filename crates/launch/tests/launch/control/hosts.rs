//! Ranks on two "hosts": network namespaces joined by a virtual cable, which is cut.

use std::process::Command;
use std::time::{Duration, Instant};

use super::processes::Rank;

/// Two network namespaces with addresses 10.213.77.1 and .2; gone when dropped.
struct Hosts {
    names: [String; 2],
}

impl Hosts {
    /// `None`, and why, where namespaces cannot be made.
    fn new() -> Result<Self, String> {
        let id = std::process::id();
        let hosts = Self {
            names: [format!("ctl{id}a"), format!("ctl{id}b")],
        };
        let [a, b] = &hosts.names;
        ip(&["netns", "add", a])?;
        ip(&["netns", "add", b])?;
        ip(&[
            "-n", a, "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", b,
        ])?;
        for (index, name) in hosts.names.iter().enumerate() {
            let address = format!("10.213.77.{}/24", index + 1);
            ip(&["-n", name, "address", "add", &address, "dev", "cable"])?;
            ip(&["-n", name, "link", "set", "cable", "up"])?;
            ip(&["-n", name, "link", "set", "lo", "up"])?;
        }
        Ok(hosts)
    }

    fn cut(&self) {
        ip(&["-n", &self.names[1], "link", "set", "cable", "down"]).unwrap();
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for name in &self.names {
            // It may not have been made.
            let _ = ip(&["netns", "delete", name]);
        }
    }
}

fn ip(words: &[&str]) -> Result<(), String> {
    let output = Command::new("ip")
        .args(words)
        .output()
        .map_err(|error| error.to_string())?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!(
        "ip {}: {}",
        words.join(" "),
        String::from_utf8_lossy(&output.stderr)
    ))
}

#[test]
fn a_cut_between_hosts_ends_the_run_on_both_sides() {
    let hosts = match Hosts::new() {
        Ok(hosts) => hosts,
        Err(why) => return println!("skipped: no network namespaces here: {}", why.trim()),
    };
    let mut ranks: Vec<Rank> = (0..4)
        .map(|rank| {
            let name = &hosts.names[rank / 2];
            let wrap = ["ip", "netns", "exec", name];
            Rank::start(&wrap, "10.213.77.1:29377", rank, 4, "work")
        })
        .collect();
    ranks.iter_mut().for_each(|rank| rank.wait_for("ready"));
    // Longer than a beat: what the ranks do is known.
    std::thread::sleep(Duration::from_millis(1200));
    hosts.cut();
    let begun = Instant::now();
    let ends: Vec<_> = ranks.into_iter().map(Rank::end).collect();
    assert!(
        begun.elapsed() < Duration::from_secs(10),
        "{:?}",
        begun.elapsed()
    );
    let silent = "has not been heard of for ";
    for end in &ends[..2] {
        end.because_of_another(&[
            "rank 2 on host host-2 (process ",
            "rank 3 on host host-3 (process ",
        ]);
        assert_eq!(end.said.matches(silent).count(), 2, "{end:?}");
    }
    for end in &ends[2..] {
        end.because_of_another(&["rank 0 on host host-0 ", silent]);
    }
    for end in &ends {
        end.because_of_another(&[
            "s in gather(\"work\") at ",
            "the network between the hosts is cut",
        ]);
    }
}
