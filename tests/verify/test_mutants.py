"""Every kind of defect, at random places of every checkpoint: reported where it is, and nothing else is accused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.verify.mutations.trial import KINDS, ImpossibleError, trial
from tests.verify.support.checkpoints import LAYOUTS, Shelf


@pytest.mark.parametrize("name", sorted(KINDS))
def test_a_mutant_is_reported_where_it_is(name: str, shelf: Shelf, tmp_path: Path) -> None:
    """On one checkpoint; kinds take turns, so that every checkpoint is used."""
    first = sorted(KINDS).index(name) % len(LAYOUTS)
    try_positions(name, [*LAYOUTS][first:] + [*LAYOUTS][:first], 1, shelf, tmp_path, until=1)


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(KINDS))
def test_mutants_at_more_positions(name: str, shelf: Shelf, tmp_path: Path) -> None:
    try_positions(name, [*LAYOUTS], 2, shelf, tmp_path)


def try_positions(
    name: str, checkpoints: list[str], positions: int, shelf: Shelf, tmp_path: Path, until: int | None = None
) -> None:
    tried = 0
    for checkpoint in checkpoints:
        for position in range(positions):
            seed = f"{checkpoint} {position}"
            try:
                problem = trial(KINDS[name], shelf[checkpoint], seed, tmp_path)
            except ImpossibleError:
                break
            assert problem is None, f"{seed}: {problem}"
            tried += 1
        if tried == until:
            break
    assert tried
