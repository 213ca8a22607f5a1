"""What scores of int16 gain for the Lightning Indexer, on processors without bf16 instructions.

    NUMBA_CACHE_DIR=FOLDER python benchmarks/report_indexer_int16.py --processor icelake-server

Medians of interleaved rounds with one thread and cold caches, at GLM-5's shapes: the op with fp32 scores of all keys,
and with int16 scores that leave a few to be scored in fp32. Both choose the same keys. --processor is a lesser one than
this machine's: haswell, alderlake or icelake-server.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time

import torch
from tools.ops_cases import INDEX_DIM, INDEX_HEADS, indexer_operands

from glm5_kernels.compiled.processor import restricted_to


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--processor", choices=["haswell", "alderlake", "icelake-server"])
    parser.add_argument("--context", type=int, default=16384)
    parser.add_argument("--rounds", type=int, default=11)
    args = parser.parse_args()
    wanted = restricted_to(args.processor) if args.processor else {}
    if any(os.environ.get(name) != value for name, value in wanted.items()):  # numba reads them when it is loaded
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | wanted)
    from glm5_kernels.lightning_indexer import cpu

    words = cpu.WORDS
    if words is None:
        print("this processor multiplies in bf16 or fp32")
        return 1
    torch.manual_seed(0)
    torch.set_num_threads(1)
    memory = torch.ones(2**26)  # 256 MiB: more than the caches hold
    for requests, tokens in ((8, 1), (1, 64)):
        operands, seconds, chosen = indexer_operands(requests, tokens, args.context), {}, {}
        for number in range(args.rounds + 1):
            for name, way in (("fp32", None), ("int16", words)):
                cpu.WORDS = way
                memory.sum()
                began = time.perf_counter()
                chosen[name] = cpu.lightning_indexer(*operands)
                if number:  # the first one compiles
                    seconds.setdefault(name, []).append(time.perf_counter() - began)
        fp32, int16 = (statistics.median(seconds[name]) * 1e3 for name in ("fp32", "int16"))
        print(
            f"B={requests} n={tokens} ctx={args.context}, {INDEX_HEADS} heads of {INDEX_DIM}: fp32 {fp32:.2f} ms, "
            f"int16 {int16:.2f} ms, {fp32 / int16:.2f} x, the same keys: {torch.equal(chosen['fp32'], chosen['int16'])}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
