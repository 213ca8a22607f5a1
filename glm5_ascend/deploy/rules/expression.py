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


class _UnknownError(Exception):
    """The value of an expression depends on an unknown fact."""


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
    return _holds(ast.parse(text, mode="eval").body, facts)


def _holds(node: ast.expr, facts: Mapping[str, Any]) -> bool | None:
    try:
        return bool(_value(node, facts))
    except _UnknownError:
        return None


def _value(node: ast.expr, facts: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant():
            return node.value
        case ast.Name():
            if node.id not in facts:
                raise _UnknownError
            return facts[node.id]
        case ast.Tuple():
            return tuple(_value(element, facts) for element in node.elts)
        case ast.UnaryOp(op=ast.Not()):
            return not _value(node.operand, facts)
        case ast.BoolOp():
            decides, answers = isinstance(node.op, ast.Or), [_holds(operand, facts) for operand in node.values]
            if None in answers and decides not in answers:
                raise _UnknownError
            return decides if decides in answers else not decides
        case ast.BinOp() if type(node.op) in _ARITHMETIC:
            return _ARITHMETIC[type(node.op)](_value(node.left, facts), _value(node.right, facts))
        case ast.Compare(ops=[op], comparators=[other]) if type(op) in _COMPARE:
            return _compare(_COMPARE[type(op)], _value(node.left, facts), _value(other, facts))
    raise ValueError(f"rules have no {type(node).__name__}: {ast.unparse(node)}")


def _compare(operation: Callable[[Any, Any], bool], left: Any, right: Any) -> Any:
    if isinstance(left, Version) or isinstance(right, Version):
        installed = [isinstance(side, Version) for side in (left, right)]
        try:
            left, right = (side if isinstance(side, Version) else Version(str(side)) for side in (left, right))
        except InvalidVersion:
            raise _UnknownError from None
        if installed == [True, False]:
            left = _release_of(left, right)
        elif installed == [False, True]:
            right = _release_of(right, left)
    return operation(left, right)


def _release_of(installed: Version, named: Version) -> Version:
    """Compare 0.24.0rc1 as 0.24, unless the rule names a pre-release or post release itself."""
    return installed if named.is_prerelease or named.is_postrelease else Version(installed.base_version)
