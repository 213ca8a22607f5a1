"""Speed of the fused ops on this CPU at GLM-5's head shapes: compiled against plain torch, and against the hardware.

    python benchmarks/bench_ops.py [--context 16384 65536] [--prefill 2048] [--rounds 5] [--csv FILE] [--plot FILE]

Every compiled result is checked against the reference before it is timed. Per op and shape, medians of interleaved
rounds: the reference and the compiled version with one thread, and the compiled version with all. `ratio` is
reference / compiled with one thread each, `scaling` compiled with one thread / with all, `roofline` the share of what
this machine could do with one thread: bytes over the rate of a copy, or operations over the best rate of torch for a
product of that shape, whichever takes longer. Baselines are fp32 with weights converted before; the experts' is bf16,
that of `int8_linear` plain torch around `torch._int_mm`. `--features` measures the ways of a lesser processor;
NUMBA_CACHE_DIR should name a folder of its own then. oneDNN, which makes the baselines' products, keeps the newest
instructions: with fewer of them its int8 products are inexact. --plot needs matplotlib.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from glm5_kernels import registry
from glm5_kernels.compiled.processor import restricted_to
from glm5_kernels.ops import PER_TOKEN, LinearWeights, PagedBatch

HEADS, RANK, ROPE, NOPE, HIDDEN, Q_LORA = 64, 512, 64, 192, 6144, 2048
INDEX_HEADS, INDEX_DIM, TOPK, BLOCK = 32, 128, 2048, 128
EXPERTS, PER_EXPERT = 24, 2048
Shape = tuple[int, int, int]
#: How numba and torch are told to do without newer instructions.
RESTRICTED = {
    "avx512": restricted_to("skylake-avx512") | {"ATEN_CPU_CAPABILITY": "avx512"},
    "avx2": restricted_to("haswell") | {"ATEN_CPU_CAPABILITY": "avx2"},
}


@dataclass
class Case:
    """One op at one shape.

    Attributes:
        fast, plain: what is timed: the compiled op, and the baseline.
        check: difference of the compiled result from the reference's, not above `limit`.
        operations: by the kind of product they could be done with, at the shape (m, k, n) of such a product.
    """

    op: str
    shape: str
    fast: Callable[[], Any]
    plain: Callable[[], Any]
    check: Callable[[], float]
    limit: float
    bytes: float
    operations: list[tuple[float, Shape, tuple[torch.dtype, ...]]]


def batch(requests: int, tokens: int, context: int) -> PagedBatch:
    """Equal requests in shuffled blocks."""
    blocks = torch.randperm(requests * context // BLOCK).view(requests, -1).int()
    return PagedBatch(torch.arange(requests + 1).int() * tokens, torch.full((requests,), context).int(), blocks)


def missed(got: torch.Tensor, want: torch.Tensor) -> float:
    """Share of the reference's choice that is not in `got`."""
    lost = sum(len(set(a) - set(b)) for a, b in zip(want.tolist(), got.tolist(), strict=True))
    return lost / max(int((want >= 0).sum()), 1)


def relative(got: Any, want: Any) -> float:
    """Relative error of the first output."""
    a, b = (x[0].float() if isinstance(x, tuple) else x.float() for x in (got, want))
    return float((a - b).norm() / b.norm())


def both(op: str, arguments: tuple[Any, ...]) -> tuple[Callable[[], Any], Callable[[], Any]]:
    fast, plain = (registry.load(op, name) for name in ("cpu", "reference"))
    return lambda: fast(*arguments), lambda: plain(*arguments)


