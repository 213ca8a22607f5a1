"""What a primitive is made of: instructions of pipes, flags between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.proof.executed.places import View

#: The event that library code keeps for itself (`LIB_EVENT_ID0` of `Template/include/Utils.h`).
LIBRARY_EVENT = -1


@dataclass(frozen=True)
class Instruction:
    """Runs on `pipe` as one: reads its operands, then writes.

    Attributes:
        written: what it writes: results, and what the library uses in between.
    """

    pipe: str
    read: tuple[View, ...]
    written: tuple[View, ...]
    run: Callable[[], None]


@dataclass(frozen=True)
class Flag:
    """`verb` is set, wait or barrier (of `source`)."""

    verb: str
    source: str
    target: str = ""
    event: int = 0


Step = Instruction | Flag


def by_scalar(pipe: str, instruction: Instruction) -> list[Step]:
    """Library code that works on the scalar pipe between two instructions of `pipe`."""
    return [
        Flag("set", pipe, "S", LIBRARY_EVENT),
        Flag("wait", pipe, "S", LIBRARY_EVENT),
        instruction,
        Flag("set", "S", pipe, LIBRARY_EVENT),
        Flag("wait", "S", pipe, LIBRARY_EVENT),
    ]
