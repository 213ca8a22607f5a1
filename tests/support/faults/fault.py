"""A wrong line of the product that a test must find."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One wrong line.

    Attributes:
        area: the part of the product that it is in.
        what: what is wrong, in words.
        right, wrong: code that stands exactly once in the product, and what is put in its place.
        tests: names of test functions, with their parameters where one case is enough; those that must find it.
    """

    area: str
    what: str
    right: str
    wrong: str
    tests: tuple[str, ...]


def fault(area: str, what: str, right: str, wrong: str, *tests: str) -> Fault:
    return Fault(area, what, right, wrong, tests)
