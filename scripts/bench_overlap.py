#!/usr/bin/env python3
"""How much of the communication of data-parallel ranks hides under computation, over a link of limited speed, as a Markdown table.

    cargo build --release --example bench_train --features mpi
    sudo scripts/bench_overlap.py [--turns N] [--steps N] [--mbit 1000] [-- FLAGS OF bench_train]

Two "hosts" are network namespaces of this machine, joined by one link that carries so many megabits a second each way; Open MPI
starts half of the ranks on each. With and without --no-overlap run in turns, and the best median step of each is taken. Needs
root, and `ip` and `tc` from iproute2.
"""
import argparse
import contextlib
import os
import pathlib
import subprocess
import tempfile

from bench_train import OURS, best_of

SUBNET = "10.219.7"


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True)


@contextlib.contextmanager
def two_hosts(mbit):
    """The words that start a program's ranks on both hosts."""
    names = [f"overlap{os.getpid()}{host}" for host in "ab"]
    links = [f"ov{os.getpid() % 100000}{host}" for host in "ab"]
    with tempfile.TemporaryDirectory() as folder:
        try:
            for name in names:
                ip("netns", "add", name)
            ip("link", "add", links[0], "netns", names[0], "type", "veth", "peer", "name", links[1], "netns", names[1])
            for number, (name, link) in enumerate(zip(names, links), 1):
                ip("-n", name, "addr", "add", f"{SUBNET}.{number}/24", "dev", link)
                ip("-n", name, "link", "set", "lo", "up")
                ip("-n", name, "link", "set", link, "up")
                subprocess.run(["ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", link, "root", "tbf", "rate", f"{mbit}mbit",
                                "burst", "512kb", "latency", "100ms"], check=True)
            agent = pathlib.Path(folder) / "agent"
            agent.write_text("#!/bin/sh\nhost=$1\nshift\n"
                             f"case $host in {SUBNET}.1) ns={names[0]} ;; *) ns={names[1]} ;; esac\n"
                             'exec ip netns exec $ns unshare --uts sh -c "hostname $ns; $*"\n')
            agent.chmod(0o755)

            def mpirun(ranks):
                return ["ip", "netns", "exec", names[0], "unshare", "--uts", "sh", "-c", f'hostname {names[0]}; exec "$@"', "sh",
                        "mpirun", "--allow-run-as-root", "--bind-to", "none", "-n", str(ranks),
                        "--host", f"{SUBNET}.1:{ranks // 2},{SUBNET}.2:{ranks // 2}", "--mca", "plm_rsh_agent", str(agent),
                        "--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", f"{SUBNET}.0/24",
                        "--mca", "oob_tcp_if_include", f"{SUBNET}.0/24",
                        "-x", f"MASTER_ADDR={SUBNET}.1", "-x", "MASTER_PORT=29517"]
            yield mpirun
        finally:
            for name in names:
                pids = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split()
                subprocess.run(["kill", "-9", *pids], stderr=subprocess.DEVNULL) if pids else None
                subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--turns", type=int, default=2)
    p.add_argument("--steps", type=int, default=5)
    p.add_argument("--mbit", type=int, default=1000)
    p.add_argument("flags", nargs="*", help="of bench_train, after --")
    a = p.parse_args()
    print(f"| replicas, {a.mbit} Mbit/s | step, overlapping | step, not | ratio | waited, overlapping | waited, not | waits hidden |")
    print("|---|---|---|---|---|---|---|")
    with two_hosts(a.mbit) as mpirun:
        for dp in (2, 4):
            command = [*mpirun(dp), OURS, "--backend", "mpi", "--dp", str(dp), "--steps", str(a.steps), *a.flags]
            best = best_of(a.turns, {"with": command, "without": [*command, "--no-overlap"]})
            step, waited = ({name: result[field] for name, result in best.items()} for field in ("step_secs", "communication_secs"))
            hidden = 1 - waited["with"] / waited["without"]
            print(f"| {dp} | {step['with']:.3f} s | {step['without']:.3f} s | {step['without'] / step['with']:.2f} | "
                  f"{waited['with']:.3f} s | {waited['without']:.3f} s | {hidden:.0%} |", flush=True)


if __name__ == "__main__":
    main()
