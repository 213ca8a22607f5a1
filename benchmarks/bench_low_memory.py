"""Serve a checkpoint with less memory than its files, and compare its rate of reading with the disk's.

    python benchmarks/bench_low_memory.py work/model-a-w4a8 --memory 5

DIR has real bytes (bench_peers.py makes Model A: GLM-5's widths, 4 layers, 6.8 GB). The disk's rate is that of direct
sequential reads of the same files, before and after. The server answers once with all memory and once in a control
group with so many GB (as root), its files not in memory. Printed: seconds per token, bytes read from the disk and their
rate, and its share of the disk's. Checked: both answers have the same tokens. Exit code 1 if not.
"""

from __future__ import annotations

import argparse
import mmap
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tools.limited_server import FailedError, ask, control_group, require, serving

PIECE, THREADS = 2**23, 8
#: Little of the small memory is left for the cache.
FLAGS = ["--max-model-len", "1024", "--kv-cache-memory-bytes", str(2**28), "--max-num-batched-tokens", "512"]


def disk_rate(files: list[Path], most: int = 2**32) -> float:
    """Bytes a second of direct reads of the files in order, `most` bytes at most."""

    local = threading.local()

    def prepare() -> None:
        local.buffer = mmap.mmap(-1, PIECE)  # direct reads need aligned memory

    def read(piece: tuple[int, int]) -> int:
        return os.preadv(piece[0], [local.buffer], piece[1])

    opened = [os.open(path, os.O_RDONLY | os.O_DIRECT) for path in files]
    pieces = [
        (file, start)
        for file, path in zip(opened, files, strict=True)
        for start in range(0, path.stat().st_size, PIECE)
    ][: most // PIECE]
    began = time.perf_counter()
    with ThreadPoolExecutor(THREADS, initializer=prepare) as pool:
        size = sum(pool.map(read, pieces))
    seconds = time.perf_counter() - began
    for file in opened:
        os.close(file)
    return size / seconds


def leave_memory(files: list[Path]) -> None:
    """Ask Linux to take the files out of the memory."""
    for path in files:
        file = os.open(path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def run(model: Path, memory: float, tokens: int) -> None:
    files = sorted(model.glob("*.safetensors"))
    size = sum(path.stat().st_size for path in files)
    print(f"{model.name}: {size / 1e9:.2f} GB; memory {memory} GB")
    prompt = [1000 + 7919 * i % 100000 for i in range(64)]
    with serving(model, None, FLAGS) as server:
        require("read from disk" not in server.ready, "the files do not fit into this machine's memory")
        plenty = ask(server, prompt, tokens, "all memory")
    leave_memory(files)
    rates = [disk_rate(files)]
    with control_group(int(memory * 1e9)) as members:
        require(members is not None, "no control group can be made here: run as root")
        with serving(model, members, FLAGS) as server:
            require("read from disk" in server.ready, "the ready line does not say where the weights are read from")
            short = ask(server, prompt, tokens, f"{memory} GB")
    rates.append(disk_rate(files))
    rate = short.use.read / short.later
    print(f"disk: {rates[0] / 1e9:.2f} and {rates[1] / 1e9:.2f} GB/s before and after; server: {rate / 1e9:.2f} GB/s, "
          f"{2 * rate / sum(rates):.2f} of the disk's")  # fmt: skip
    require(plenty.ids == short.ids, "the answers differ")
    require(short.use.read > 0, "nothing was read: give it less memory, and end other processes that use the files")
    print("ok: the same tokens")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path, help="a quantized checkpoint")
    parser.add_argument("--memory", type=float, default=5, help="GB of the control group")
    parser.add_argument("--tokens", type=int, default=16, help="of an answer")
    args = parser.parse_args()
    try:
        run(args.model, args.memory, args.tokens)
    except FailedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
