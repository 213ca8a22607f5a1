"""GB/s of `verify` beside the SHA-256 of the same files, each in its own process.

    python benchmarks/bench_verify.py OUT [--against SRC] [--sample 2%] [--rounds 3] [--limit 3]

Rounds take turns, after one that fills the page cache. Both use all cores: the hashes by files, several at a time.
The verdict must be clean. Exit 1 if it is not, or if verify takes more than LIMIT times the hashes.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

HASHES = """
import sys
from pathlib import Path
from glm5_ascend.checkpoint.output import file_facts
directory = Path(sys.argv[1])
file_facts(directory, [path.name for path in directory.iterdir() if path.is_file()])
"""


def run(command: Sequence[str]) -> tuple[float, float]:
    """Seconds, and those of processors; ends the program if the command fails."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--sample")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=float, default=3.0)
    args = parser.parse_args()
    size = sum(path.stat().st_size for path in args.out.glob("*.safetensors")) / 1e9
    verify = [sys.executable, "-m", "glm5_ascend", "verify", str(args.out)]
    verify += ["--against", str(args.against)] if args.against else []
    verify += ["--sample", args.sample] if args.sample else []
    commands = {"sha256": [sys.executable, "-c", HASHES, str(args.out)], "verify": verify}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    for number in range(args.rounds + 1):
        for name, command in commands.items():
            spent = run(command)
            times[name] += [spent] if number else []
    print(f"{args.out}: {size:.2f} GB\n\n| | seconds | of processors | GB/s |\n|---|---|---|---|")
    middle = {name: [statistics.median(column) for column in zip(*rows, strict=True)] for name, rows in times.items()}
    for name, (seconds, processors) in middle.items():
        print(f"| {name} | {seconds:.1f} | {processors:.1f} | {size / seconds:.2f} |")
    ratio = middle["verify"][0] / middle["sha256"][0]
    print(f"\nverify / sha256: {ratio:.2f}")
    return 1 if ratio > args.limit else 0


if __name__ == "__main__":
    sys.exit(main())
