"""Registers defects: each is planted in a private copy of a correct checkpoint and must be reported where it is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from editor import DESCRIPTION, Editor

from glm5_ascend.verify import verify

Plant = Callable[[Editor], str]  # damages the checkpoint, returns the tensor or file that must be named


class Defects:
    """The defects of one test module."""

    def __init__(self) -> None:
        self.cases: list[tuple[str, Plant]] = []

    def __call__(self, *recipes: str) -> Callable[[Plant], Plant]:
        """Decorator: register a defect for these recipes (w4a8 if none is given)."""

        def register(plant: Plant) -> Plant:
            self.cases.extend((recipe, plant) for recipe in recipes or ("w4a8",))
            return plant

        return register

    def _add(self, name: str, recipe: str, plant: Plant) -> None:
        plant.__name__ = name
        self.cases.append((recipe, plant))

    def change(
        self, name: str, edit: Callable[[torch.Tensor], torch.Tensor], recipe: str = "w4a8", at: str = ""
    ) -> None:
        """Tensor `name` is replaced by `edit(tensor)`; the finding is expected at `at`."""

        def plant(editor: Editor) -> str:
            with editor.tensors() as tensors:
                tensors[name] = edit(tensors[name])
            return at or name

        self._add(f"{name.removeprefix('model.')} {edit.__name__.strip('<>')} {len(self.cases)}", recipe, plant)

    def missing(self, *names: str, recipe: str = "w4a8") -> None:
        """Every tensor whose name starts with one of `names` is gone, from shard, index and description."""

        def plant(editor: Editor) -> str:
            with editor.tensors() as tensors:
                for name in [n for n in tensors if n.startswith(names)]:
                    del tensors[name]
            return names[0] if names[0][-1] != "." else f"{names[0]}weight"

        self._add(f"missing {names[0]}", recipe, plant)

    def describe(self, key: str, value: object, at: str = "") -> None:
        """The description says `value` (None: nothing) for `key`."""

        def plant(editor: Editor) -> str:
            with editor.json(DESCRIPTION) as description:
                description.pop(key, None)
                if value is not None:
                    description[key] = value
            return at or key

        self._add(f"{key} described as {value}", "w4a8", plant)

    def content(self, file: str, content: str | None) -> None:
        """`file` has this content, or is gone."""

        def plant(editor: Editor) -> str:
            path = editor.directory / file
            path.unlink() if content is None else path.write_text(content)
            return file

        self._add(f"{file} {str(content)[:40]}", "w4a8", plant)

    def parametrize(self) -> pytest.MarkDecorator:
        names = [f"{recipe}-{plant.__name__}" for recipe, plant in self.cases]
        return pytest.mark.parametrize(("recipe", "plant"), self.cases, ids=names)


def with_value(value: float, row: int = 1) -> Callable[[torch.Tensor], torch.Tensor]:
    def put(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor[row] = value
        return tensor

    put.__name__ = f"value {value}"
    return put


def assert_reported(plant: Plant, directory: Path) -> None:
    """Plant the defect in `directory`: verify must report an error that names the place `plant` returns."""
    editor = Editor(directory)
    wanted = plant(editor)
    report = verify(directory)
    errors = [finding for finding in report.findings if finding.level == "error"]
    assert report.exit_code == 1
    assert wanted in {place for finding in errors for place in (finding.tensor, finding.file)}, report.lines()
    for finding in report.findings:
        assert finding.message and "\n" not in finding.line() and finding.fix
        assert finding.tensor or finding.file
    json.dumps(report.to_json(), allow_nan=False)
