"""arith, math and affine operations of the scalar pipe: each line becomes a function of the values so far.

Their meaning is MLIR's own (dialects arith, math, affine of LLVM 19); integers are Python's, cut to their width.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.proof.executed.text import VALUE, Operation, UncoveredError, values

Values = dict[str, Any]
Step = Callable[[Values], None]
_WIDTH = {"i1": 1, "i8": 8, "i16": 16, "i32": 32, "i64": 64, "index": 64}


def cut(number: int, kind: str) -> int:
    """To the signed range of an integer type; i1 is 0 or 1."""
    bits = _WIDTH[kind]
    number &= (1 << bits) - 1
    return number - (1 << bits) if bits > 1 and number >> (bits - 1) else number


def _quotient(a: int, b: int) -> int:
    """Rounded to zero."""
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def _unsigned(number: int, kind: str) -> int:
    return number & ((1 << _WIDTH[kind]) - 1)


_INTEGER: dict[str, Callable[[int, int], int]] = {
    "addi": lambda a, b: a + b, "subi": lambda a, b: a - b, "muli": lambda a, b: a * b, "divsi": _quotient,
    "remsi": lambda a, b: a - b * _quotient(a, b), "andi": lambda a, b: a & b, "ori": lambda a, b: a | b,
    "xori": lambda a, b: a ^ b, "shli": lambda a, b: a << b, "shrsi": lambda a, b: a >> b, "maxsi": max, "minsi": min,
    "floordivsi": lambda a, b: a // b, "ceildivsi": lambda a, b: -(-a // b),
}  # fmt: skip
_FLOAT: dict[str, Callable[[Any, Any], Any]] = {
    "addf": lambda a, b: a + b, "subf": lambda a, b: a - b, "mulf": lambda a, b: a * b, "divf": lambda a, b: a / b,
    "maximumf": np.maximum, "minimumf": np.minimum, "maxnumf": np.fmax, "minnumf": np.fmin,
}  # fmt: skip
_ORDER: dict[str, Callable[[Any, Any], bool]] = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
}  # fmt: skip
_FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "math.sqrt": np.sqrt, "math.exp": np.exp, "math.log": np.log, "math.absf": np.abs, "arith.negf": np.negative,
    "math.rsqrt": lambda a: np.float32(1) / np.sqrt(a),
}  # fmt: skip


def compiled(operation: Operation, maps: dict[str, str]) -> Step | None:
    """The operation as a function of the values, or None if it is of another dialect.

    Raises:
        UncoveredError: one of these dialects, but not among those that our kernels use.
    """
    dialect, _, short = operation.name.partition(".")
    if dialect not in ("arith", "math", "affine"):
        return None
    (result,) = operation.results
    if operation.name == "arith.constant":
        constant = _constant(operation.rest)
        return lambda env: env.__setitem__(result, constant)
    if dialect == "affine":
        function = _affine(short, operation.rest, maps)
    else:
        function = _function(operation.name, short, operation.rest)

    def step(env: Values) -> None:
        env[result] = function(env)

    return step


def _constant(rest: str) -> Any:
    text, _, kind = rest.partition(" : ")
    text = text.split("{")[0].strip()
    if text in ("true", "false"):
        return int(text == "true")
    if kind.startswith("f") or kind == "bf16":
        if not text.startswith("0x"):
            return np.float32(text)
        bits = int(text, 16)
        forms = {"f32": ("<I", "<f"), "f16": ("<H", "<e")}
        if kind == "bf16":
            return np.float32(struct.unpack("<f", struct.pack("<I", bits << 16))[0])
        return np.float32(struct.unpack(forms[kind][1], struct.pack(forms[kind][0], bits))[0])
    return int(text)


def _function(name: str, short: str, rest: str) -> Callable[[Values], Any]:
    operands, kinds = values(rest), rest.rpartition(" : ")[2].split(" to ")
    kind = kinds[0].split(",")[0].strip()
    a = operands[0]
    if name in _FUNCTIONS:
        return lambda env: np.float32(_FUNCTIONS[name](env[a]))
    if short in _INTEGER:
        b, pair = operands[1], _INTEGER[short]
        return lambda env: cut(pair(env[a], env[b]), kind)
    if short in _FLOAT:
        b, floats = operands[1], _FLOAT[short]
        return lambda env: np.float32(floats(env[a], env[b]))
    if short in ("cmpi", "cmpf"):
        return _comparison(short, rest.split(",")[0], operands, kind)
    if short == "select":
        b, c = operands[1], operands[2]
        return lambda env: env[b] if env[a] else env[c]
    if short in ("index_cast", "trunci", "extsi"):
        return lambda env: cut(-env[a] if short == "extsi" and kind == "i1" else env[a], kinds[1])
    if short in ("extui", "index_castui"):
        return lambda env: cut(_unsigned(env[a], kind), kinds[1])
    if short == "sitofp":
        return lambda env: np.float32(env[a])
    raise UncoveredError(name)


def _comparison(short: str, word: str, operands: list[str], kind: str) -> Callable[[Values], int]:
    """Ordered comparisons of floats are false for NaN, unordered ones true."""
    word, (a, b) = word.strip(), operands
    if short == "cmpi":
        if word[0] == "u":
            order = _ORDER[word[1:]]
            return lambda env: int(order(_unsigned(env[a], kind), _unsigned(env[b], kind)))
        order = _ORDER[word.removeprefix("s")]
        return lambda env: int(order(env[a], env[b]))
    unordered, order = word[0] == "u", _ORDER[word[1:]]
    return lambda env: int(unordered if np.isnan(env[a]) or np.isnan(env[b]) else bool(order(env[a], env[b])))


def _affine(short: str, rest: str, maps: dict[str, str]) -> Callable[[Values], int]:
    """apply, min and max of a named or written map."""
    name = re.match(r"#map\d*|affine_map<", rest)
    if name is None:
        raise UncoveredError(f"affine.{short} {rest[:60]}")
    text = maps[name[0]] if name[0].startswith("#") else rest[len("affine_map<") :].partition(">")[0]
    arguments, _, results = text.partition(" -> ")
    python = re.sub(r"(\([^()]*\)|[ds]?\d+) ceildiv (\w+)", r"(-(-\1 // \2))", results.strip())
    python = re.sub(r"\bfloordiv\b", "//", python).replace(" mod ", " % ")
    if not re.fullmatch(r"[ds\d\s+*/%(),-]*", python):
        raise UncoveredError(f"map {text}")
    names = re.findall(r"[ds]\d+", arguments)
    formula = eval(f"lambda {', '.join(names)}: {python.removesuffix(')')},)")  # of the characters above alone
    operands = re.findall(VALUE, rest)
    if short == "apply":
        return lambda env: int(formula(*(env[value] for value in operands))[0])
    if short not in ("min", "max"):
        raise UncoveredError(f"affine.{short}")
    choose = min if short == "min" else max
    return lambda env: int(choose(formula(*(env[value] for value in operands))))
