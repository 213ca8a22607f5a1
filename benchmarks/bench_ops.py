"""Speed of the fused ops on this CPU at GLM-5's head shapes: compiled against plain torch, and against the hardware.

    OMP_NUM_THREADS=1 python benchmarks/bench_ops.py [--threads 1] [--rounds 5] [--context 16384] [--csv FILE]

Every compiled result is checked against the reference before it is timed. Per op and shape: median times, interleaved,
their ratio, and the share of a roofline: bytes over the rate of a copy, or operations over the best rate of a fp32
product of the same shape, whichever takes longer.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from glm5_kernels import registry
from glm5_kernels.int8 import PER_TOKEN, LinearWeights

HEADS, RANK, ROPE, NOPE, HIDDEN, Q_LORA = 64, 512, 64, 192, 6144, 2048
INDEX_HEADS, INDEX_DIM, TOPK, BLOCK = 32, 128, 2048, 128
Check = Callable[[Any, Any], float]


@dataclass
class Case:
    """One op at one shape: its arguments, what it costs, and how two results are compared."""

    op: str
    shape: str
    arguments: tuple[Any, ...]
    operations: float
    bytes: float
    product: tuple[int, int, int]
    error: Check
    limit: float


def batch(requests: int, tokens: int, context: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """query_start_loc, seq_lens, block_table of equal requests in shuffled blocks."""
    blocks = torch.randperm(requests * context // BLOCK).view(requests, -1).int()
    return torch.arange(requests + 1).int() * tokens, torch.full((requests,), context).int(), blocks


def overlap(got: torch.Tensor, want: torch.Tensor) -> float:
    """Share of chosen positions that the reference did not choose."""
    missed = sum(len(set(a) - set(b)) for a, b in zip(got.tolist(), want.tolist(), strict=True))
    return missed / max(int((want >= 0).sum()), 1)


def relative(got: Any, want: Any) -> float:
    """Relative error of the first output."""
    a, b = got[0].float(), want[0].float()
    return float((a - b).norm() / b.norm())


def indexer(requests: int, tokens: int, context: int) -> Case:
    cache = torch.randn(requests * context // BLOCK, BLOCK, INDEX_DIM).bfloat16()
    q = torch.randn(requests * tokens, INDEX_HEADS, INDEX_DIM).bfloat16()
    w = torch.randn(requests * tokens, INDEX_HEADS).bfloat16()
    pairs, arguments = requests * tokens * context, (q, cache, w, *batch(requests, tokens, context), TOPK)
    return Case(
        "lightning_indexer", f"B={requests} n={tokens} ctx={context}", arguments,
        2.0 * pairs * INDEX_HEADS * INDEX_DIM, 2.0 * requests * context * INDEX_DIM,
        (INDEX_HEADS * min(tokens, 16), INDEX_DIM, 4096), overlap, 1e-3,
    )  # fmt: skip


def attention(requests: int, tokens: int, context: int) -> Case:
    cache = torch.randn(requests * context // BLOCK, BLOCK, RANK + ROPE).bfloat16()
    count = requests * tokens
    nope, rope = (torch.randn(count, HEADS, RANK) * 0.2).bfloat16(), (torch.randn(count, HEADS, ROPE) * 0.2).bfloat16()
    chosen = torch.stack([torch.randperm(context - tokens)[:TOPK] for _ in range(count)]).int()
    arguments = nope, rope, cache[..., :RANK], cache[..., RANK:], chosen, *batch(requests, tokens, context), 0.0625
    keys = count * min(TOPK, context - tokens)
    return Case(
        "sparse_flash_attention", f"B={requests} n={tokens} ctx={context}", arguments,
        2.0 * keys * HEADS * (2 * RANK + ROPE), 2.0 * keys * (RANK + ROPE), (HEADS, RANK + ROPE, TOPK), relative, 1e-2,
    )  # fmt: skip


def preprocess(tokens: int) -> Case:
    def linear(n: int, k: int) -> LinearWeights:
        return LinearWeights(torch.randint(-127, 128, (n, k), dtype=torch.int8), PER_TOKEN, torch.rand(n) * 1e-3)

    qkv_a, q_b = linear(Q_LORA + RANK + ROPE, HIDDEN), linear(HEADS * (NOPE + ROPE), Q_LORA)
    slots = -(-tokens // BLOCK)
    arguments = (
        torch.randn(tokens, HIDDEN), torch.randn(tokens, ROPE // 2), torch.randn(tokens, ROPE // 2), qkv_a, q_b,
        torch.randn(HEADS, NOPE, RANK) * 0.05, torch.ones(Q_LORA), torch.ones(RANK), torch.arange(tokens),
        torch.zeros(slots, BLOCK, RANK), torch.zeros(slots, BLOCK, ROPE), 1e-5,
    )  # fmt: skip
    weights = qkv_a.weight.numel() + q_b.weight.numel()
    absorbed = HEADS * NOPE * RANK
    return Case(
        "mla_preprocess", f"W8A8_DYNAMIC T={tokens}", arguments, 2.0 * tokens * (weights + absorbed),
        weights + 4.0 * absorbed, (tokens, Q_LORA, HEADS * (NOPE + ROPE)), relative, 1e-5,
    )  # fmt: skip


def fp32_preprocess(case: Case) -> tuple[Any, ...]:
    """The same op on weights dequantized beforehand: what a CPU without the int8 path would compute."""
    x, cos, sin, qkv_a, q_b, *rest = case.arguments
    floats = [LinearWeights(w.weight.float() * w.scale[:, None]) for w in (qkv_a, q_b)]
    return x, cos, sin, *floats, *rest


def seconds(function: Callable[..., Any], *arguments: Any) -> float:
    began = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - began


def copy_rate() -> float:
    """Bytes read and written per second by a copy of 256 MiB."""
    a = torch.ones(2**26)
    b = torch.empty_like(a)
    b.copy_(a)
    return 2 * 4 * a.numel() / min(seconds(b.copy_, a) for _ in range(5))


def product_rate(m: int, k: int, n: int) -> float:
    """Operations per second of a fp32 product [m, k] x [k, n]."""
    a, b = torch.randn(m, k), torch.randn(k, n)
    a @ b
    return 2.0 * m * k * n / min(seconds(torch.mm, a, b) for _ in range(5))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--context", type=int, nargs="+", default=[16384])
    parser.add_argument("--prefill", type=int, default=256, help="query tokens of the prefill cases")
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    copied, rows, failed = copy_rate(), [], 0
    print(f"{args.threads} threads, copy {copied / 1e9:.1f} GB/s; ratio = reference / cpu, median of {args.rounds}")
    makers: list[Callable[[], Case]] = [lambda: preprocess(8), lambda: preprocess(args.prefill)]
    for context in args.context:
        for requests, tokens in ((8, 1), (1, args.prefill)):
            makers += [
                lambda r=requests, t=tokens, c=context: indexer(r, t, c),  # type: ignore[misc]
                lambda r=requests, t=tokens, c=context: attention(r, t, c),  # type: ignore[misc]
            ]
    for make in makers:
        case = make()
        plain, fast = (registry.load(case.op, name) for name in ("reference", "cpu"))
        baseline = fp32_preprocess(case) if case.op == "mla_preprocess" else case.arguments
        error = case.error(fast(*case.arguments), plain(*case.arguments))
        failed += error > case.limit
        times: dict[str, list[float]] = {"reference": [], "cpu": []}
        for _ in range(args.rounds):
            times["cpu"].append(seconds(fast, *case.arguments))
            times["reference"].append(seconds(plain, *baseline))
        slow, quick = (statistics.median(times[name]) for name in ("reference", "cpu"))
        floor = max(case.operations / product_rate(*case.product), case.bytes / copied)
        row = {
            "op": case.op, "shape": case.shape, "reference_ms": round(slow * 1e3, 2), "cpu_ms": round(quick * 1e3, 2),
            "ratio": round(slow / quick, 2), "roofline_share": round(floor / quick, 2), "error": f"{error:.1e}",
        }  # fmt: skip
        rows.append(row)
        print("  ".join(f"{key} {value}" for key, value in row.items()) + ("  WRONG" if error > case.limit else ""))
    if args.csv:
        with args.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
