"""Evaluates a rule's `when`: Python's syntax for comparisons and logic over named facts, with "nobody knows" a value.

A name that has no fact is unknown, and so is every comparison with it; `and`, `or` and `not` follow Kleene: False and
unknown is False, True or unknown is True, everything else with an unknown part is unknown.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

from packaging.version import InvalidVersion, Version


class Unknown:
    """What a fact is that nobody knows."""


UNKNOWN = Unknown()
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Mult: operator.mul,
    ast.Mod: operator.mod,
}


def names_in(text: str) -> set[str]:
    """The facts an expression asks for."""
    return {node.id for node in ast.walk(ast.parse(text, mode="eval")) if isinstance(node, ast.Name)}


def holds(text: str, facts: Mapping[str, Any]) -> bool | None:
    """Whether it is so; None where nobody knows. Raises ValueError for syntax that rules do not have."""
    value = _value(ast.parse(text, mode="eval").body, facts)
    return None if isinstance(value, Unknown) else bool(value)


def _value(node: ast.expr, facts: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant():
            return node.value
        case ast.Name():
            return facts.get(node.id, UNKNOWN)
        case ast.Tuple():
            return tuple(_value(part, facts) for part in node.elts)
        case ast.UnaryOp(op=ast.Not()):
            inner = _value(node.operand, facts)
            return inner if isinstance(inner, Unknown) else not inner
        case ast.BoolOp():
            return _logic(isinstance(node.op, ast.Or), [_value(part, facts) for part in node.values])
        case ast.BinOp() if type(node.op) in _ARITHMETIC:
            left, right = _value(node.left, facts), _value(node.right, facts)
            known = not isinstance(left, Unknown) and not isinstance(right, Unknown)
            return _ARITHMETIC[type(node.op)](left, right) if known else UNKNOWN
        case ast.Compare(ops=[op], comparators=[other]) if type(op) in _COMPARE:
            return _compare(_COMPARE[type(op)], _value(node.left, facts), _value(other, facts))
    raise ValueError(f"rules have no {type(node).__name__}: {ast.unparse(node)}")


def _logic(is_or: bool, values: list[Any]) -> Any:
    """`or` is settled by a true part, `and` by a false one."""
    known = [bool(value) for value in values if not isinstance(value, Unknown)]
    if is_or in known:
        return is_or
    return UNKNOWN if len(known) < len(values) else not is_or


def _compare(how: Callable[[Any, Any], bool], left: Any, right: Any) -> Any:
    if isinstance(left, Unknown) or isinstance(right, Unknown):
        return UNKNOWN
    if isinstance(left, Version) or isinstance(right, Version):
        installed = [isinstance(side, Version) for side in (left, right)]
        left, right = _version(left), _version(right)
        if left is None or right is None:
            return UNKNOWN
        if installed == [True, False]:
            left = _beside(left, right)
        elif installed == [False, True]:
            right = _beside(right, left)
    return how(left, right)


def _beside(installed: Version, named: Version) -> Version:
    """Beside a plain release the release it belongs to: 0.24.0rc1 has what 0.24 has. Else the version itself."""
    return installed if named.is_prerelease or named.is_postrelease else Version(installed.base_version)


def _version(value: Any) -> Version | None:
    try:
        return value if isinstance(value, Version) else Version(str(value))
    except InvalidVersion:
        return None
