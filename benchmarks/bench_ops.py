"""Speed of the fused ops on this CPU at GLM-5's head shapes: compiled against plain torch, and against the hardware.

    python benchmarks/bench_ops.py [--context 16384 65536] [--prefill 2048] [--rounds 5] [--csv FILE]

Every compiled result is checked against the reference before it is timed. Per op and shape, medians of interleaved
rounds: the reference and the compiled version with one thread, and the compiled version with all. Every timed call
begins with cold caches, as a layer of a model does. `ratio` is reference / compiled with one thread each, `scaling`
compiled with one thread / with all, `roofline` the share of what this machine could do with one thread: bytes over the
rate at which it reads, or operations over torch's best rate for such products at any shape, whichever takes longer.
Baselines are plain torch in fp32 with weights converted before; of packed experts the compiled version on one byte per
code.

`--features` measures the code of an older CPU. oneDNN keeps the newest instructions, because with fewer of them its
int8 products are inexact: so with AVX2 the rates of the roofline are those of fp32 products, which MKL makes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from tools.ops_cases import (
    FLOATS,
    HIDDEN,
    INTEGERS,
    Q_LORA,
    RANK,
    ROPE,
    Case,
    attention,
    experts,
    indexer,
    kda,
    packed_experts,
    preprocess,
    product,
    residual_streams,
    write_csv,
)

#: How the kernels and torch are told to do without newer instructions.
RESTRICTED = {
    "avx512": {
        "GLM5_KERNELS_ISA": "avx512vnni", "ATEN_CPU_CAPABILITY": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI",
        "MKL_ENABLE_INSTRUCTIONS": "AVX512",
    },
    "avx2": {"GLM5_KERNELS_ISA": "avx2", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
}  # fmt: skip


Shape = tuple[int, int, int]
KINDS = {"fp32 or bf16": FLOATS, "int8": INTEGERS}


def seconds(function: Callable[[], Any]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


class Machine:
    """What one thread of this machine can do, at best of several tries.

    Attributes:
        read: bytes per second, from memory.
    """

    def __init__(self, restricted: bool) -> None:
        self._restricted = restricted
        self._memory = torch.ones(2**26)  # 256 MiB: more than the caches hold
        self.read = 4 * self._memory.numel() / min(seconds(self.empty_the_caches) for _ in range(5))

    def empty_the_caches(self) -> None:
        self._memory.sum()

    def operations(self, dtypes: tuple[torch.dtype, ...]) -> float:
        """Operations per second of torch's best product of such operands: in one of these types, or as fp32."""
        usable = {torch.float32} if self._restricted else {torch.float32, *dtypes}
        return max(product_rate(dtype) for dtype in usable)


#: Products (m, k, n) as the ops make them, and one that suits every library; the smallest first.
SHAPES: tuple[Shape, ...] = (
    (64, 576, 2048),
    (512, 128, 4096),
    (1024, 1024, 1024),
    (256, 6144, 2624),
    (2048, 2048, 4096),
)
#: A type whose smallest product is slower than fp32's by this is a scalar loop: larger ones would take minutes.
HOPELESS = 4


def product_rate(dtype: torch.dtype) -> float:
    """Operations per second of torch's fastest product of this type."""
    smallest = _product_rate(SHAPES[0], dtype)
    if HOPELESS * smallest < _product_rate(SHAPES[0], torch.float32):
        return smallest
    return max(_product_rate(shape, dtype) for shape in SHAPES)


@cache
def _product_rate(shape: Shape, dtype: torch.dtype) -> float:
    m, k, n = shape
    if dtype == torch.int8:
        a, b = (torch.randint(-9, 9, size, dtype=dtype) for size in ((m, k), (n, k)))
        multiply = lambda: torch._int_mm(a, b.t())  # noqa: E731
    else:
        x, y = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype)
        multiply = lambda: x @ y  # noqa: E731
    multiply()
    best: float = min(seconds(multiply) for _ in range(5))
    return 2.0 * m * k * n / best


def measure(case: Case, rounds: int, threads: int, machine: Machine) -> dict[str, Any]:
    def cold(function: Callable[[], Any]) -> float:
        machine.empty_the_caches()
        return seconds(function)

    torch.set_num_threads(threads)
    error = case.check()
    times: dict[str, list[float]] = {"plain": [], "fast": [], "all": []}
    for _ in range(rounds):
        times["all"].append(cold(case.fast))
    torch.set_num_threads(1)
    time.sleep(0.5)  # torch's other threads wait actively for a while
    for _ in range(rounds):
        times["fast"].append(cold(case.fast))
        times["plain"].append(cold(case.plain))
    spent = sum(count / machine.operations(dtypes) for count, dtypes in case.operations)
    floor = max(spent, case.bytes / machine.read)
    fast, plain, together = (statistics.median(times[name]) for name in ("fast", "plain", "all"))
    return {
        "op": case.op, "shape": case.shape, "baseline_ms": round(plain * 1e3, 2), "compiled_ms": round(fast * 1e3, 2),
        "ratio": round(plain / fast, 2), "scaling": round(fast / together, 2), "roofline": round(floor / fast, 2),
        "error": f"{error:.1e}", "ok": error <= case.limit,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--context", type=int, nargs="+", default=[16384])
    parser.add_argument("--prefill", type=int, default=2048, help="query tokens of the prefill cases")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="all threads")
    parser.add_argument("--only", default="", help="only cases whose op contains this")
    parser.add_argument(
        "--features", choices=[*RESTRICTED, "native"], default="native", help="CPU features to compile for"
    )
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    restricted = RESTRICTED.get(args.features, {})
    if any(os.environ.get(name) != value for name, value in restricted.items()):  # libraries read them at import
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | restricted)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    machine = Machine(restricted=args.features == "avx2")
    rates = " ".join(f"{name} {machine.operations(dtypes) / 1e9:.0f}" for name, dtypes in KINDS.items())
    print(f"features {args.features}; one thread reads {machine.read / 1e9:.1f} GB/s; best products, Gop/s: {rates}")
    print(f"medians of {args.rounds}; all = {args.threads} threads")
    shapes = ((8, 1), (1, args.prefill))  # requests, and query tokens of each
    attending: Any = (("lightning_indexer", indexer), ("sparse_flash_attention", attention))
    makers: list[tuple[str, Callable[[], Case]]] = [
        *(("mla_preprocess", partial(preprocess, tokens)) for tokens in (8, args.prefill)),
        *((op, partial(make, *shape, n)) for n in args.context for shape in shapes for op, make in attending),
        *(("kda", partial(kda, *shape)) for shape in ((1, 1), *shapes)),
        *(("mhc", partial(residual_streams, tokens)) for tokens in (1, 8, 512)),
        ("w4a8_moe", partial(experts, 8)),
        *(("w4a8_moe", partial(packed_experts, tokens)) for tokens in (1, 8, 64, 512)),
        *(("int8_linear", partial(product, tokens, Q_LORA + RANK + ROPE, HIDDEN)) for tokens in (8, 256)),
    ]
    rows = []
    for _, make in [pair for pair in makers if args.only in pair[0]]:
        rows.append(measure(make(), args.rounds, args.threads, machine))
        row = rows[-1]
        print(
            "  ".join(f"{key} {value}" for key, value in row.items() if key != "ok") + ("" if row["ok"] else "  WRONG")
        )
    if args.csv:
        write_csv(args.csv, rows)
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
