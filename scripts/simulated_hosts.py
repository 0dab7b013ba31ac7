"""Hosts that are network namespaces of this machine, for the benchmarks: each has an address and a link to a switch, which carries so
much each way. Needs root, and `ip` and `tc` from iproute2."""
import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import tempfile

import slow_switch

SUBNET = "10.219.7"


def run(*words, check=True):
    return subprocess.run(words, check=check, capture_output=not check, text=True)


def ip(*words):
    run("ip", *words)


def limit(namespace, link, bandwidth):
    """What leaves by `link` goes at `bandwidth`."""
    run("ip", "netns", "exec", namespace, "tc", "qdisc", "add", "dev", link, "root", "tbf", "rate", bandwidth, "burst", "128kb", "latency", "100ms")


def in_units(text, units):
    """A number with one of the units, as tc writes it: 1gbit, 200us."""
    for unit, factor in units.items():
        if text.endswith(unit) and text[:-len(unit)].replace(".", "", 1).isdigit():
            return float(text[:-len(unit)]) * factor
    sys.exit(f"{text!r} is not a number with a unit, one of {', '.join(units)}")


class Hosts:
    """Simulated hosts; `mpirun(ranks)` gives the words that start Open MPI's ranks on them, as many on each."""

    def __init__(self, number, folder):
        self.number = number
        self.folder = pathlib.Path(folder)
        self.names = [f"bench{os.getpid()}h{host}" for host in range(number)]
        self.switch = f"bench{os.getpid()}s"
        self.slow_switch = None

    def make(self, bandwidth, latency):
        for name in self.names:
            ip("netns", "add", name)
        if latency:
            self.join_slowly(in_units(bandwidth, {"gbit": 1e9 / 8, "mbit": 1e6 / 8}), in_units(latency, {"us": 1e-6, "ms": 1e-3}))
        else:
            self.join(bandwidth)
        for host, name in enumerate(self.names, 1):
            ip("-n", name, "addr", "add", f"{SUBNET}.{host}/24", "dev", "net0")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", "net0", "up")
        cases = " ".join(f"{SUBNET}.{host}) ns={name} ;;" for host, name in enumerate(self.names, 1))
        agent = self.folder / "agent"
        agent.write_text(f"#!/bin/sh\nhost=$1\nshift\ncase $host in {cases} esac\n"
                         'exec ip netns exec $ns unshare --uts sh -c "hostname $ns; $*"\n')
        agent.chmod(0o755)

    def join(self, bandwidth):
        """By the kernel's own switch."""
        ip("netns", "add", self.switch)
        ip("-n", self.switch, "link", "add", "switch", "type", "bridge")
        ip("-n", self.switch, "link", "set", "switch", "up")
        for host, name in enumerate(self.names, 1):
            ip("link", "add", "net0", "netns", name, "type", "veth", "peer", "name", f"port{host}", "netns", self.switch)
            ip("-n", self.switch, "link", "set", f"port{host}", "master", "switch", "up")
            limit(name, "net0", bandwidth)
            limit(self.switch, f"port{host}", bandwidth)

    def join_slowly(self, bytes_per_sec, latency):
        """By a switch that delivers later."""
        program = [sys.executable, slow_switch.__file__, str(bytes_per_sec), str(latency), *self.names]
        self.slow_switch = subprocess.Popen(program, stdout=subprocess.PIPE, text=True)
        if self.slow_switch.stdout.readline() != "ready\n":
            sys.exit("the switch that delivers later has not started")
        for host, name in enumerate(self.names, 1):
            ip("-n", name, "link", "set", "net0", "address", slow_switch.mac(host))

    def mpirun(self, ranks, btl="vader,tcp,self"):
        first = self.names[0]
        slots = ",".join(f"{SUBNET}.{host}:{ranks // self.number}" for host in range(1, self.number + 1))
        return ["ip", "netns", "exec", first, "unshare", "--uts", "sh", "-c", f'hostname {first}; exec "$@"', "sh",
                "mpirun", "--allow-run-as-root", "--bind-to", "none", "-n", str(ranks), "--host", slots,
                "--mca", "plm_rsh_agent", str(self.folder / "agent"), "--mca", "pml", "ob1", "--mca", "btl", btl,
                "--mca", "btl_tcp_if_include", f"{SUBNET}.0/24", "--mca", "oob_tcp_if_include", f"{SUBNET}.0/24",
                "--mca", "mpi_yield_when_idle", "1", "-x", f"MASTER_ADDR={SUBNET}.1", "-x", "MASTER_PORT=29517"]

    def remove(self):
        if self.slow_switch:
            self.slow_switch.kill()
            self.slow_switch.wait()
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
