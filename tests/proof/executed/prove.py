"""Level 4 of one op: its compiled programs on the cases that a server launches, against the reference.

A kernel is proven if every case that it takes part in gives what the reference gives, in every order, and nothing was
found in its program. What the interpreter does not cover makes it not proven, and so does a case that ends early.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from glm5_kernels.ascend.triton.launch import launched_by
from glm5_kernels.parity import run
from glm5_kernels.parity.cases import Case
from tests.proof.device_compiler import TARGETS, DeviceCompiler
from tests.proof.executed.block import ORDERS
from tests.proof.executed.clocks import Watch
from tests.proof.executed.launch import launch
from tests.proof.executed.places import FaultError
from tests.proof.executed.text import Module, UncoveredError, parse
from tests.proof.lowering import Key, Lowered, kernel_key, lower_all

#: Multi-buffering, and the orders in which the programs run.
CONFIGURATIONS = ((True, ORDERS), (False, ("drawn",)))


@dataclass
class Program:
    """One kernel as one configuration compiles it.

    Attributes:
        modules: the program for each target, once if they are alike. The compiler may give two workspaces to two uses
            either way, from one run to the next.
        wrong: why it is not proven; empty if it is, once it has run.
        relative: largest error of the cases that it took part in.
    """

    what: str
    modules: list[Module]
    wrong: list[str] = field(default_factory=list)
    relative: float | None = None
    blocks: int = 0

    def asserted(self) -> str:
        same = "alike" if len(self.modules) == 1 else "each"
        return f"{self.blocks} blocks, no race, no byte unwritten, all flags used; {' and '.join(TARGETS)} {same}"


def prove_op(cases: list[Case], folder: Path) -> Iterator[Program]:
    """Every kernel of the cases in every configuration."""
    kernels, compiler = lower_all(cases), DeviceCompiler(folder)
    for multi_buffer, orders in CONFIGURATIONS:
        programs = {key: _program(key, lowered, compiler, multi_buffer) for key, lowered in kernels.items()}
        for order in orders:
            for case in cases:
                _case(case, programs, order)
        for program in programs.values():
            if not program.blocks and not program.wrong:
                program.wrong.append("not proven: never run")
            yield program


def _program(key: Key, lowered: Lowered, compiler: DeviceCompiler, multi_buffer: bool) -> Program:
    shape = " ".join(f"{name}={value}" for name, value in key[2])
    what = f"{key[0]} {shape}" + ("" if multi_buffer else ", single buffers")
    texts = [compiler.compile(lowered, target, multi_buffer).program for target in TARGETS]
    try:
        return Program(what, [parse(text) for text in {_code(text): text for text in texts}.values()])
    except UncoveredError as error:
        return Program(what, [Module({}, {})], [f"not proven: {error}"])


def _code(text: str) -> str:
    """Without the line that describes the device."""
    return "\n".join(line for line in text.splitlines() if not line.startswith("module "))


def _case(case: Case, programs: dict[Key, Program], order: str) -> None:
    """Run and judge a case; what is wrong goes to the programs that took part."""
    used: list[Program] = []

    def start(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]) -> None:
        program = programs[kernel_key(kernel, arguments, constants)]
        used.append(program)
        run_program(program, grid, arguments, order)

    with launched_by(start), suppress(FaultError, UncoveredError):
        got = run._results(case, "triton", "cpu")
        for row in run._judge(case, "triton", got, run._results(case, "reference", "cpu")):
            for program in used:
                program.relative = max(row.relative, program.relative or 0.0)
                if not row.ok:
                    _add(program, f"{order}: {case.variant}, {row.output}: {row.worst}")
        return
    for program in used[:-1]:  # the last one says it itself
        _add(program, f"not proven: {case.variant} ended early, in another kernel")


def run_program(program: Program, grid: tuple[int, ...], arguments: tuple[Any, ...], order: str) -> None:
    """A launch; findings go to the program, faults too before they are raised again."""
    watch = Watch()
    try:
        for module in program.modules:
            launch(module, grid, arguments, watch, order)
    except UncoveredError as error:
        _add(program, f"not proven: {error}")
        raise
    except FaultError as error:
        _add(program, f"{order}: {error}")
        raise
    finally:
        program.blocks += watch.blocks
        for (kind, line, other), words in watch.findings.items():
            _add(program, f"{order}: {kind} at line {line} with line {other}: {words}")


def _add(program: Program, words: str) -> None:
    if words not in program.wrong:
        program.wrong.append(words)
