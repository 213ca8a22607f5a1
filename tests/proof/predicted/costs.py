"""The cycles of one instruction: how long it keeps its pipe, and how much later its result is there."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from tests.proof.executed.places import View
from tests.proof.executed.sorting import PROPOSAL
from tests.proof.executed.steps import Instruction
from tests.proof.executed.text import UncoveredError
from tests.proof.predicted.rates import VECTORS, Vector, rate

REPEAT = 256


@dataclass(frozen=True)
class Cost:
    """Cycles.

    Attributes:
        head: before it starts on a pipe that had nothing to do.
        busy: of the pipe.
        tail: from then until the result is there.
        least: of the pipe at the rates of Huawei's tables, without anything around it.
    """

    head: float
    busy: float
    tail: float
    least: float


@dataclass(frozen=True)
class Share:
    """What a core gets of the memory that all cores read: bytes per cycle from HBM and from L2."""

    hbm: float
    l2: float


def share(cores: int) -> Share:
    clock = rate("clock")
    return Share(rate("HBM") / clock / cores, rate("L2") / clock / cores)


def vector(name: str, step: Instruction) -> Cost:
    """A library call of the vector pipe; its loops over rows and its trees are counted, its scalar tails are not."""
    if name in ("vbitsort", "vmrgsort4"):
        return _sorted(step)
    kind = _kind(name)
    views = [view for view in (*step.read, step.written[0]) if view.count]
    if kind == "vcadd":
        return _reduced(name, step.read[0])
    repeats = max((_repeats(view) for view in views), default=0)
    costs = VECTORS[kind]
    # one instruction for a whole tile; if rows do not follow each other the repeats are counted by rows
    return _cost(costs, repeats, repeats)


def _cost(costs: Vector, repeats: float, least: float) -> Cost:
    return Cost(costs.head, costs.slope * repeats, costs.tail, least)


def _sorted(step: Instruction) -> Cost:
    """By keys, each a proposal of 8 bytes; no latency was published, so the longest of the table."""
    cycles, slow = _bytes(step.written[0]) / PROPOSAL / rate("sort"), VECTORS["vcadd"]
    return Cost(slow.head, cycles, slow.tail, cycles)


def _reduced(name: str, source: View) -> Cost:
    """`r`: the cross-lane sum of every repeat. `ar`: rows folded to a repeat, then one sum of each. `ra`, `ara`: rows
    added in a tree, with a barrier after each step."""
    whole = _repeats(source)
    add, across = VECTORS["vadd"], VECTORS["vcadd"]
    if re.search(r"_r_\w+$", name):
        return _cost(across, whole, 7 * whole)
    if re.search(r"_ar_\w+$", name):
        rows = source.sizes[0]
        folded = max(0, whole - rows)
        return Cost(across.head, add.slope * folded + across.slope * rows, across.tail, folded + 7 * rows)
    steps = math.ceil(math.log2(max(2, source.sizes[-2])))
    return Cost(add.head, add.slope * whole + (steps - 1) * (add.head + add.tail), add.tail, whole)


def _repeats(view: View) -> int:
    if view.kind == "i1":
        return -(-view.sizes[0] // (8 * REPEAT))
    if len(view.sizes) >= 2:
        return math.prod(view.sizes[:-1]) * -(-view.sizes[-1] * view.item // REPEAT)
    return -(-view.sizes[0] * view.item // REPEAT)


def _kind(name: str) -> str:
    if "reduce_" in name:
        return "vcadd"
    first = name.split("_")[0]
    known = {"deinterleave": "vreducev2", "interleave": "vreducev2", "broadcast": "broadcast", "copy": "copy"}
    found = known.get(first, first)
    if found in ("vsub", "vdiv") and ("_vs_" in name or "_sv_" in name):  # a duplicate, then two operands
        found = "vadd" if found == "vsub" else "vdiv"
    if found not in VECTORS:
        raise UncoveredError(f"no duration of {name}")
    return found


def product(step: Instruction) -> Cost:
    """Of left [m, k] and right [n, k] in L0."""
    (rows, depth), (columns, _) = step.read[0].sizes, step.read[1].sizes
    per_cycle = rate("cube int8" if step.read[0].item == 1 else "cube bf16")
    cycles = rows * columns * depth / per_cycle
    return Cost(rate("product"), cycles, 0, cycles)


def to_l0(step: Instruction) -> Cost:
    path = "L1 to L0A" if step.written[0].space.name.startswith("ca") else "L1 to L0B"
    cycles = _bytes(step.written[0]) / rate(path)
    return Cost(0, cycles, 0, cycles)


def load(step: Instruction, cold: float, mine: Share) -> Cost:
    """From GM to UB or L1; `cold` of its bytes come from HBM."""
    if not step.read:
        cycles = _bytes(step.written[0]) / rate("fill L1")
        return Cost(0, cycles, 0, 0)
    to_l1 = step.written[0].space.name.startswith("cbuf")
    port, size = rate("GM to L1" if to_l1 else "GM to UB"), _bytes(step.read[0])
    moved = cold / min(port, mine.hbm) + (size - cold) / min(port, mine.l2)
    rows = _rows(step.read[0]) * rate("nd2nz row") if to_l1 else 0
    return Cost(0, max(rate("copy"), rows, moved), rate("read latency"), size / port)


def store(step: Instruction, path: str, mine: Share) -> Cost:
    """From UB or L0C to GM, which is L2 first."""
    size = _bytes(step.written[0])
    if path == "L0C to GM":
        size = _bytes(step.read[0])
    cycles = size / min(rate(path), mine.l2)
    return Cost(0, max(rate("copy"), cycles), rate("write latency"), size / rate(path))


def _bytes(view: View) -> int:
    return view.count * view.item


def _rows(view: View) -> int:
    """Runs of memory: rows that do not follow each other."""
    if len(view.sizes) < 2 or view.strides[-2] == view.sizes[-1]:
        return max(1, view.count * view.item // 2048)
    return math.prod(view.sizes[:-1])
