"""Clocks, power and temperature of the GPU while something runs."""
import contextlib
import statistics
import subprocess
import tempfile

FIELDS = ["clocks.sm", "clocks.mem", "power.draw", "temperature.gpu", "clocks_event_reasons.active"]


def summary(lines):
    """Of lines of nvidia-smi, those in which the GPU works: more than half of the most power seen."""
    samples = []
    for line in lines:
        values = [value.strip() for value in line.split(",")]
        with contextlib.suppress(ValueError):
            samples.append([*map(float, values[:4]), values[4]])
    if not samples:
        return None
    most_power = max(sample[2] for sample in samples)
    busy = [sample for sample in samples if sample[2] > most_power / 2]
    sm, mem, power, celsius, reasons = zip(*busy)
    return {"samples": len(busy), "sm_mhz": statistics.median(sm), "min_sm_mhz": min(sm), "memory_mhz": statistics.median(mem),
            "watts": statistics.median(power), "max_watts": most_power, "max_celsius": max(celsius),
            "clock_reasons": sorted(set(reasons))}


@contextlib.contextmanager
def sampled(into):
    """Puts a summary of the time inside under `clocks` into a dictionary, if there is an nvidia-smi."""
    command = ["nvidia-smi", "--id=0", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits", "--loop-ms=250"]
    with tempfile.TemporaryFile("w+") as out:
        try:
            process = subprocess.Popen(command, stdout=out, stderr=subprocess.DEVNULL)
        except OSError:
            process = None
        try:
            yield
        finally:
            if process:
                process.terminate()
                process.wait()
                out.seek(0)
                into["clocks"] = summary(out.readlines())
