"""A launch on one die: some of its blocks timed, the others by repetition, on as many cores as there are.

Blocks of a grid are alike but for what L2 holds: the first ones read from HBM what later ones find there. So the first
blocks of grid row 0 stand for row 0, and the first ones of row 1 for all later rows. Blocks go to the core that is free
first. A tensor that fits L2 and of which the launch reads more than twice its size is in L2 after row 0.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.proof.executed.block import programs
from tests.proof.executed.clocks import CORES
from tests.proof.executed.launch import GRID, known_values
from tests.proof.executed.scalars import Values
from tests.proof.executed.text import Module
from tests.proof.predicted.costs import Share, share
from tests.proof.predicted.rates import rate
from tests.proof.predicted.timed import Memory, Record, time_block

L2 = 192 << 20
#: Blocks timed of a row of the grid.
SAMPLE = 4


@dataclass
class Launch:
    """Seconds on one die.

    Attributes:
        bound: no schedule is shorter: the fullest pipe of all cores together, or bytes from HBM.
        estimate: the schedule.
        busy: share of the estimate in which a pipe works ("aic M"), of two vector cores the mean.
        moved: bytes by pipe, of the whole launch.
        record: a block of the second row.
    """

    kernel: str
    blocks: int
    cores: int
    bound: float
    limit: str
    estimate: float
    busy: dict[str, float]
    moved: dict[str, float]
    cold: float
    record: Record


@dataclass
class Work:
    """Sums over a launch, in cycles and bytes."""

    least: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    busy: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    moved: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    cold: float = 0.0

    def add(self, record: Record, times: float, vectors: int) -> None:
        """`times` such blocks; a pipe of two vector cores counts half of each."""
        for target, source in ((self.least, record.least), (self.busy, record.busy())):
            for (core, pipe), cycles in source.items():
                target[_lane(core, pipe)] += times * cycles / (1 if core == 0 else vectors)
        for (core, pipe), size in record.bytes.items():
            self.moved[_lane(core, pipe)] += times * size
        self.cold += times * record.cold


def _lane(core: int, pipe: str) -> str:
    return f"{CORES[core][:3]} {pipe}"


def predict(module: Module, grid: Sequence[int], arguments: Sequence[Any], memory: Memory) -> Launch:
    """Time of a launch; runs the blocks that it times on the arguments."""
    sizes = (*grid, 1, 1)[:GRID]
    blocks, inner = math.prod(sizes), math.prod(sizes[1:])
    numbers = [number for number, _ in programs(module)]
    cores = int(rate("cube cores" if 0 in numbers else "vector cores"))
    vectors = max(1, len([number for number in numbers if number]))
    function = programs(module)[0][1]
    known = known_values(module, function, arguments, sizes, blocks)
    mine, work = share(min(cores, blocks)), Work()
    first = _row(module, known, 0, inner, mine, memory)
    rows: list[tuple[list[Record], int]] = [(first, inner)]
    if sizes[0] > 1:
        _keep(first, blocks, memory)
        rows.append((_row(module, known, inner, inner, mine, memory), blocks - inner))
    for records, count in rows:
        for record in records:
            work.add(record, count / len(records), vectors)
    cycles = _makespan(rows, cores)
    clock = rate("clock")
    bounds = {lane: total / cores / clock for lane, total in work.least.items()}
    bounds["HBM"] = work.cold / rate("HBM")
    limit = max(bounds, key=lambda lane: bounds[lane])
    estimate = max(cycles / clock, bounds[limit])
    used = min(cores, blocks)
    busy = {lane: total / used / clock / estimate for lane, total in work.busy.items()}
    return Launch(
        function.name.removesuffix("_mix_aic"), blocks, cores, bounds[limit], limit, estimate, busy, dict(work.moved),
        work.cold, rows[-1][0][-1],
    )  # fmt: skip


def _row(module: Module, known: Values, start: int, inner: int, mine: Share, memory: Memory) -> list[Record]:
    return [time_block(module, known, start + i, mine, memory) for i in range(min(SAMPLE, inner))]


def _keep(records: list[Record], blocks: int, memory: Memory) -> None:
    """Tensors that the launch reads again and again, if they fit L2."""
    total: dict[int, float] = defaultdict(float)
    spaces = {}
    for record in records:
        for key, (space, size) in record.read.items():
            total[key] += size / len(records) * blocks
            spaces[key] = space
    for key, size in total.items():
        if size > 2 * len(spaces[key].data) and len(spaces[key].data) < L2:
            memory.fill(spaces[key])


def _makespan(rows: list[tuple[list[Record], int]], cores: int) -> float:
    """Cycles until the last block is done."""
    free = [0.0] * cores
    for records, count in rows:
        for index in range(count):
            heapq.heapreplace(free, free[0] + records[index % len(records)].end)
    return max(free)
