"""The register of defects. A kind damages a private copy of a correct checkpoint at a random place and says where.

The kinds (`kinds_*.py`) find what they can damage in the checkpoint itself, by json, struct and the safetensors
library; they import nothing of the code under test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeVar

from tests.verify.support.editor import Checkpoint

T = TypeVar("T")


@dataclass(frozen=True)
class Place:
    """An error must name one of `names`; no error may name anything but `names`, `also`, or parts of their modules."""

    names: frozenset[str]
    also: frozenset[str] = frozenset()


Plant = Callable[[Checkpoint, Random], "Place | Iterable[str]"]


@dataclass(frozen=True)
class Kind:
    """One kind of defect.

    Attributes:
        against: only the source tells.
        by_hash: only the hashes in our provenance tell; every other kind is planted with the hashes removed.
    """

    name: str
    plant: Callable[[Checkpoint, Random], Place]
    against: bool = False
    by_hash: bool = False


class ImpossibleError(Exception):
    """This checkpoint has nothing that the kind could damage."""


KINDS: dict[str, Kind] = {}


def kind(against: bool = False, by_hash: bool = False) -> Callable[[Plant], Plant]:
    """Decorator: register a function (checkpoint, random) -> name of the place (str), names, or `Place`."""

    def register(plant: Plant) -> Plant:
        def normal(checkpoint: Checkpoint, chance: Random) -> Place:
            damage = plant(checkpoint, chance)
            if isinstance(damage, Place):
                return damage
            return Place(frozenset([damage] if isinstance(damage, str) else damage))

        name = plant.__name__
        assert name not in KINDS, name
        KINDS[name] = Kind(name, normal, against, by_hash)
        return plant

    return register


def pick(chance: Random, eligible: Sequence[T]) -> T:
    if not eligible:
        raise ImpossibleError
    return chance.choice(eligible)


def place(names: Iterable[str], also: Iterable[str] = ()) -> Place:
    return Place(frozenset([names] if isinstance(names, str) else names), frozenset(also))
