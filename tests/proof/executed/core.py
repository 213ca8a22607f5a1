"""One core's program: the scalar pipe runs it and gives the other pipes their instructions."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.proof.executed import cube, scalars, transfers, vectors, views
from tests.proof.executed.clocks import CORES, PIPES, Flags, Pipe, Watch, pipes
from tests.proof.executed.places import SIZES, Bytes, FaultError, Space
from tests.proof.executed.scalars import Values
from tests.proof.executed.steps import Flag, Instruction, Step
from tests.proof.executed.text import Function, Module, Operation, UncoveredError, values

#: A cross-core flag counts to 15 (CrossCoreSetFlag of Ascend C).
MOST_SET = 15
_IGNORED = ("hivm.hir.set_ffts_base_addr", "hivm.hir.set_mask_norm", "return")


@dataclass
class Entry:
    """In a pipe's queue: a step of the line, with what the scalar pipe knew when it issued it."""

    step: Step
    line: int
    issued: Bytes | None


@dataclass
class Core:
    """A core of a block: `aic` (cube) or one of two `aiv` (vector).

    Attributes:
        flags: of the whole block; keys (core, source, target, event), between cores ("cross", core, to, flag).
        others: cores that a cross-core flag of this one goes to.
    """

    number: int
    module: Module
    function: Function
    env: Values
    watch: Watch
    flags: Flags
    block: int
    others: tuple[int, ...]
    queues: dict[str, deque[Entry]] = field(default_factory=lambda: {name: deque() for name in PIPES[1:]})
    pipes: dict[str, Pipe] = field(init=False)
    spaces: dict[str, Space] = field(init=False)
    waits_for: str = ""
    finished: bool = False

    def __post_init__(self) -> None:
        self.pipes = pipes(self.number, self.watch.time)
        kinds = ("cbuf", "cc", "ca", "cb") if self.number == 0 else ("ub",)
        self.spaces = {
            kind: Space(f"{kind} of {CORES[self.number]}", np.full(SIZES[kind], 0xA5, np.uint8)) for kind in kinds
        }
        self._steps: dict[int, Callable[[Values], Any]] = {}

    # The scalar pipe: a generator that yields after everything it issues and while it waits.

    def scalar(self) -> Iterator[None]:
        yield from self._run(self.function.body)
        self.finished = True

    def _run(self, body: list[Operation]) -> Iterator[None]:
        for operation in body:
            step = self._steps.get(operation.number)
            if step is None:
                step = self._steps[operation.number] = self._compiled(operation)
            work = step(self.env)
            if work is not None:
                yield from work

    def _compiled(self, operation: Operation) -> Callable[[Values], Any]:
        """The action of a line; it returns a generator if it may wait."""
        name = operation.name
        step = scalars.compiled(operation, self.module.maps) or views.compiled(operation, self.spaces)
        if step is not None:
            return step
        if name in _IGNORED:
            return lambda env: None
        if name in ("memref.load", "memref.store"):
            return self._element(operation)
        if name == "call":
            return self._called(operation)
        if name in ("hivm.hir.get_block_idx", "hivm.hir.get_sub_block_idx"):
            number = self.block if name.endswith("get_block_idx") else max(0, self.number - 1)
            return lambda env: env.__setitem__(operation.results[0], number)
        if name in ("scf.for", "scf.if"):
            return self._loop(operation) if name == "scf.for" else self._branch(operation)
        if name == "scf.yield":
            names = values(operation.rest.split(":")[0])
            return lambda env: env.__setitem__("yield", [env[value] for value in names])
        return self._synchronised(operation)

    def _loop(self, operation: Operation) -> Callable[[Values], Iterator[None]]:
        variable, low, high, step = values(operation.rest)[:4]
        carried = re.search(r"iter_args\((.*?)\)", operation.rest)
        pairs = re.findall(r"(%[\w$.#-]+) = (%[\w$.#-]+)", carried[1]) if carried else []
        kind = re.search(r" : (i\d+|index) \{?$", operation.rest)
        if kind is None and not operation.rest.endswith("{"):
            raise UncoveredError(f"scf.for {operation.rest[:60]}")

        def run(env: Values) -> Iterator[None]:
            state = [env[start] for _, start in pairs]
            for index in range(env[low], env[high], env[step]):
                env[variable] = index
                env.update(zip((name for name, _ in pairs), state, strict=True))
                yield from self._run(operation.regions[0])
                state = env.pop("yield", state) if pairs else state
            env.update(zip(operation.results, state, strict=True))

        return run

    def _branch(self, operation: Operation) -> Callable[[Values], Iterator[None]]:
        condition = values(operation.rest)[0]

        def run(env: Values) -> Iterator[None]:
            region = 0 if env[condition] else 1
            if region < len(operation.regions):
                yield from self._run(operation.regions[region])
            if operation.results:
                env.update(zip(operation.results, env.pop("yield"), strict=True))

        return run

    def _element(self, operation: Operation) -> Callable[[Values], None]:
        stored, locate = views.element(operation)
        line, pipe = operation.number, self.pipes["S"]

        def run(env: Values) -> None:
            view = locate(env)
            at = self.watch.instruction(pipe, None)
            if stored:
                self.watch.write(view, pipe, at, line)
                view.write(np.array([env[stored]]))
            else:
                self.watch.read(view, pipe, at, line)
                self.watch.owned(view, line)
                env[operation.results[0]] = views.scalar(view)

        return run

    def _called(self, operation: Operation) -> Callable[[Values], Iterator[None]]:
        name, _, rest = operation.rest.removeprefix("@").partition("(")
        build = transfers.primitive(name) or vectors.primitive(name) or cube.primitive(name, self.spaces)
        if build is None:
            raise UncoveredError(name)
        names, line = values(rest.partition(")")[0]), operation.number

        def run(env: Values) -> Iterator[None]:
            try:
                steps = build([env[value] for value in names])
            except FaultError as error:
                raise FaultError(f"line {line}: {error}") from error
            for step in steps:
                yield from self._issue(step, line)

        return run

    def _synchronised(self, operation: Operation) -> Callable[[Values], Iterator[None]]:
        short, words = operation.name.removeprefix("hivm.hir."), re.findall(r"<(\w+)>", operation.rest)
        line = operation.number
        ends = [word.removeprefix("PIPE_") for word in words if word.startswith("PIPE_")]
        if short in ("set_flag", "wait_flag") and len(ends) == 2:
            verb, (source, target) = short.removesuffix("_flag"), ends
            event = _event(operation.rest)
            return lambda env: self._issue(Flag(verb, source, target, event(env)), line)
        if short == "pipe_barrier":
            return lambda env: self._issue(Flag("barrier", ends[0]), line)
        if short in ("sync_block_set", "sync_block_wait") and "sync_instr_mode" not in operation.rest:
            match = re.search(r"flag = (?:(\d+)|(%[\w$.#-]+))", operation.rest)
            if match is None or ends[1] != "S":
                raise UncoveredError(f"{short} {operation.rest}")
            verb, (number, name) = "give" if short.endswith("set") else "expect", match.groups()
            return lambda env: self._issue(Flag(verb, ends[0], "S", int(number or env[name])), line)
        raise UncoveredError(operation.name)

    # Queues.

    def _issue(self, step: Step, line: int) -> Iterator[None]:
        """To the pipe where it runs; yields while the scalar pipe itself has to wait."""
        where = step.pipe if isinstance(step, Instruction) else where_flag(step)
        if where == "ALL":
            while any(self.queues.values()):
                self.waits_for = f"line {line}: all pipes"
                yield
            for pipe in self.pipes.values():
                self.pipes["S"].learn(pipe.done)
            for pipe in self.pipes.values():
                pipe.learn(self.pipes["S"].done)
        elif where == "S":
            entry = Entry(step, line, None)
            while not self._ready("S", entry):
                self.waits_for = f"line {line}: {_words(step)}"
                yield
            self._execute("S", entry)
        else:
            issued = self.pipes["S"].clock.copy()
            issued[self.pipes["S"].thread] = 0
            self.queues[where].append(Entry(step, line, issued))
        self.waits_for = ""
        yield

    def movable(self, pipe: str) -> bool:
        queue = self.queues[pipe]
        return bool(queue) and self._ready(pipe, queue[0])

    def move(self, pipe: str) -> None:
        self._execute(pipe, self.queues[pipe].popleft())

    def unfinished(self) -> list[tuple[str, int]]:
        """Pipes that the scalar pipe does not know to be finished, with the program's last line."""
        last, clock = self.function.body[-1].number, self.pipes["S"].clock
        return [(name, last) for name, pipe in self.pipes.items() if pipe.done[pipe.thread] > clock[pipe.thread]]

    def stuck(self) -> list[str]:
        waiting = [] if self.finished or not self.waits_for else [f"{CORES[self.number]} S, {self.waits_for}"]
        heads = [(name, queue[0]) for name, queue in self.queues.items() if queue]
        return waiting + [f"{CORES[self.number]} {name}, line {e.line}: {_words(e.step)}" for name, e in heads]

    def _ready(self, pipe: str, entry: Entry) -> bool:
        step = entry.step
        if isinstance(step, Flag) and step.verb == "wait":
            return self.flags.ready((self.number, step.source, step.target, step.event))
        if isinstance(step, Flag) and step.verb == "expect":
            return all(self.flags.ready(("cross", other, self.number, step.event)) for other in self.others)
        return True

    def _execute(self, name: str, entry: Entry) -> None:
        pipe, step, watch = self.pipes[name], entry.step, self.watch
        if isinstance(step, Instruction):
            at = watch.instruction(pipe, entry.issued)
            try:
                for view in step.read:
                    watch.read(view, pipe, at, entry.line)
                    watch.owned(view, entry.line)
                for view in step.written:
                    watch.write(view, pipe, at, entry.line)
                step.run()
            except FaultError as error:
                raise FaultError(f"line {entry.line}: {error}") from error
            return
        if entry.issued is not None:
            pipe.learn(entry.issued)
        if step.verb == "barrier":
            pipe.barrier()
        elif step.verb == "set":
            self.flags.put((self.number, step.source, step.target, step.event), pipe.done)
        elif step.verb == "wait":
            pipe.learn(self.flags.take((self.number, step.source, step.target, step.event)))
        elif step.verb == "give":
            for other in self.others:
                if self.flags.put(("cross", self.number, other, step.event), pipe.done) > MOST_SET:
                    raise FaultError(f"line {entry.line}: flag {step.event} between cores is set more than 15 times")
        else:
            for other in self.others:
                pipe.learn(self.flags.take(("cross", other, self.number, step.event)))


def where_flag(step: Flag) -> str:
    """The pipe that a flag's step runs on."""
    if step.verb in ("wait", "expect"):
        return step.target
    return step.source


def _words(step: Step) -> str:
    if isinstance(step, Instruction):
        return "an instruction"
    return f"{step.verb} {step.source} {step.target} {step.event}".strip()


def _event(rest: str) -> Callable[[Values], int]:
    match = re.search(r"<EVENT_ID(\d+)>", rest)
    if match:
        number = int(match[1])
        return lambda env: number
    dynamic = values(rest)[0]
    return lambda env: int(env[dynamic])
