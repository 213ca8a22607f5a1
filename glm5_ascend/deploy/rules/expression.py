"""Evaluates a rule's `when`: Python's comparisons and logic over named facts, with unknown as a value.

A name without a fact is unknown, and so is every comparison with it. `and`, `or` and `not` follow Kleene's logic: False
and unknown is False, True or unknown is True, every other expression with an unknown operand is unknown.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

from packaging.version import InvalidVersion, Version


class Unknown:
    """Value of an unknown fact."""


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
    """Names of the facts in an expression."""
    return {node.id for node in ast.walk(ast.parse(text, mode="eval")) if isinstance(node, ast.Name)}


def holds(text: str, facts: Mapping[str, Any]) -> bool | None:
    """Evaluate an expression; None means unknown. Raises ValueError for syntax that rules do not have."""
    value = _value(ast.parse(text, mode="eval").body, facts)
    return None if isinstance(value, Unknown) else bool(value)


def _value(node: ast.expr, facts: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant():
            return node.value
        case ast.Name():
            return facts.get(node.id, UNKNOWN)
        case ast.Tuple():
            return tuple(_value(element, facts) for element in node.elts)
        case ast.UnaryOp(op=ast.Not()):
            inner = _value(node.operand, facts)
            return inner if isinstance(inner, Unknown) else not inner
        case ast.BoolOp():
            return _logic(isinstance(node.op, ast.Or), [_value(operand, facts) for operand in node.values])
        case ast.BinOp() if type(node.op) in _ARITHMETIC:
            left, right = _value(node.left, facts), _value(node.right, facts)
            if isinstance(left, Unknown) or isinstance(right, Unknown):
                return UNKNOWN
            return _ARITHMETIC[type(node.op)](left, right)
        case ast.Compare(ops=[op], comparators=[other]) if type(op) in _COMPARE:
            return _compare(_COMPARE[type(op)], _value(node.left, facts), _value(other, facts))
    raise ValueError(f"rules have no {type(node).__name__}: {ast.unparse(node)}")


def _logic(is_or: bool, values: list[Any]) -> Any:
    """One true operand decides `or`, one false operand decides `and`."""
    operands = [bool(value) for value in values if not isinstance(value, Unknown)]
    if is_or in operands:
        return is_or
    return UNKNOWN if len(operands) < len(values) else not is_or


def _compare(operation: Callable[[Any, Any], bool], left: Any, right: Any) -> Any:
    if isinstance(left, Unknown) or isinstance(right, Unknown):
        return UNKNOWN
    if isinstance(left, Version) or isinstance(right, Version):
        installed = [isinstance(side, Version) for side in (left, right)]
        left, right = _version(left), _version(right)
        if left is None or right is None:
            return UNKNOWN
        if installed == [True, False]:
            left = _release_of(left, right)
        elif installed == [False, True]:
            right = _release_of(right, left)
    return operation(left, right)


def _release_of(installed: Version, named: Version) -> Version:
    """Compare 0.24.0rc1 as 0.24, unless the rule names a pre-release or post release itself."""
    return installed if named.is_prerelease or named.is_postrelease else Version(installed.base_version)


def _version(value: Any) -> Version | None:
    try:
        return value if isinstance(value, Version) else Version(str(value))
    except InvalidVersion:
        return None
