"""Which parts there are, in which call, and for how long."""
import dataclasses
import time
import typing

import correct
import memory
import speed
from runner import MIN_SECS, OutOfTime

# A call ends within 9 minutes: what a command may take where a GPU is lent by the command, less a minute.
CALL_SECS = 530


@dataclasses.dataclass
class Part:
    call: str
    # On an H100: measured, but for sanitizer, parity, communication's and the fourth call's, which are estimates.
    secs: int
    run: typing.Callable


PARTS = {
    "preflight": Part("first", 30, correct.preflight),
    "step": Part("first", 35, speed.step),
    "one_step": Part("first", 55, correct.one_step),
    "attention": Part("first", 15, speed.attention),
    "products": Part("first", 10, speed.products),
    "kernels": Part("first", 5, speed.kernels),
    "window": Part("first", 10, correct.window),
    "packed": Part("first", 40, correct.packed),
    "packed_attention": Part("first", 5, speed.packed_attention),
    "operations": Part("first", 180, correct.operations),
    "sanitizer": Part("first", 120, correct.sanitizer),
    "full": Part("second", 230, speed.full),
    "finetune": Part("second", 10, correct.finetune),
    "frozen": Part("third", 90, speed.frozen),
    "half_precision": Part("third", 30, correct.half_precision),
    "communication": Part("third", 30, correct.communication),
    "nccl": Part("third", 15, correct.nccl),
    "nccl_shared": Part("third", 60, correct.nccl_shared),
    "parity": Part("third", 300, correct.parity),
    "replicas": Part("fourth", 50, memory.replicas),
    "offload": Part("fourth", 240, memory.offload),
    "memory": Part("fourth", 150, memory.held),
}
CALLS = list(dict.fromkeys(part.call for part in PARTS.values()))


def chosen(words):
    """Parts of the calls and names given; of all calls without any."""
    return [name for name, part in PARTS.items() if not words or name in words or part.call in words]


def run_part(run, name):
    start = time.monotonic()
    try:
        if run.left() < MIN_SECS:
            raise OutOfTime("the call's time is over")
        row = PARTS[name].run(run)
    except OutOfTime as error:
        row = {"result": f"SKIPPED: {error}"}
    except Exception as error:  # whatever one part does, the next one runs
        row = {"result": f"FAILED: {error}", "reached": False}
    return row | {"secs": round(time.monotonic() - start, 1), "planned_secs": PARTS[name].secs}
