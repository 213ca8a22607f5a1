"""Peak memory and time of the indexer's training loss over context: the plain loss and the tiled one.

    python benchmarks/bench_indexer_loss.py [--lengths 512 1024 ...] [--json FILE]

Each run is a process of its own: loss and gradients once, on random tensors of the demo model's shapes (4 heads of 96,
16 index heads of 128, fp32), dense warm-up and sparse (64 chosen keys). Memory is the peak of the process minus what it
held before the loss. Before the table both losses and their gradients are compared at the smallest length.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import torch
from training.indexer_loss import (
    Attention,
    Index,
    Visible,
    indexer_loss,
    plain_indexer_loss,
    seen_if_chosen,
    seen_in_texts,
)  # fmt: skip

HEADS, HEAD_DIM, INDEX_HEADS, INDEX_DIM, TOPK = 4, 96, 16, 128, 64
LOSSES = {"plain": plain_indexer_loss, "tiled": indexer_loss}
LIMIT_GIB = 5.0  # the plain loss is not run where it would need more


def problem(length: int, stage: str) -> tuple[Attention, Index, Visible]:
    generator = torch.Generator().manual_seed(0)

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(1, length, *shape, generator=generator)

    attention = Attention(make(HEADS, HEAD_DIM), make(HEADS, HEAD_DIM), HEAD_DIM**-0.5)
    parts = (make(INDEX_HEADS, INDEX_DIM), make(INDEX_DIM), make(INDEX_HEADS) * (INDEX_HEADS * INDEX_DIM) ** -0.5)
    index = Index(*(part.requires_grad_() for part in parts))
    if stage == "dense":
        return attention, index, seen_in_texts(torch.zeros(1, length, dtype=torch.long))
    order = torch.rand(1, length, TOPK, generator=generator)  # any earlier keys; where there are few, some twice
    return attention, index, seen_if_chosen((order * torch.arange(1, length + 1)[:, None]).long())


def resident(key: str) -> int:
    """VmRSS or VmHWM of this process, bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def one(kind: str, stage: str, length: int) -> dict[str, float]:
    """In a process of its own: MiB above what was there before, seconds."""
    function = LOSSES[kind]
    warm = problem(64, stage)
    function(*warm).backward()  # code and thread pools are no part of it
    attention, index, visible = problem(length, stage)
    before, started = resident("VmRSS"), time.monotonic()
    function(attention, index, visible).backward()
    return {"mib": (resident("VmHWM") - before) / 2**20, "seconds": time.monotonic() - started}


def difference(length: int, stage: str) -> float:
    """Largest relative difference of loss and gradients between the two."""
    results = []
    for function in LOSSES.values():
        attention, index, visible = problem(length, stage)
        loss = function(attention, index, visible)
        results.append((loss.detach(), *torch.autograd.grad(loss, index)))
    return max(float((a - b).norm() / a.norm()) for a, b in zip(*results, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(options.one[0], options.one[1], int(options.one[2]))))
        return 0

    rows = []
    for stage in ("dense", "sparse"):
        shortest = options.lengths[0]
        print(f"{stage}: largest relative difference of loss and gradients at {shortest}: "
              f"{difference(shortest, stage):.1e}")  # fmt: skip
    print(f"\n{'stage':7} {'context':>8} {'plain':>12} {'tiled':>12} {'plain':>9} {'tiled':>9}")
    for stage in ("dense", "sparse"):
        for length in options.lengths:
            row = {"stage": stage, "length": length}
            needed = 4 * length**2 * (3 * INDEX_HEADS + 2 * HEADS) / 2**30
            for kind in LOSSES:
                if kind == "plain" and needed > LIMIT_GIB:
                    continue
                command = [sys.executable, __file__, "--one", kind, stage, str(length)]
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                row[kind] = json.loads(done.stdout)
            rows.append(row)
            cells = [f"{row[kind]['mib']:8.0f} MiB" if kind in row else f"{'-':>12}" for kind in LOSSES]
            cells += [f"{row[kind]['seconds']:7.2f} s" if kind in row else f"{'-':>9}" for kind in LOSSES]
            print(f"{stage:7} {length:8} {' '.join(cells)}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
