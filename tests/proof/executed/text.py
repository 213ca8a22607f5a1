"""The text of a compiled module: functions of operations, one operation a line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

#: An SSA value, also one of several results: `%24#1`.
VALUE = r"%[\w$.-]+(?:#\d+)?"
_RESULTS = re.compile(r"(%[\w$.-]+)(:\d+)? = (.*)")
_FUNCTION = re.compile(r"func\.func (?:private )?@(\w+)\((.*?)\)(?: ->| attributes)")
_TYPE = re.compile(r"memref<((?:[\d?]+x)*)(\w+)[,>].*#hivm\.address_space<(\w+)>")


class UncoveredError(Exception):
    """The program uses what the interpreter does not know: the kernel is not proven."""


@dataclass
class Operation:
    """One line: `results = name rest`, with its regions.

    Attributes:
        number: line in the module's text, from 1.
        results: names of its results, `%24#0`, `%24#1` if there are several.
        rest: what follows the name, as it is written.
    """

    number: int
    results: tuple[str, ...]
    name: str
    rest: str
    regions: list[list[Operation]] = field(default_factory=list)


@dataclass(frozen=True)
class Function:
    """A function with its arguments (name, type text), on the cube core (AIC), a vector core (AIV) or neither ("")."""

    name: str
    arguments: tuple[tuple[str, str], ...]
    body: list[Operation]
    core: str


@dataclass(frozen=True)
class Module:
    """Functions by name, and affine maps by name: `#map3` -> `()[s0] -> (s0 * 8)`."""

    functions: dict[str, Function]
    maps: dict[str, str]


@dataclass(frozen=True)
class ViewType:
    """A memref type: sizes (-1 unknown), element type and address space (gm, ub, cbuf, cc)."""

    sizes: tuple[int, ...]
    kind: str
    space: str


def view_type(text: str) -> ViewType:
    """The memref type that `text` starts with or holds."""
    match = _TYPE.search(text)
    if match is None:
        raise UncoveredError(f"type {text}")
    sizes = tuple(-1 if size == "?" else int(size) for size in match[1].split("x")[:-1])
    return ViewType(sizes, match[2], match[3])


def values(text: str) -> list[str]:
    """The SSA values in `text`, in order."""
    return re.findall(VALUE, text)


def parse(text: str) -> Module:
    """Raises `UncoveredError` for text that is not one operation a line."""
    maps, functions = {}, {}
    lines = iter(enumerate(text.splitlines(), 1))
    for _, line in lines:
        stripped = line.strip()
        if stripped.startswith("#map"):
            name, body = stripped.split(" = affine_map<", 1)
            maps[name] = body.removesuffix(">")
        elif stripped.startswith("func.func ") and stripped.endswith("{"):
            match = _FUNCTION.match(stripped)
            if match is None:
                raise UncoveredError(f"function {stripped[:80]}")
            core = re.search(r"func_core_type<(AI[CV])>", stripped)
            body, _, _ = _region(lines)
            functions[match[1]] = Function(match[1], _arguments(match[2]), body, core[1] if core else "")
    return Module(functions, maps)


def _arguments(text: str) -> tuple[tuple[str, str], ...]:
    parts = re.split(r",? ?(%arg\d+): ", text)[1:]
    return tuple(zip(parts[::2], parts[1::2], strict=True))


def _region(lines: Iterator[tuple[int, str]]) -> tuple[list[Operation], int, str]:
    """Operations up to the closing brace, and the line that it is in."""
    operations: list[Operation] = []
    for number, line in lines:
        stripped = line.strip()
        if stripped.startswith("}"):
            return operations, number, stripped
        if stripped:
            operations.append(_operation(number, stripped, lines))
    raise UncoveredError("text that ends inside a region")


def _operation(number: int, line: str, lines: Iterator[tuple[int, str]]) -> Operation:
    results: tuple[str, ...] = ()
    assigned = _RESULTS.match(line)
    if assigned:
        count = int((assigned[2] or ":1")[1:])
        results = (assigned[1],) if count == 1 else tuple(f"{assigned[1]}#{i}" for i in range(count))
        line = assigned[3]
    match = re.match(r"[\w.]+", line)
    if match is None:
        raise UncoveredError(f"line {number}: {line[:60]}")
    name, rest = match[0], line[match.end() :].strip()
    operation = Operation(number, results, name.removeprefix("func."), rest)
    while rest.endswith("{"):
        body, _, rest = _region(lines)
        operation.regions.append(body)
    return operation
