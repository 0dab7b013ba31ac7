"""A switch between network namespaces that delivers a frame later, for kernels that cannot (without tc's netem): a TAP device in
each namespace, and a program that passes frames between them. Needs root and /dev/net/tun."""
import ctypes
import fcntl
import heapq
import itertools
import os
import select
import struct
import sys
import time

CLONE_NEWNET = 0x40000000
# linux/if_tun.h
TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
TAP_WITH_HEADERS = 0x0002 | 0x1000 | 0x4000  # IFF_TAP, IFF_NO_PI, IFF_VNET_HDR
OFFLOADS = 0x01 | 0x02 | 0x04  # checksums, TCP segmentation of IPv4 and IPv6: frames of up to 64 KiB pass as they are
HEADER_BYTES = 10  # virtio_net_hdr before each frame
MAX_BYTES = HEADER_BYTES + (1 << 16) + 64
# For so long a card's frames may wait for it; then the sender's queue in the kernel does.
MAX_QUEUED_SECS = 0.02


def mac(host):
    """Of the host's card; the switch knows a card by its last byte."""
    return f"02:00:00:00:00:{host:02x}"


def tap_in(namespace, name):
    with open(f"/var/run/netns/{namespace}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"network namespace {namespace}")
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH22x", name.encode(), TAP_WITH_HEADERS))
    fcntl.ioctl(tap, TUNSETOFFLOAD, OFFLOADS)
    return tap


def switch(taps, bytes_per_sec, latency):
    """Passes frames on for ever: each takes its time through the sender's card, `latency` s on the way and its time through the receiver's."""
    outputs = {number: tap for number, tap in enumerate(taps, 1)}
    sends_until, receives_until = dict.fromkeys(outputs, 0.0), dict.fromkeys(outputs, 0.0)
    order, on_the_way = itertools.count(), []
    while True:
        now = time.monotonic()
        while on_the_way and on_the_way[0][0] <= now:
            _, _, host, frame = heapq.heappop(on_the_way)
            try:
                os.write(outputs[host], frame)
            except OSError:
                pass  # A card that is full, or not up yet, drops frames; TCP sends them again.
        may_send = {tap: host for host, tap in outputs.items() if sends_until[host] < now + MAX_QUEUED_SECS}
        next_event = on_the_way[0][0] - now if on_the_way else None
        if len(may_send) < len(outputs):
            next_event = min(next_event or MAX_QUEUED_SECS, MAX_QUEUED_SECS / 4)
        for tap in select.select(list(may_send), [], [], next_event)[0]:
            sender, now = may_send[tap], time.monotonic()
            frame = os.read(tap, MAX_BYTES)
            to = frame[HEADER_BYTES:HEADER_BYTES + 6]
            takes = (len(frame) - HEADER_BYTES) / bytes_per_sec
            sends_until[sender] = max(now, sends_until[sender]) + takes
            receivers = [host for host in outputs if host != sender] if to[0] & 1 else [to[5]] if to[5] in outputs else []
            for host in receivers:
                # The first byte comes in when it has left, so that a frame alone takes its time once.
                receives_until[host] = max(sends_until[sender] + latency, receives_until[host] + takes)
                heapq.heappush(on_the_way, (receives_until[host], next(order), host, frame))


def main():
    bytes_per_sec, latency, *namespaces = sys.argv[1:]
    taps = [tap_in(namespace, "net0") for namespace in namespaces]
    # It has to run when a frame is due, not when the ranks let it.
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    print("ready", flush=True)
    switch(taps, float(bytes_per_sec), float(latency))


if __name__ == "__main__":
    main()
