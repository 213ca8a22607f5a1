"""Time of the fused ops on an NPU beside the least that one die needs, at GLM-5's shapes.

    python benchmarks/bench_npu.py --device npu [--kernels triton npu] [--only attention] [--rounds 20] [--csv FILE]

Every result is checked against the reference on the CPU before it is timed, which takes a minute for long prompts.
Times are medians of calls that wait for the device. `at least` is that of one die of a 910C on paper, by the planner's
rates: bytes over memory rate, or operations over the cube's. On a CPU the script can be tried. Exit code 1 if a result
is wrong, 3 without the device or a kernel that runs on it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tools.ops_cases import INDEX_DIM, INTEGERS, RANK, ROPE, Case, attention, indexer, preprocess, write_csv

from glm5_ascend.cli.usage import report
from glm5_ascend.errors import Glm5Error, MissingEnvironmentError
from glm5_ascend.model.device import find_device
from glm5_ascend.plan.hardware import load_hardware
from glm5_kernels import ops, registry
from glm5_kernels.parity.run import copied

#: A selection may differ where scores differ by rounding only; outputs by the rounding of bf16.
LIMITS = {"lightning_indexer": 2e-3, "sparse_flash_attention": 1e-2, "mla_preprocess": 1e-2}
#: Of one die, per second.
RATES = load_hardware("a3").rates
CONTEXT = 16384  # of attention, which reads 2048 rows whatever the context is
PACKED_ROW = RANK + 2 * ROPE + 4 * RANK // 128


def int8_keys(case: Case) -> Case:
    """The case of the indexer with queries and keys in INT8."""
    (count, _), (q, cache, weights, batch, topk) = case.operations[0], case.operands
    (q, q_scale), (cache, k_scale) = ops.quantize_indexer(q), ops.quantize_indexer(cache)
    operands = q, cache, weights, q_scale, k_scale, batch, topk
    moved = case.bytes * (INDEX_DIM + 2) / (2 * INDEX_DIM)
    return Case(f"{case.op}_quant", case.shape, operands, case.difference, case.limit, moved, [(count, INTEGERS)])


def packed_rows(case: Case) -> Case:
    """The case of attention with packed rows."""
    nope, rope, ckv, kpe, *where = case.operands
    operands = nope, rope, ops.pack_latents(ckv, kpe), *where
    moved = case.bytes * PACKED_ROW / (2 * (RANK + ROPE))
    return Case(f"{case.op}_quant", case.shape, operands, case.difference, case.limit, moved, case.operations)


class Row(NamedTuple):
    """An op at a shape: eight requests of one token, or one request of 2048 tokens."""

    op: str
    shape: str
    make: Callable[[], Case]


ROWS = (
    *(Row("lightning_indexer", f"T=8, {n // 1024}k", partial(indexer, 8, 1, n)) for n in (16384, 65536)),
    *(
        Row("lightning_indexer_quant", f"T=8, {n // 1024}k", lambda n=n: int8_keys(indexer(8, 1, n)))  # type: ignore[misc]
        for n in (16384, 65536)
    ),
    *(Row("lightning_indexer", f"T=2048, {n // 1024}k", partial(indexer, 1, 2048, n)) for n in (16384, 65536)),
    Row("sparse_flash_attention", "T=8, K=2048", partial(attention, 8, 1, CONTEXT)),
    Row("sparse_flash_attention_quant", "T=8, K=2048", lambda: packed_rows(attention(8, 1, CONTEXT))),
    Row("sparse_flash_attention", "T=2048, K=2048", partial(attention, 1, 2048, CONTEXT)),
    Row("sparse_flash_attention_quant", "T=2048, K=2048", lambda: packed_rows(attention(1, 2048, CONTEXT))),
    *(Row("mla_preprocess", f"T={tokens}", partial(preprocess, tokens)) for tokens in (8, 2048)),
)


def least(case: Case) -> float:
    """Seconds of one die: bytes over the rate of memory, or operations over that of the cube."""
    cube = sum(count / (RATES.int8 if dtypes == INTEGERS else RATES.bf16) for count, dtypes in case.operations)
    return max(case.bytes / RATES.memory, cube)


def runnable(op: str, device: torch.device, kernels: list[str]) -> list[str]:
    names = [name for name in registry.OPS[op] if name != "reference" and name in (kernels or registry.IMPLEMENTATIONS)]
    return [name for name in names if registry.obstacle(op, name, device.type) is None]


def measured(row: Row, device: torch.device, names: list[str], rounds: int) -> Iterator[dict[str, Any]]:
    torch.manual_seed(0)
    case = row.make()
    expected = case.exact()
    for name in names:
        here, function = [copied(operand, str(device)) for operand in case.operands], registry.load(row.op, name)
        output = function(*here)
        output = output[0] if isinstance(output, tuple) else output
        error = case.difference(output.cpu(), expected)
        times = [seconds(function, here, device) for _ in range(rounds + 1)][1:]
        yield {
            "op": row.op, "shape": row.shape, "kernel": name, "measured_us": round(statistics.median(times) * 1e6, 1),
            "at_least_us": round(least(case) * 1e6, 1), "times": round(statistics.median(times) / least(case), 2),
            "error": f"{error:.1e}", "ok": error <= LIMITS[row.op.removesuffix("_quant")],
        }  # fmt: skip


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
        selected = [row for row in ROWS if all(word in f"{row.op} {row.shape}" for word in args.only.split())]
        runs = [(row, runnable(row.op, device, args.kernels)) for row in selected]
        if not any(names for _, names in runs):
            raise MissingEnvironmentError(f"no such kernel runs on {device}", "glm5-ascend doctor says what is missing")
    except Glm5Error as error:
        return report(error.message, error.tip, error.exit_code, [])
    results: list[dict[str, Any]] = []
    print("| op | shape | kernel | measured | at least | times | error |\n|---|---|---|---|---|---|---|")
    for row, names in runs:
        for result in measured(row, device, names, args.rounds):
            results.append(result)
            print(
                f"| `{row.op}` | {row.shape} | {result['kernel']} | {result['measured_us']} us "
                f"| {result['at_least_us']} us | {result['times']} "
                f"| {result['error']}{'' if result['ok'] else ' WRONG'} |",
                flush=True,
            )
    if args.csv:
        write_csv(args.csv, results)
    return 0 if all(result["ok"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
