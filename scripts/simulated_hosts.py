"""Hosts that are network namespaces of this machine, for the benchmarks: each has an address and a link to a switch, which carries so
much each way. Needs root, and `ip` and `tc` from iproute2."""
import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import tempfile

SUBNET = "10.219.7"


def run(*words, check=True):
    return subprocess.run(words, check=check, capture_output=not check, text=True)


def ip(*words):
    run("ip", *words)


def can_delay():
    """Whether this kernel can hold packets back (tc's netem)."""
    name = f"delay{os.getpid()}"
    run("ip", "netns", "add", name)
    try:
        return run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms", check=False).returncode == 0
    finally:
        run("ip", "netns", "del", name)


def limit(namespace, link, bandwidth, latency):
    """What leaves by `link` goes at `bandwidth`, and the `latency` later, if there is one."""
    tc = ["ip", "netns", "exec", namespace, "tc", "qdisc", "add", "dev", link]
    run(*tc, "root", "handle", "1:", "tbf", "rate", bandwidth, "burst", "128kb", "latency", "100ms")
    if latency:
        run(*tc, "parent", "1:1", "handle", "10:", "netem", "delay", latency, "limit", "100000")


class Hosts:
    """Simulated hosts; `mpirun(ranks)` gives the words that start Open MPI's ranks on them, as many on each."""

    def __init__(self, number, folder):
        self.number = number
        self.folder = pathlib.Path(folder)
        self.names = [f"bench{os.getpid()}h{host}" for host in range(number)]
        self.switch = f"bench{os.getpid()}s"

    def make(self, bandwidth, latency):
        ip("netns", "add", self.switch)
        ip("-n", self.switch, "link", "add", "switch", "type", "bridge")
        ip("-n", self.switch, "link", "set", "switch", "up")
        for host, name in enumerate(self.names, 1):
            ip("netns", "add", name)
            ip("link", "add", "net0", "netns", name, "type", "veth", "peer", "name", f"port{host}", "netns", self.switch)
            ip("-n", self.switch, "link", "set", f"port{host}", "master", "switch", "up")
            ip("-n", name, "addr", "add", f"{SUBNET}.{host}/24", "dev", "net0")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", "net0", "up")
            # Of the way there a host's own card delays, its port does not: as much on the way back.
            limit(name, "net0", bandwidth, latency)
            limit(self.switch, f"port{host}", bandwidth, None)
        cases = " ".join(f"{SUBNET}.{host}) ns={name} ;;" for host, name in enumerate(self.names, 1))
        agent = self.folder / "agent"
        agent.write_text(f"#!/bin/sh\nhost=$1\nshift\ncase $host in {cases} esac\n"
                         'exec ip netns exec $ns unshare --uts sh -c "hostname $ns; $*"\n')
        agent.chmod(0o755)

    def mpirun(self, ranks, btl="vader,tcp,self"):
        first = self.names[0]
        slots = ",".join(f"{SUBNET}.{host}:{ranks // self.number}" for host in range(1, self.number + 1))
        return ["ip", "netns", "exec", first, "unshare", "--uts", "sh", "-c", f'hostname {first}; exec "$@"', "sh",
                "mpirun", "--allow-run-as-root", "--bind-to", "none", "-n", str(ranks), "--host", slots,
                "--mca", "plm_rsh_agent", str(self.folder / "agent"), "--mca", "pml", "ob1", "--mca", "btl", btl,
                "--mca", "btl_tcp_if_include", f"{SUBNET}.0/24", "--mca", "oob_tcp_if_include", f"{SUBNET}.0/24",
                "--mca", "mpi_yield_when_idle", "1", "-x", f"MASTER_ADDR={SUBNET}.1", "-x", "MASTER_PORT=29517"]

    def remove(self):
        for name in [*self.names, self.switch]:
            pids = run("ip", "netns", "pids", name, check=False).stdout.split()
            if pids:
                run("kill", "-9", *pids, check=False)
            run("ip", "netns", "del", name, check=False)


@contextlib.contextmanager
def simulated_hosts(number, bandwidth, latency=None):
    """`number` hosts that are joined by a switch, with links of `bandwidth` (as tc writes it: 1gbit); a packet takes `latency` more."""
    with tempfile.TemporaryDirectory() as folder:
        hosts = Hosts(number, folder)
        # What is made is removed, whatever ends this.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        try:
            hosts.make(bandwidth, latency)
            yield hosts
        finally:
            hosts.remove()