def indexer(requests: int, tokens: int, context: int) -> Case:
    cache = torch.randn(requests * context // BLOCK, BLOCK, INDEX_DIM).bfloat16()
    q = torch.randn(requests * tokens, INDEX_HEADS, INDEX_DIM).bfloat16()
    w = torch.randn(requests * tokens, INDEX_HEADS).bfloat16()
    fast, plain = both("lightning_indexer", (q, cache, w, batch(requests, tokens, context), TOPK))
    pairs = requests * tokens * (context - (tokens - 1) / 2)
    work = 2.0 * pairs * INDEX_HEADS * INDEX_DIM, (INDEX_HEADS * min(tokens, 16), INDEX_DIM, 4096), FLOATS
    shape = f"B={requests} n={tokens} ctx={context}"
    check = lambda: missed(fast(), plain())  # noqa: E731
    return Case("lightning_indexer", shape, fast, plain, check, 1e-3, 2.0 * requests * context * INDEX_DIM, [work])


def attention(requests: int, tokens: int, context: int) -> Case:
    cache = torch.randn(requests * context // BLOCK, BLOCK, RANK + ROPE).bfloat16()
    count = requests * tokens
    nope, rope = (torch.randn(count, HEADS, RANK) * 0.2).bfloat16(), (torch.randn(count, HEADS, ROPE) * 0.2).bfloat16()
    chosen = torch.stack([torch.randperm(context - tokens)[:TOPK] for _ in range(count)]).int()
    where = chosen, batch(requests, tokens, context), HEADS**-0.5 / 2, True  # probabilities rounded, as an NPU does
    fast, plain = both("sparse_flash_attention", (nope, rope, cache[..., :RANK], cache[..., RANK:], *where))
    keys = count * min(TOPK, context - tokens)
    scores = 2.0 * keys * HEADS * (RANK + ROPE), (HEADS, RANK + ROPE, TOPK), FLOATS
    values = 2.0 * keys * HEADS * RANK, (HEADS, TOPK, RANK), FLOATS
    shape = f"B={requests} n={tokens} ctx={context}"
    check = lambda: relative(fast(), plain())  # noqa: E731
    bytes_read = 2.0 * keys * (RANK + ROPE)
    return Case("sparse_flash_attention", shape, fast, plain, check, 1e-2, bytes_read, [scores, values])


def linear(n: int, k: int) -> LinearWeights:
    return LinearWeights(torch.randint(-127, 128, (n, k), dtype=torch.int8), PER_TOKEN, torch.rand(n) * 1e-3)


def preprocess(tokens: int) -> Case:
    """As GLM-5 runs it: int8 weights but for W_UK, which is bf16 like activations and caches."""
    qkv_a, q_b = linear(Q_LORA + RANK + ROPE, HIDDEN), linear(HEADS * (NOPE + ROPE), Q_LORA)
    slots, pairs = -(-tokens // BLOCK), ROPE // 2
    x, angles = torch.randn(tokens, HIDDEN).bfloat16(), (torch.randn(tokens, pairs), torch.randn(tokens, pairs))
    w_uk_t, gammas = (torch.randn(HEADS, NOPE, RANK) * 0.05).bfloat16(), (torch.ones(Q_LORA), torch.ones(RANK))
    caches = torch.zeros(slots, BLOCK, RANK).bfloat16(), torch.zeros(slots, BLOCK, ROPE).bfloat16()
    where = torch.arange(tokens)
    floats = [LinearWeights(w.weight.float() * w.scale[:, None]) for w in (qkv_a, q_b) if w.scale is not None]
    fast, exact = both("mla_preprocess", (x, *angles, qkv_a, q_b, w_uk_t, *gammas, where, *caches, 1e-5))
    widened = x.float(), *angles, *floats, w_uk_t.float(), *gammas, where, *(cache.float() for cache in caches), 1e-5
    plain = lambda: registry.load("mla_preprocess", "reference")(*widened)  # noqa: E731
    absorbed = 2.0 * tokens * HEADS * NOPE * RANK
    products = [(2.0 * tokens * w.weight.numel(), (tokens, *w.weight.shape[::-1]), INTEGERS) for w in (qkv_a, q_b)]
    check = lambda: relative(fast(), exact())  # noqa: E731
    bytes_read = sum(w.weight.numel() for w in (qkv_a, q_b)) + 2.0 * HEADS * NOPE * RANK
    work = [*products, (absorbed, (tokens, NOPE, RANK), FLOATS)]
    return Case("mla_preprocess", f"W8A8_DYNAMIC T={tokens}", fast, plain, check, 1e-2, bytes_read, work)


def experts(tokens: int) -> Case:
    """8 of 24 experts of GLM-5's size per token, against the same experts in bf16."""
    chosen = torch.stack([torch.randperm(EXPERTS)[:8] for _ in range(tokens)])
    x, weights = torch.randn(tokens, HIDDEN), torch.rand(tokens, 8)
    w13 = torch.randint(-8, 8, (EXPERTS, 2 * PER_EXPERT, HIDDEN), dtype=torch.int8)
    w2 = torch.randint(-8, 8, (EXPERTS, HIDDEN, PER_EXPERT), dtype=torch.int8)
    scales = torch.rand(EXPERTS, 2 * PER_EXPERT) * 1e-2, torch.rand(EXPERTS, HIDDEN) * 1e-2
    fast, exact = both("w4a8_moe", (x, weights, chosen, w13, scales[0], w2, scales[1]))
    used = sorted(set(chosen.flatten().tolist()))
    wide = {e: (w13[e] * scales[0][e, :, None]).bfloat16() for e in used}
    narrow = {e: (w2[e] * scales[1][e, :, None]).bfloat16() for e in used}
    routed = {e: torch.where(chosen == e) for e in used}

    def plain() -> torch.Tensor:
        out = torch.zeros(tokens, HIDDEN)
        for e in used:
            token, slot = routed[e]
            gate, up = F.linear(x[token].bfloat16(), wide[e]).chunk(2, -1)
            y = F.linear(F.silu(gate) * up, narrow[e])
            out.index_add_(0, token, y.float() * weights[token, slot, None])
        return out

    check = lambda: relative(fast(), exact())  # noqa: E731
    size = 3.0 * PER_EXPERT * HIDDEN
    rows = max(1, round(8 * tokens / len(used)))
    work = [(2 * size * 8 * tokens, (rows, HIDDEN, 2 * PER_EXPERT), INTEGERS)]
    return Case("w4a8_moe", f"{tokens} tokens", fast, plain, check, 1e-5, size * len(used), work)


def product(tokens: int, n: int, k: int) -> Case:
    fast, plain = both("int8_linear", (torch.randn(tokens, k).bfloat16(), linear(n, k)))
    check = lambda: float(not torch.equal(fast(), plain()))  # noqa: E731
    work = [(2.0 * tokens * n * k, (tokens, k, n), INTEGERS)]
    return Case("int8_linear", f"{tokens}x{n}x{k}", fast, plain, check, 0.0, float(n * k), work)


FLOATS, INTEGERS = (torch.float32, torch.bfloat16), (torch.int8,)


def seconds(function: Callable[[], Any]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def copy_rate() -> float:
    """Bytes read and written per second by a copy of 256 MiB."""
    a = torch.ones(2**26)
    b = torch.empty_like(a)
    b.copy_(a)
    return 2 * 4 * a.numel() / min(seconds(lambda: b.copy_(a)) for _ in range(5))


def product_rate(shape: Shape, dtypes: tuple[torch.dtype, ...]) -> float:
    """Operations per second of torch's best product [m, k] x [k, n] with operands of one of these types."""
    m, k, n = shape
    best = 0.0
    for dtype in dtypes:
        if dtype == torch.int8:
            a, b = (torch.randint(-9, 9, size, dtype=dtype) for size in ((m, k), (n, k)))
            multiply = lambda a=a, b=b: torch._int_mm(a, b.t())  # noqa: E731
        else:
            x, y = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype)
            multiply = lambda x=x, y=y: x @ y  # noqa: E731
        multiply()
        best = max(best, 2.0 * m * k * n / min(seconds(multiply) for _ in range(5)))
    return best


def measure(case: Case, rounds: int, threads: int, copied: float) -> dict[str, Any]:
    torch.set_num_threads(threads)
    error = case.check()
    times: dict[str, list[float]] = {"plain": [], "fast": [], "all": []}
    for _ in range(rounds):
        times["all"].append(seconds(case.fast))
    torch.set_num_threads(1)
    time.sleep(0.5)  # torch's other threads wait actively for a while
    for _ in range(rounds):
        times["fast"].append(seconds(case.fast))
        times["plain"].append(seconds(case.plain))
    spent = sum(count / product_rate(shape, dtypes) for count, shape, dtypes in case.operations)
    floor = max(spent, case.bytes / copied)
    fast, plain, together = (statistics.median(times[name]) for name in ("fast", "plain", "all"))
    return {
        "op": case.op, "shape": case.shape, "baseline_ms": round(plain * 1e3, 2), "compiled_ms": round(fast * 1e3, 2),
        "ratio": round(plain / fast, 2), "scaling": round(fast / together, 2), "roofline": round(floor / fast, 2),
        "error": f"{error:.1e}", "ok": error <= case.limit,
    }  # fmt: skip


def plot(rows: list[dict[str, Any]], out: Path, title: str) -> None:
    """A bar per op and shape: how many times faster than its baseline."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 0.4 * len(rows) + 1.2), layout="constrained")
    names = [f"{row['op']}  {row['shape']}" for row in rows]
    bars = axes.barh(names, [row["ratio"] for row in rows], color="#3b6ea5")
    axes.bar_label(bars, [f"{row['ratio']} x, {row['roofline']:.0%} of the roofline" for row in rows], padding=4)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set(xlabel="baseline / compiled, one thread each", title=title)
    axes.set_xlim(0, 1.6 * max(row["ratio"] for row in rows))
    axes.invert_yaxis()
    figure.savefig(out)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--context", type=int, nargs="+", default=[16384])
    parser.add_argument("--prefill", type=int, default=2048, help="query tokens of the prefill cases")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="all threads")
    parser.add_argument("--only", default="", help="only cases whose op contains this")
    parser.add_argument("--features", choices=[*RESTRICTED, "native"], default="native", help="of a lesser processor")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    wanted = RESTRICTED.get(args.features, {})
    if any(os.environ.get(name) != value for name, value in wanted.items()):  # libraries read them when they are loaded
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | wanted)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    copied = copy_rate()
    print(f"features {args.features}; copy with one thread {copied / 1e9:.1f} GB/s")
    print(f"medians of {args.rounds}; all = {args.threads} threads")
    makers: list[tuple[str, Callable[[], Case]]] = []
    for tokens in (8, args.prefill):
        makers += [("mla_preprocess", lambda t=tokens: preprocess(t))]  # type: ignore[misc]
    for context in args.context:
        for requests, tokens in ((8, 1), (1, args.prefill)):
            makers += [
                ("lightning_indexer", lambda r=requests, t=tokens, c=context: indexer(r, t, c)),  # type: ignore[misc]
                ("sparse_flash_attention", lambda r=requests, t=tokens, c=context: attention(r, t, c)),  # type: ignore[misc]
            ]
    makers += [("w4a8_moe", lambda: experts(8))]
    for tokens in (8, 256):
        makers += [("int8_linear", lambda t=tokens: product(t, Q_LORA + RANK + ROPE, HIDDEN))]  # type: ignore[misc]
    rows = []
    for _, make in [pair for pair in makers if args.only in pair[0]]:
        rows.append(measure(make(), args.rounds, args.threads, copied))
        row = rows[-1]
        print(
            "  ".join(f"{key} {value}" for key, value in row.items() if key != "ok") + ("" if row["ok"] else "  WRONG")
        )
    if args.csv:
        with args.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    if args.plot:
        plot(rows, args.plot, "GLM-5's fused ops on this CPU: compiled against plain torch")
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
