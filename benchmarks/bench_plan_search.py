"""Time of a plan from 1 to 64 nodes, each in its own process.

    python benchmarks/bench_plan_search.py [--nodes 1 4 16 64] [--rounds 3]

Seconds of processor time, so that other load counts little. Limit: 2 s up to 64 nodes, without the start of Python and
its packages (measured by `--help`). Exit 1 if a plan takes longer.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
from collections.abc import Sequence

LIMIT = 2.0
LOADS = ("in=3500,out=1500,concurrency=256", "in=65000,out=1000,concurrency=64")


def seconds(arguments: Sequence[str], rounds: int) -> float:
    """Median of whole processes."""
    command, spent = [sys.executable, "-m", "glm5_ascend", "plan", *arguments], []
    for _ in range(rounds):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return statistics.median(spent)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=(1, 4, 16, 64))
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    bare, slow = seconds(["--help"], args.rounds), False
    print(f"starting: {bare:.2f} s\n")
    print("| nodes | machine | workload | answer, s | of that search, s |\n|---|---|---|---|---|")
    for nodes in args.nodes:
        for machine in ("a3", "a2"):
            for load in LOADS:
                arguments = [
                    "--quant",
                    "w4a8",
                    "--nodes",
                    str(nodes),
                    "--hardware",
                    machine,
                    "--workload",
                    load,
                    "--json",
                ]
                whole = seconds(arguments, args.rounds)
                print(f"| {nodes} | {machine} | {load} | {whole:.2f} | {whole - bare:.2f} |")
                slow = slow or whole - bare > LIMIT
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
