"""Every kind of defect, at random places of every checkpoint: reported where it is, and nothing else is accused."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from tests.verify.mutations.trial import KINDS, ImpossibleError, kind_names, trial
from tests.verify.support.checkpoints import LAYOUTS, Shelf

HERE = Path(__file__).parent
#: Of every kind on every checkpoint: in `make test`, and in `make test-all`; mutation_table.py tries 50.
FIRST, MORE = range(1), range(1, 3)
MUTATOR = [*sorted((HERE / "mutations").glob("kinds_*.py")), HERE / "mutations" / "mutator.py",
           HERE / "support" / "editor.py", HERE / "support" / "integers.py"]  # fmt: skip


@pytest.mark.parametrize("name", kind_names())
def test_every_mutant_is_reported_where_it_is(name: str, shelf: Shelf, tmp_path: Path) -> None:
    try_positions(name, FIRST, shelf, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("name", kind_names())
def test_mutants_at_more_positions(name: str, shelf: Shelf, tmp_path: Path) -> None:
    try_positions(name, MORE, shelf, tmp_path)


def try_positions(name: str, positions: range, shelf: Shelf, tmp_path: Path) -> None:
    tried = 0
    for checkpoint in LAYOUTS:
        for position in positions:
            seed = f"{checkpoint} {position}"
            try:
                problem = trial(KINDS[name], shelf[checkpoint], seed, tmp_path)
            except ImpossibleError:
                break
            assert problem is None, f"{seed}: {problem}"
            tried += 1
    assert tried


def test_the_mutator_knows_nothing_of_the_code_under_test() -> None:
    own = {path.stem for path in MUTATOR}
    for path in MUTATOR:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                top = name.rpartition(".")[2] if name.startswith("tests.") else name.split(".")[0]
                assert top in {*own, "torch", "safetensors", *sys.stdlib_module_names}, f"{path.name} imports {name}"


def test_there_are_enough_kinds() -> None:
    assert len(KINDS) >= 60
    assert len({kind.theme for kind in KINDS.values()}) == 7
