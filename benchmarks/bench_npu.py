"""Time of the fused ops on an NPU beside the least that one die needs, at GLM-5's shapes.

    python benchmarks/bench_npu.py --device npu [--kernels triton npu] [--only attention] [--rounds 20] [--csv FILE]

Every result is checked against the reference on the CPU before it is timed, which takes a minute for long prompts.
Times are medians of calls that wait for the device. `at least` is that of one die of a 910C on paper, by the planner's
rates: bytes over memory rate, or operations over the cube's. On a CPU the script can be tried. Exit code 1 if a result
is wrong, 3 without the device or a kernel that runs on it.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tools.ops_cases import (
    HEADS,
    HIDDEN,
    INDEX_DIM,
    INDEX_HEADS,
    NOPE,
    Q_LORA,
    RANK,
    ROPE,
    TOPK,
    attention_operands,
    indexer_operands,
    missed,
    preprocess_operands,
    relative,
    write_csv,
)

from glm5_ascend.cli.usage import report
from glm5_ascend.errors import Glm5Error, MissingEnvironmentError
from glm5_ascend.model.device import find_device
from glm5_ascend.plan.hardware import load_hardware
from glm5_kernels import ops, registry
from glm5_kernels.parity.run import copied

#: A selection may differ where scores differ by rounding only; outputs by the rounding of bf16.
LIMITS = {"lightning_indexer": 2e-3, "sparse_flash_attention": 1e-2, "mla_preprocess": 1e-2}
CONTEXT = 16384  # of attention, which reads 2048 rows whatever the context is


#: Of one die, per second.
RATES = load_hardware("a3").rates
PEAK = {"bf16": RATES.bf16, "int8": RATES.int8}

PACKED_ROW = RANK + 2 * ROPE + 4 * RANK // 128


@dataclass(frozen=True)
class Work:
    """Bytes that one call moves, and its operations (two per multiply-add) by type."""

    op: str
    shape: str
    tokens: int
    context: int
    moved: float
    operations: dict[str, float]

    @property
    def least(self) -> float:
        """Seconds of one die: bytes over the rate of memory, or operations over that of the cube."""
        cube = sum(count / PEAK[dtype] for dtype, count in self.operations.items())
        return max(self.moved / RATES.memory, cube)


def indexer(tokens: int, requests: int, context: int, int8: bool) -> Work:
    """Keys once per request, scores of every pair; queries and selection are small."""
    row = INDEX_DIM + 2 if int8 else 2 * INDEX_DIM
    moved = requests * context * row + tokens * (INDEX_HEADS * INDEX_DIM * (1 if int8 else 2) + 4 * TOPK)
    operations = {"int8" if int8 else "bf16": 2.0 * tokens * context * INDEX_HEADS * INDEX_DIM}
    return Work(
        "lightning_indexer" + "_quant" * int8, f"T={tokens}, {context // 1024}k", tokens, context, moved, operations
    )


def attention(tokens: int, int8: bool) -> Work:
    """TOPK rows per token (no reuse between tokens), queries and outputs."""
    row = PACKED_ROW if int8 else 2 * (RANK + ROPE)
    moved = tokens * (TOPK * (row + 4) + 2 * HEADS * (RANK + ROPE + RANK))
    return Work(
        "sparse_flash_attention" + "_quant" * int8, f"T={tokens}, K={TOPK}", tokens, 0, moved,
        {"bf16": 2.0 * tokens * HEADS * TOPK * (2 * RANK + ROPE)},
    )  # fmt: skip


def preprocess(tokens: int) -> Work:
    """W8A8: both int8 matrices and the bf16 W_UK once, activations in and out."""
    first, second = (Q_LORA + RANK + ROPE) * HIDDEN, HEADS * (NOPE + ROPE) * Q_LORA
    absorbed = HEADS * NOPE * RANK
    activations = 2 * (HIDDEN + HEADS * (NOPE + ROPE) + HEADS * (RANK + ROPE) + Q_LORA + RANK + ROPE)
    return Work(
        "mla_preprocess", f"T={tokens}", tokens, 0, first + second + 2 * absorbed + tokens * activations,
        {"int8": 2.0 * tokens * (first + second), "bf16": 2.0 * tokens * absorbed},
    )  # fmt: skip


def works() -> Iterator[Work]:
    for context, int8 in itertools.product((16384, 65536), (False, True)):
        yield indexer(8, 8, context, int8)
    for context in (16384, 65536):
        yield indexer(2048, 1, context, False)
    for tokens, int8 in itertools.product((8, 2048), (False, True)):
        yield attention(tokens, int8)
    for tokens in (8, 2048):
        yield preprocess(tokens)


def operands(work: Work) -> tuple[Any, ...]:
    """Operands of one call: eight requests of one token, or one request of many tokens."""
    requests, tokens = (8, 1) if work.tokens == 8 else (1, work.tokens)
    if work.op == "mla_preprocess":
        return preprocess_operands(work.tokens)
    if work.op.startswith("lightning_indexer"):
        q, cache, weights, batch, topk = indexer_operands(requests, tokens, work.context)
        if work.op == "lightning_indexer":
            return q, cache, weights, batch, topk
        (q, q_scale), (cache, k_scale) = ops.quantize_indexer(q), ops.quantize_indexer(cache)
        return q, cache, weights, q_scale, k_scale, batch, topk
    nope, rope, ckv, kpe, *where = attention_operands(requests, tokens, CONTEXT)
    cache = (ckv, kpe) if work.op == "sparse_flash_attention" else (ops.pack_latents(ckv, kpe),)
    return nope, rope, *cache, *where


def runnable(op: str, device: torch.device, kernels: list[str]) -> list[str]:
    names = [name for name in registry.OPS[op] if name != "reference" and name in (kernels or registry.IMPLEMENTATIONS)]
    return [name for name in names if registry.obstacle(op, name, device.type) is None]


def measured(work: Work, device: torch.device, names: list[str], rounds: int) -> Iterator[dict[str, Any]]:
    torch.manual_seed(0)
    arguments = operands(work)
    for name in names:
        here, function = [copied(operand, str(device)) for operand in arguments], registry.load(work.op, name)
        error = difference(work, function(*here), arguments)
        times = [seconds(function, here, device) for _ in range(rounds + 1)][1:]
        yield {
            "op": work.op, "shape": work.shape, "kernel": name, "measured_us": round(statistics.median(times) * 1e6, 1),
            "at_least_us": round(work.least * 1e6, 1), "times": round(statistics.median(times) / work.least, 2),
            "error": f"{error:.1e}", "ok": error <= LIMITS[work.op.removesuffix("_quant")],
        }  # fmt: skip


def difference(work: Work, output: Any, arguments: tuple[Any, ...]) -> float:
    """Difference to the reference on the CPU."""
    output = output[0] if isinstance(output, tuple) else output
    expected = registry.load(work.op, "reference")(*arguments)
    expected = expected[0] if isinstance(expected, tuple) else expected
    return (
        missed(output.cpu(), expected) if work.op.startswith("lightning_indexer") else relative(output.cpu(), expected)
    )


def seconds(function: Callable[..., Any], arguments: list[Any], device: torch.device) -> float:
    wait = torch.accelerator.synchronize if device.type != "cpu" else lambda: None
    wait()
    began = time.perf_counter()
    function(*arguments)
    wait()
    return time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="npu", help="npu, npu:N, or cpu to try the script")
    parser.add_argument("--kernels", nargs="+", choices=registry.IMPLEMENTATIONS[1:], default=[])
    parser.add_argument("--only", default="", help="rows whose op and shape contain this, as 'attention T=8'")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--csv", type=Path)
    args = parser.parse_args()
    try:
        device = find_device(args.device)
        selected = [work for work in works() if all(word in f"{work.op} {work.shape}" for word in args.only.split())]
        runs = [(work, runnable(work.op, device, args.kernels)) for work in selected]
        if not any(names for _, names in runs):
            raise MissingEnvironmentError(f"no such kernel runs on {device}", "glm5-ascend doctor says what is missing")
    except Glm5Error as error:
        return report(error.message, error.tip, error.exit_code, [])
    rows: list[dict[str, Any]] = []
    print("| op | shape | kernel | measured | at least | times | error |\n|---|---|---|---|---|---|---|")
    for work, names in runs:
        for row in measured(work, device, names, args.rounds):
            rows.append(row)
            print(
                f"| `{row['op']}` | {row['shape']} | {row['kernel']} | {row['measured_us']} us | "
                f"{row['at_least_us']} us | {row['times']} | {row['error']}{'' if row['ok'] else ' WRONG'} |",
                flush=True,
            )
    if args.csv:
        write_csv(args.csv, rows)
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
