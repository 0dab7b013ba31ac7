#!/usr/bin/env python3
"""Turns a preprocessed `.cu` file into C++ that registers each of its kernels with the emulator, by name and type.

Kernels of two sets may have the same name, so they become static, and `SET` says where this file belongs.

usage: kernels.py SET < FILE.ii > FILE.cpp        `__global__` is preprocessed to `__attribute__((used))`
"""
import re
import sys

KERNEL = re.compile(r'extern "C" __attribute__\(\(used\)\)\s+void\s+(\w+)\s*\(')
# Dynamic shared memory is the one array of tests/emulator/shim; other shared memory belongs to the host thread that runs the block.
DYNAMIC = re.compile(r"extern\s+__shared__\s+(\w+)\s+(\w+)\[\];")


def main():
    source = sys.stdin.read()
    names = KERNEL.findall(source)
    source = DYNAMIC.sub(r"\1* \2 = reinterpret_cast<\1*>(shared);", source)
    source = KERNEL.sub(r"static void \1(", source)
    sys.stdout.write(source.replace("__shared__", "static thread_local"))
    print("\n}" if sys.argv[1] == "candle" else "")
    for name in names:
        entry = f'"{sys.argv[1]}", "{name}", emulator::bind_kernel<&{name}>'
        print(f"static const emulator::KernelEntry entry_of_{name}({entry});")


if __name__ == "__main__":
    main()
