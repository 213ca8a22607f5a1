"""The programs of one block side by side: a cube core and its two vector cores, or one core alone.

What runs next is chosen in several ways; the program must be right in all of them:

- eager: everything runs as soon as it can, the cores in turn;
- lazy: the scalar pipes run ahead as far as they can, the other pipes only then, in the opposite order;
- drawn: any pipe of any core that can go on, by a seeded draw.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from tests.proof.executed.clocks import PIPES, Flags, Watch, deadlock
from tests.proof.executed.core import Core
from tests.proof.executed.scalars import Values
from tests.proof.executed.text import Function, Module, UncoveredError

ORDERS = ("eager", "lazy", "drawn")


def programs(module: Module) -> list[tuple[int, Function]]:
    """The number of each core (0 cube, 1 and 2 vector) and its program."""
    entries = [function for function in module.functions.values() if function.core]
    cube = [function for function in entries if function.core == "AIC"]
    vector = [function for function in entries if function.core == "AIV"]
    if len(cube) > 1 or len(vector) > 1 or not entries:
        raise UncoveredError("a module of several kernels")
    if cube and vector:
        return [(0, cube[0]), (1, vector[0]), (2, vector[0])]
    return [(0, cube[0])] if cube else [(1, vector[0])]


def run_block(module: Module, arguments: Values, block: int, watch: Watch, order: str) -> None:
    """One block from its start to its end; `watch` gets what is wrong.

    Raises:
        FaultError: an address out of range, or nothing can go on.
    """
    flags, watch.block = Flags(), block
    watch.time, watch.blocks = watch.time + 1, watch.blocks + 1
    core_programs = programs(module)
    cores = []
    for number, function in core_programs:
        others = tuple(other for other, _ in core_programs if (other == 0) != (number == 0))
        cores.append(Core(number, module, function, dict(arguments), watch, flags, block, others))
    if order == "drawn":
        _drawn(cores, random.Random(block))
    else:
        in_turn(cores if order == "eager" else cores[::-1], order == "lazy")
    for core in cores:
        for name, left in core.unfinished():
            watch.report("end", left, left, f"the program ends and does not wait for {name}")
    for key in flags.left():
        watch.report("flag", 0, 0, f"{key} is set and never waited for")


def in_turn(cores: list[Core], lazy: bool) -> None:
    scalars = [core.scalar() for core in cores]
    order = PIPES[:0:-1] if lazy else PIPES[1:]
    while True:
        moved = False
        for core, scalar in zip(cores, scalars, strict=True):
            while _scalar(core, scalar):
                moved = True
                if not lazy:
                    _drain([core], order)
        moved |= _drain(cores, order)
        if not moved and _ended(cores):
            return


def _scalar(core: Core, scalar: Iterator[None]) -> bool:
    """One step of a scalar pipe; whether it got on."""
    if core.finished:
        return False
    next(scalar, None)
    return not core.waits_for


def _drain(cores: list[Core], order: tuple[str, ...]) -> bool:
    """Everything that the queues can run now; whether there was anything."""
    any_moved = False
    while True:
        moved = False
        for core in cores:
            for name in order:
                while core.movable(name):
                    core.move(name)
                    moved = True
        if not moved:
            return any_moved
        any_moved = True


def _drawn(cores: list[Core], draw: random.Random) -> None:
    scalars = [core.scalar() for core in cores]
    actors = [(i, name) for i in range(len(cores)) for name in PIPES]
    while True:
        draw.shuffle(actors)
        moved = False
        for i, name in actors:
            if name == "S":
                moved |= _scalar(cores[i], scalars[i])
            elif cores[i].movable(name):
                cores[i].move(name)
                moved = True
        if not moved and _ended(cores):
            return


def _ended(cores: list[Core]) -> bool:
    """Return whether all cores have finished.

    Raises:
        FaultError: a core waits for something that never comes.
    """
    waiting = [words for core in cores for words in core.stuck()]
    if waiting:
        raise deadlock(waiting)
    return all(core.finished for core in cores)
