"""Time and peak memory of commands, each in its own process, in turns: of two trees, two machines' features, two tools.

    python benchmarks/bench_commands.py [--rounds 3] [--cold DIR ...] COMMAND [COMMAND ...]
    python benchmarks/bench_commands.py "glm5-ascend verify OUT" "sha256sum OUT/*.safetensors"
    python benchmarks/bench_commands.py "glm5-ascend plan" "cd ../before && glm5-ascend plan"

A command is a line for the shell. One round before the first is not counted: it compiles and fills the page cache. With
--cold the files of these folders are taken out of it before every run. Exit code 1 if a command fails.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple


class Run(NamedTuple):
    """Wall seconds, processor seconds of the whole tree of processes, and peak bytes of its largest process."""

    seconds: float
    processors: float
    peak: int


def run(command: str) -> Run:
    """Run a line in a shell; ends the benchmark if it fails."""
    began = time.perf_counter()
    process = subprocess.Popen(command, shell=True, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"{command}: exit status {os.waitstatus_to_exitcode(status)}")
    return Run(time.perf_counter() - began, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


def leave_memory(folder: Path) -> None:
    """Ask Linux to take the files of a folder out of the page cache."""
    for path in folder.iterdir():
        file = os.open(path, os.O_RDONLY)
        os.fdatasync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("commands", nargs="+", metavar="COMMAND")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cold", type=Path, nargs="*", default=[], metavar="DIR")
    args = parser.parse_args()
    runs: dict[str, list[Run]] = {command: [] for command in args.commands}
    for count in range(args.rounds + 1):
        for command in args.commands:
            for folder in args.cold:
                leave_memory(folder)
            measured = run(command)
            runs[command] += [measured] if count else []
    print("| command | seconds, median (lowest to highest) | of processors | peak memory, GB | to the first |")
    print("|---|---|---|---|---|")
    base = statistics.median(run.seconds for run in runs[args.commands[0]])
    for command, rounds in runs.items():
        seconds = sorted(run.seconds for run in rounds)
        middle, processors = statistics.median(seconds), statistics.median(run.processors for run in rounds)
        peak = max(run.peak for run in rounds) / 1e9
        print(f"| `{command}` | {middle:.2f} ({seconds[0]:.2f} to {seconds[-1]:.2f}) | {processors:.2f} | {peak:.2f} | "
              f"{middle / base:.2f} |")  # fmt: skip


if __name__ == "__main__":
    main()
