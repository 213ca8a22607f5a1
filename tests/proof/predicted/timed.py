"""One block with a clock: level 5's core, and when each of its instructions starts and ends.

Time follows from the program alone: a pipe takes its instructions in order, each after the scalar pipe issued it; a
flag carries the time at which it was set, a barrier waits for results. The order of the interpretation plays no part.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.proof.executed import views
from tests.proof.executed.block import in_turn, programs
from tests.proof.executed.clocks import CORES, PIPES, Flags, Pipe, Watch
from tests.proof.executed.core import Core, Entry, where_flag
from tests.proof.executed.places import Bytes, Space, View
from tests.proof.executed.scalars import Values
from tests.proof.executed.steps import Flag, Instruction, Step
from tests.proof.executed.text import Function, Module, Operation
from tests.proof.predicted import costs
from tests.proof.predicted.costs import Cost, Share
from tests.proof.predicted.rates import rate

LINE = 512
#: Operations of the text that become no instruction: constants, types, views whose numbers are folded into addresses.
_FREE = (
    "arith.constant",
    "memref.cast",
    "hivm.hir.pointer_cast",
    "memref.collapse_shape",
    "memref.expand_shape",
    "return",
)


class Unwatched(Watch):
    """Level 5 without its look at bytes."""

    def read(self, view: View, who: Pipe, at: tuple[int, Bytes], line: int) -> None:
        view.of(view.space.data)

    def write(self, view: View, who: Pipe, at: tuple[int, Bytes], line: int) -> None:
        view.of(view.space.data)

    def owned(self, view: View, line: int) -> None:
        pass


@dataclass
class Memory:
    """Which lines of GM an earlier instruction of the op has brought to L2.

    Attributes:
        warm: by address of a tensor's storage.
    """

    warm: dict[int, Bytes] = field(default_factory=dict)

    def touch(self, view: View) -> int:
        """Bytes of `view` that come from HBM; from now on they are in L2."""
        lines = self._lines(view.space)
        inner = view.sizes[-1] * view.strides[-1] * view.item
        starts = np.array([view.start()])
        for size, stride in zip(view.sizes[:-1], view.strides[:-1], strict=True):
            starts = (starts[:, None] + np.arange(size) * stride * view.item).reshape(-1)
        first, last = starts // LINE, (starts + max(1, inner) - 1) // LINE
        wide = int((last - first).max()) + 1
        where = np.unique(np.minimum(first[:, None] + np.arange(wide), last[:, None]))
        new = int((~lines[where]).sum())
        lines[where] = True
        return min(new * LINE, view.count * view.item)

    def fill(self, space: Space) -> None:
        self._lines(space)[:] = True

    def _lines(self, space: Space) -> Bytes:
        key = space.data.ctypes.data
        if key not in self.warm:
            self.warm[key] = np.zeros(len(space.data) // LINE + 1, bool)
        return self.warm[key]


@dataclass
class Record:
    """What a block did; times in cycles.

    Attributes:
        spans: (core, pipe, start, end, name of the primitive, or of the instruction where it has several).
        least: cycles per (core, pipe) at the tables' rates.
        bytes: moved per (core, pipe).
        cold: of these, from HBM.
        read: bytes read of GM by storage address.
    """

    spans: list[tuple[int, str, float, float, str]] = field(default_factory=list)
    least: dict[tuple[int, str], float] = field(default_factory=lambda: defaultdict(float))
    bytes: dict[tuple[int, str], int] = field(default_factory=lambda: defaultdict(int))
    cold: int = 0
    read: dict[int, tuple[Space, int]] = field(default_factory=dict)
    end: float = 0.0

    def busy(self) -> dict[tuple[int, str], float]:
        total: dict[tuple[int, str], float] = defaultdict(float)
        for core, pipe, start, end, _ in self.spans:
            total[core, pipe] += end - start
        return total


@dataclass
class Times:
    """What all cores of a block share: flags with the time of their setting."""

    share: Share
    memory: Memory
    record: Record
    set_at: dict[tuple[Any, ...], deque[float]] = field(default_factory=lambda: defaultdict(deque))


@dataclass
class TimedCore(Core):
    times: Times = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.free = dict.fromkeys(PIPES, 0.0)
        self.done = dict.fromkeys(PIPES, 0.0)
        self.issued: dict[str, deque[float]] = {name: deque() for name in PIPES}
        self.names = _names(self.function.body)
        self.lines: set[tuple[int, int]] = set()
        self.cycles: dict[int, int] = {}

    def _run(self, body: list[Operation]) -> Iterator[None]:
        for operation in body:
            if operation.name not in _FREE:
                self.free["S"] += rate("scalar")
            yield from super()._run([operation])

    def _issue(self, step: Step, line: int) -> Iterator[None]:
        where = step.pipe if isinstance(step, Instruction) else where_flag(step)
        if where not in ("S", "ALL"):
            self.issued[where].append(self.free["S"])
        yield from super()._issue(step, line)
        if where == "ALL":
            latest = max(*self.free.values(), *self.done.values())
            for name in PIPES:
                self.free[name] = self.done[name] = latest

    def _execute(self, name: str, entry: Entry) -> None:
        if name != "S":
            self.free[name] = max(self.free[name], self.issued[name].popleft())
        if isinstance(entry.step, Instruction):
            self._instruction(name, entry.step, entry.line)
        else:
            self._flag(name, entry.step)
        super()._execute(name, entry)
        self.times.record.end = max(self.times.record.end, self.free[name], self.done[name])

    def _instruction(self, pipe: str, step: Instruction, line: int) -> None:
        record, where = self.times.record, (self.number, pipe)
        cost = self._cost(pipe, step, line)
        idle = self.free[pipe] >= self.done[pipe]  # everything before it is finished
        start = self.free[pipe] + (cost.head if idle else 0)
        self.free[pipe] = start + cost.busy
        self.done[pipe] = max(self.done[pipe], self.free[pipe] + cost.tail)
        record.spans.append((*where, start, self.free[pipe], step.name or self.names.get(line, "")))
        record.least[where] += cost.least
        moved = (*step.read[:1], *step.written[:1])
        record.bytes[where] += max((view.count * view.item for view in moved), default=0)

    def _cost(self, pipe: str, step: Instruction, line: int) -> Cost:
        mine = self.times.share
        if self.number and self.others:  # the block's share is for both vector cores
            mine = Share(mine.hbm / 2, mine.l2 / 2)
        if pipe == "V":
            return costs.vector(step.name or self.names[line], step)
        if pipe == "M":
            return costs.product(step)
        if pipe == "MTE1":
            return costs.to_l0(step)
        if pipe == "MTE2":
            cold = sum(self._read(view) for view in step.read)
            return costs.load(step, cold, mine)
        if pipe in ("MTE3", "FIX"):
            for view in step.written:
                self.times.memory.touch(view)
            return costs.store(step, "UB to GM" if pipe == "MTE3" else "L0C to GM", mine)
        return self._scalar_copy(step)

    def _read(self, view: View) -> int:
        record = self.times.record
        space, before = record.read.get(view.space.data.ctypes.data, (view.space, 0))
        record.read[view.space.data.ctypes.data] = space, before + view.count * view.item
        cold = self.times.memory.touch(view)
        record.cold += cold
        return cold

    def _scalar_copy(self, step: Instruction) -> Cost:
        """Element by element: a load and a store each, and a read of GM for every line."""
        count = max((view.count for view in step.written), default=0)
        reads = [view for view in step.read if view.space.shared]
        lines = sum(-(-view.count * view.item // int(rate("scalar line"))) for view in reads)
        cycles = 2 * count * rate("scalar") + lines * rate("read latency")
        return Cost(0, cycles, rate("write latency") if not reads else 0, cycles)

    def _element(self, operation: Operation) -> Any:
        plain = super()._element(operation)
        if "address_space<gm>" not in operation.rest:
            return plain

        def run(known: Values) -> None:
            view = views.element(operation)[1](known)
            line = (id(view.space), view.start() // int(rate("scalar line")))
            if line not in self.lines:
                self.lines.add(line)
                self._read(view)
                self.free["S"] += rate("read latency")
            plain(known)

        return run

    def _flag(self, name: str, step: Flag) -> None:
        at, done = self.free[name] + rate("flag"), max(self.free[name], self.done[name])
        if step.verb == "barrier":
            at = max(at, done)
        elif step.verb == "set":
            self.times.set_at[self.number, step.source, step.target, step.event].append(done + rate("flag"))
        elif step.verb == "wait":
            at = max(at, self.times.set_at[self.number, step.source, step.target, step.event].popleft())
        elif step.verb == "give":
            for other in self.others:
                self.times.set_at["cross", self.number, other, step.event].append(done + rate("cross-core flag"))
        else:
            for other in self.others:
                at = max(at, self.times.set_at["cross", other, self.number, step.event].popleft())
        self.free[name] = at


def _names(body: list[Operation]) -> dict[int, str]:
    found: dict[int, str] = {}
    for operation in body:
        if operation.name == "call":
            match = re.match(r"@(\w+)", operation.rest)
            found[operation.number] = match[1] if match else ""
        for region in operation.regions:
            found |= _names(region)
    return found


def time_block(module: Module, known: Values, block: int, share: Share, memory: Memory, lazy: bool = False) -> Record:
    """A block from its start, at which all of its cores begin, to the end of the last one.

    Args:
        lazy: interpret in another order, which changes no time.
    """
    watch, flags = Unwatched(), Flags()
    watch.block, watch.time = block, 1
    times = Times(share, memory, Record())
    found: list[tuple[int, Function]] = programs(module)
    cores: list[Core] = []
    for number, function in found:
        others = tuple(other for other, _ in found if (other == 0) != (number == 0))
        cores.append(TimedCore(number, module, function, dict(known), watch, flags, block, others, times=times))
    in_turn(cores, lazy)
    return times.record


def lane(core: int, pipe: str) -> str:
    return f"{CORES[core]} {pipe}"
