"""The order that flags, barriers and queues make, and the bytes that are touched without one.

Every pipe of every core counts its instructions. A clock says for each pipe up to which instruction it is known to be
finished (a vector clock). Rules, from AutoSync.md and HIVMSynchronizationOps.td of AscendNPU-IR v1.2.0:

- an instruction starts after the scalar pipe issued it, and after what the scalar pipe had waited for until then;
- instructions of one pipe start in order, but only `pipe_barrier` says that the earlier ones are finished. The scalar
  pipe and the matrix pipe (`LocalMmad.cpp`: no barrier between products into the same accumulators) finish in order;
- `set_flag` runs when all earlier instructions of its pipe are finished, `wait_flag` lets the later ones of its pipe
  start after that, `sync_block_set` and `sync_block_wait` the same between cores;
- a flag that is set twice is waited for twice, in that order: the library's own code (`LocalMmad.cpp`) relies on it;
- a scalar load or store is ordered with other pipes by flags alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.proof.executed.places import Bytes, FaultError, Space, View

PIPES = ("S", "V", "M", "MTE1", "MTE2", "MTE3", "FIX")
CORES = ("aic", "aiv0", "aiv1")
THREADS = len(PIPES) * len(CORES)
IN_ORDER = ("S", "M")
#: What one finding says at most of.
LIMIT = 20


def thread(core: int, pipe: str) -> int:
    return core * len(PIPES) + PIPES.index(pipe)


@dataclass
class Pipe:
    """clock: what the next instruction may take as finished. done: what is finished when all issued ones are."""

    thread: int
    in_order: bool
    clock: Bytes
    done: Bytes

    def learn(self, clock: Bytes) -> None:
        np.maximum(self.clock, clock, out=self.clock)
        np.maximum(self.done, clock, out=self.done)

    def barrier(self) -> None:
        np.maximum(self.clock, self.done, out=self.clock)


def pipes(core: int, start: int) -> dict[str, Pipe]:
    """All pipes of a core, which know everything before `start` to be finished."""
    clocks = [np.full(THREADS, start, np.int64) for _ in range(2 * len(PIPES))]
    return {
        name: Pipe(thread(core, name), name in IN_ORDER, clocks[2 * i], clocks[2 * i + 1])
        for i, name in enumerate(PIPES)
    }


@dataclass
class Watch:
    """Finds what is wrong with accesses; `findings` by kind and the two lines."""

    findings: dict[tuple[str, int, int], str] = field(default_factory=dict)
    time: int = 0
    block: int = 0
    blocks: int = 0

    def report(self, kind: str, line: int, other: int, words: str) -> None:
        if len(self.findings) < LIMIT:
            self.findings.setdefault((kind, line, other), words)

    def instruction(self, pipe: Pipe, issued: Bytes | None) -> tuple[int, Bytes]:
        """Its number and the clock that it starts with.

        Args:
            issued: what the scalar pipe knew when it issued it.
        """
        if issued is not None:
            pipe.learn(issued)
        self.time += 1
        clock = pipe.clock.copy()
        if pipe.in_order:
            clock[pipe.thread] = self.time
            pipe.clock[pipe.thread] = self.time
        pipe.done[pipe.thread] = self.time
        return self.time, clock

    def read(self, view: View, who: Pipe, at: tuple[int, Bytes], line: int) -> None:
        if not view.count:
            return
        space, (number, clock) = view.space, at
        if space.shared and "at" not in space.shadow:
            view.of(space.data)  # in range?
            space.pending.append((view, who.thread, number, line, self.block))
            return
        self._written(view, who, clock, line, "read")
        self._note_read(view, who.thread, number, line, self.block)
        if space.shared:
            self._other_block(view, line, writes=False)

    def write(self, view: View, who: Pipe, at: tuple[int, Bytes], line: int) -> None:
        if not view.count:
            return
        space, (number, clock) = view.space, at
        if space.shared and "at" not in space.shadow:
            self._open(space)
        self._written(view, who, clock, line, "written")
        for key, latest in list(space.latest.items()):
            if isinstance(key, int) and latest > clock[key]:
                self._late(view, key, at, line)
        view.of(space.shadow["at"])[...] = number
        view.of(space.shadow["by"])[...] = who.thread
        view.of(space.shadow["line"])[...] = line
        if not space.shared:
            view.of(space.filled("owner", np.int32, 0))[...] = view.owner
        space.latest["written", who.thread] = number
        if space.shared:
            self._other_block(view, line, writes=True)

    def _open(self, space: Space) -> None:
        """A memory that is written: from now on per byte, and what was read of it before too."""
        for name, dtype in (("at", np.int64), ("by", np.int8), ("line", np.int32)):
            space.filled(name, dtype, 0)
        if space.shared:
            space.filled("writer", np.int32, -1)
            space.filled("reader", np.int32, -1)
        pending, space.pending = space.pending, []
        for view, who, number, line, block in pending:
            self._note_read(view, who, number, line, block)

    def _note_read(self, view: View, who: int, number: int, line: int, block: int) -> None:
        space = view.space
        view.of(space.filled(("read", who), np.int64, 0))[...] = number
        view.of(space.filled(("read line", who), np.int32, 0))[...] = line
        space.latest[who] = number
        if space.shared and "reader" in space.shadow:
            readers = view.of(space.shadow["reader"])
            readers[...] = np.where((readers == -1) | (readers == block), block, -2)

    def _written(self, view: View, who: Pipe, clock: Bytes, line: int, verb: str) -> None:
        """Reports bytes last written by what is not known to be finished."""
        space = view.space
        if "at" not in space.shadow:
            self._open(space)
        if not any(isinstance(key, tuple) and n > clock[key[1]] for key, n in space.latest.items()):
            return
        at, by = view.of(space.shadow["at"]), view.of(space.shadow["by"])
        late = at > clock[by]
        if late.any():
            index = tuple(np.argwhere(late)[0])
            other = int(view.of(space.shadow["line"])[index])
            self.report("race", line, other, f"{verb} on {_name(who.thread)} while {_name(int(by[index]))} writes")

    def _late(self, view: View, reader: int, at: tuple[int, Bytes], line: int) -> None:
        """Reports bytes that another instruction than the writing one may still read."""
        space, (number, clock) = view.space, at
        read = view.of(space.shadow["read", reader])
        late = (read > clock[reader]) & (read != number)
        if late.any():
            other = int(view.of(space.shadow["read line", reader])[tuple(np.argwhere(late)[0])])
            self.report("race", line, other, f"written while {_name(reader)} still reads")

    def owned(self, view: View, line: int) -> None:
        """Reports reads of bytes that nobody wrote, or that were last written as another buffer on the chip."""
        if view.space.prepared or not view.count:
            return
        if view.space.shared:
            if "at" not in view.space.shadow or (view.of(view.space.shadow["at"]) == 0).any():
                self.report("unwritten", line, line, f"reads bytes of the {view.space.name} that nobody wrote")
            return
        owner = view.of(view.space.filled("owner", np.int32, 0))
        if (owner == view.owner).all():
            return
        other = int(owner[tuple(np.argwhere(owner != view.owner)[0])])
        if other == 0:
            self.report("unwritten", line, view.owner, "reads bytes that nobody wrote")
        else:
            self.report("reused", line, other, "reads bytes that were since written as another buffer")

    def _other_block(self, view: View, line: int, writes: bool) -> None:
        """Blocks of a grid have no order: none may write what another one touches."""
        space = view.space
        writer, reader = view.of(space.shadow["writer"]), view.of(space.shadow["reader"])
        wrong = (writer != -1) & (writer != self.block)
        if writes:
            wrong |= (reader != -1) & (reader != self.block)
            writer[...] = self.block
        if wrong.any():
            self.report("race", line, line, f"another block touches these bytes of {space.name}")


def _name(number: int) -> str:
    return f"{CORES[number // len(PIPES)]} {PIPES[number % len(PIPES)]}"


@dataclass
class Flags:
    """Flags that are set and not yet waited for, each with the clock of its setting."""

    waiting: dict[tuple[Any, ...], list[Bytes]] = field(default_factory=dict)

    def put(self, key: tuple[Any, ...], clock: Bytes) -> int:
        """Sets it; how often it is set now."""
        self.waiting.setdefault(key, []).append(clock.copy())
        return len(self.waiting[key])

    def ready(self, key: tuple[Any, ...]) -> bool:
        return bool(self.waiting.get(key))

    def take(self, key: tuple[Any, ...]) -> Bytes:
        return self.waiting[key].pop(0)

    def left(self) -> list[tuple[Any, ...]]:
        return [key for key, clocks in self.waiting.items() if clocks]


def deadlock(waiting: list[str]) -> FaultError:
    return FaultError("nothing can go on: " + "; ".join(waiting))
