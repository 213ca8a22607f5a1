"""What the fused ops would take at least on one die of a 910B or 910C, on paper: bytes over memory rate, or the cube.

    python benchmarks/report_npu_roofline.py

Nothing here was measured on an NPU. The hardware figures and their sources are those of the planner
(glm5_ascend/plan/data/hardware/a3.yaml).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from glm5_ascend.plan.hardware import load_hardware

#: Of one die, per second.
RATES = load_hardware("a3").rates
PEAK = {"bf16": RATES.bf16, "int8": RATES.int8}

HIDDEN, HEADS, RANK, ROPE, NOPE, Q_LORA = 6144, 64, 512, 64, 192, 2048
INDEX_HEADS, INDEX_DIM, TOPK = 32, 128, 2048
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
    def seconds(self) -> tuple[float, float]:
        """Lower limits of the time by memory and by cube."""
        cube = sum(count / PEAK[kind] for kind, count in self.operations.items())
        return self.moved / RATES.memory, cube


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


def main() -> None:
    print("| op | shape | by memory | by cube | at least | limited by |\n|---|---|---|---|---|---|")
    for work in works():
        memory, cube = (1e6 * value for value in work.seconds)
        limit = "memory" if memory >= cube else "cube"
        print(
            f"| `{work.op}` | {work.shape} | {memory:.0f} us | {cube:.0f} us | {max(memory, cube):.0f} us | {limit} |"
        )


if __name__ == "__main__":
    main()
