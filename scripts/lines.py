#!/usr/bin/env python3
"""Lines of Rust by crate, source and tests, beside those of another commit: lines.py [COMMIT], by default origin/main if this one comes after
it, or its parent."""

import collections
import subprocess
import sys


def git(*words):
    return subprocess.run(["git", *words], check=True, capture_output=True).stdout


def lines(commit):
    """Lines by crate: source, tests."""
    counts = collections.defaultdict(lambda: [0, 0])
    for row in git("ls-tree", "-r", "-z", commit).decode().split("\0"):
        path = row.partition("\t")[2]
        if not path.endswith(".rs") or path.startswith("."):
            continue
        parts = path.split("/")
        crate = parts[1] if parts[0] == "crates" else parts[0]
        is_test = "src" not in parts and parts[0] != "examples"
        counts[crate][is_test] += len(git("show", f"{commit}:{path}").splitlines())
    return counts


def default_base():
    """What this commit began from; None of a first one."""
    head = git("rev-parse", "HEAD")
    for name in ["origin/main", "HEAD^"]:
        found = subprocess.run(["git", "rev-parse", "--verify", "--quiet", name + "^{commit}"], capture_output=True)
        if found.returncode == 0 and found.stdout != head:
            return found.stdout.decode().strip()
    return None


def main():
    base = sys.argv[1] if len(sys.argv) > 1 else default_base()
    now = lines("HEAD")
    before = lines(base) if base else now
    print(f"{'':16}{'source':>10}{'tests':>10}   since {base[:12] if base else 'the first commit'}")
    total = [0, 0, 0, 0]
    for crate in sorted(set(now) | set(before)):
        row = [*now[crate], *(a - b for a, b in zip(now[crate], before[crate]))]
        total = [a + b for a, b in zip(total, row)]
        print(f"{crate:16}{row[0]:>10,}{row[1]:>10,}{row[2]:>+9,}{row[3]:>+9,}")
    print(f"{'all':16}{total[0]:>10,}{total[1]:>10,}{total[2]:>+9,}{total[3]:>+9,}")


if __name__ == "__main__":
    main()
