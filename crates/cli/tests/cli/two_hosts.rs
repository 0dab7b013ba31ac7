//! Two "hosts" on this machine: network namespaces with an address each, joined by one link. Where they cannot be made, which
//! takes root and `ip`, the tests say so and pass.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use tempfile::TempDir;

/// Namespaces `a` and `b`; they go when it is dropped, with all processes in them.
pub struct TwoHosts {
    /// Of the names of namespaces and interfaces, which belong to the whole machine.
    id: String,
    subnet: String,
    dir: TempDir,
}

impl TwoHosts {
    /// `None` where namespaces cannot be made.
    pub fn new() -> Option<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = std::process::id() % 10_000 * 10 + NEXT.fetch_add(1, Ordering::Relaxed);
        let hosts = Self {
            id: format!("ct{number}"),
            subnet: format!("10.{}.{}", 200 + number / 250 % 50, number % 250),
            dir: TempDir::new().unwrap(),
        };
        let is_made = hosts.make().is_some();
        if !is_made {
            eprintln!("not tested: network namespaces cannot be made here");
            return None;
        }
        hosts.write_agent();
        Some(hosts)
    }

    fn make(&self) -> Option<()> {
        let [a, b] = [self.namespace('a'), self.namespace('b')];
        ip(&["netns", "add", &a])?;
        ip(&["netns", "add", &b])?;
        let [link_a, link_b] = [self.link('a'), self.link('b')];
        let peer = ["peer", "name", &link_b, "netns", &b];
        ip(&[
            &["link", "add", &link_a, "netns", &a, "type", "veth"],
            &peer[..],
        ]
        .concat())?;
        for host in ['a', 'b'] {
            let (namespace, link) = (self.namespace(host), self.link(host));
            let address = format!("{}/24", self.address(host));
            ip(&["-n", &namespace, "addr", "add", &address, "dev", &link])?;
            ip(&["-n", &namespace, "link", "set", "lo", "up"])?;
            ip(&["-n", &namespace, "link", "set", &link, "up"])?;
        }
        Some(())
    }

    fn write_agent(&self) {
        let script = format!(
            "#!/bin/sh\nhost=$1\nshift\ncase $host in\n{}) ns={} name=host-a ;;\n*) ns={} name=host-b ;;\nesac\n\
             exec ip netns exec $ns unshare --uts sh -c \"hostname $name; $*\"\n",
            self.address('a'),
            self.namespace('a'),
            self.namespace('b'),
        );
        fs::write(self.agent(), script).unwrap();
        fs::set_permissions(self.agent(), fs::Permissions::from_mode(0o755)).unwrap();
    }

    /// What is called in place of ssh: the host, then a command.
    pub fn agent(&self) -> PathBuf {
        self.dir.path().join("agent")
    }

    fn namespace(&self, host: char) -> String {
        format!("{}{host}", self.id)
    }

    fn link(&self, host: char) -> String {
        format!("{}v{host}", self.id)
    }

    pub fn address(&self, host: char) -> String {
        let last = if host == 'a' { 1 } else { 2 };
        format!("{}.{last}", self.subnet)
    }

    /// The words that run a program on a host.
    pub fn enter(&self, host: char) -> Vec<String> {
        let namespace = self.namespace(host);
        let enter = ["ip", "netns", "exec", &namespace, "unshare", "--uts"];
        let name = format!("hostname host-{host}; exec \"$@\"");
        let shell = ["sh", "-c", &name, "sh"];
        enter.into_iter().chain(shell).map(str::to_string).collect()
    }

    /// A host file of two ranks on each host.
    pub fn hostfile(&self) -> String {
        let [a, b] = [self.address('a'), self.address('b')];
        format!("{a} slots=2\n{b} slots=2\n")
    }

    /// What Open MPI has to be told to use the link, and TCP alone.
    pub fn mpi_variables(&self) -> [(&'static str, String); 3] {
        let net = format!("{}.0/24", self.subnet);
        [
            ("OMPI_MCA_btl", "tcp,self".to_string()),
            ("OMPI_MCA_btl_tcp_if_include", net.clone()),
            ("OMPI_MCA_oob_tcp_if_include", net),
        ]
    }

    /// The words that start two ranks on each host with Open MPI, over TCP alone.
    #[cfg(feature = "mpi")]
    pub fn mpirun(&self) -> Vec<String> {
        let [a, b] = [self.address('a'), self.address('b')];
        let mpirun = format!(
            "mpirun --allow-run-as-root --bind-to none -n 4 --host {a}:2,{b}:2 --mca plm_rsh_agent {} -x MASTER_ADDR={a} \
             -x MASTER_PORT=29511",
            self.agent().display(),
        );
        let mut words = self.enter('a');
        words.push("env".to_string());
        let variables = self.mpi_variables();
        words.extend(variables.map(|(name, value)| format!("{name}={value}")));
        words.extend(mpirun.split_whitespace().map(str::to_string));
        words
    }

    /// Nothing crosses the link from now on.
    #[cfg(feature = "mpi")]
    pub fn cut(&self) {
        let [namespace, link] = [self.namespace('a'), self.link('a')];
        ip(&["-n", &namespace, "link", "set", &link, "down"]).expect("a link to cut");
    }

    /// Drops what host b sends to host a from now on, without a word.
    pub fn drop_packets(&self) {
        let (a, link_a) = (self.namespace('a'), self.link('a'));
        let address = self.address('a');
        let of_link = format!("/sys/class/net/{link_a}/address");
        let mut hardware = Command::new("ip");
        let hardware = hardware
            .args(["netns", "exec", &a, "cat", &of_link])
            .output();
        let hardware = String::from_utf8(hardware.unwrap().stdout).unwrap();
        // Known for good, so that nobody asks for it.
        let neighbour = ["neigh", "replace", &address, "lladdr", hardware.trim()];
        let link_b = self.link('b');
        let for_good = ["nud", "permanent", "dev", &link_b];
        let namespace = self.namespace('b');
        ip(&[&["-n", &namespace], &neighbour[..], &for_good].concat()).expect("a neighbour");
        let address = format!("{address}/24");
        ip(&["-n", &a, "addr", "del", &address, "dev", &link_a]).expect("an address to remove");
    }

    /// Ends all processes on both hosts.
    pub fn kill_all(&self) {
        for host in ['a', 'b'] {
            self.kill_all_on(host);
        }
    }

    /// Ends all processes on one of them.
    pub fn kill_all_on(&self, host: char) {
        let pids = Command::new("ip")
            .args(["netns", "pids", &self.namespace(host)])
            .output();
        let pids = String::from_utf8_lossy(&pids.unwrap().stdout).into_owned();
        for pid in pids.split_whitespace() {
            // It may have ended by itself.
            let _ = Command::new("kill").args(["-9", pid]).output();
        }
    }
}

impl Drop for TwoHosts {
    fn drop(&mut self) {
        self.kill_all();
        for host in ['a', 'b'] {
            let _ = Command::new("ip")
                .args(["netns", "del", &self.namespace(host)])
                .output();
        }
    }
}

fn ip(arguments: &[&str]) -> Option<()> {
    let output = Command::new("ip").args(arguments).output().ok()?;
    output.status.success().then_some(())
}
