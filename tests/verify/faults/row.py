"""A row of the fault table: what is planted, what `verify` must say, and which ways of calling it find it."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.verify.support.editor import DESCRIPTION, Checkpoint

#: Ways of calling: quick (headers only), plain, with the recorded hashes, with the source. All but "h" without hashes.
QUICK, PLAIN, HASHES, SOURCE = "qphs"
ALL, VALUES, COMPARED = "qphs", "phs", "hs"


class Linked(Checkpoint):
    """A copy of a checkpoint that shares the bytes of its shards until one of them is edited."""

    def __init__(self, correct: Path, directory: Path) -> None:
        def link(source: str, target: str) -> None:
            (os.link if source.endswith(".safetensors") else shutil.copyfile)(source, target)

        shutil.copytree(correct, directory, copy_function=link)
        super().__init__(directory)

    def store(self, changes: dict[str, torch.Tensor | None], file: str | None = None) -> None:
        for path in self.directory.glob("*.safetensors"):
            if path.stat().st_nlink > 1:
                copy = path.with_suffix(".copy")
                shutil.copyfile(path, copy)
                copy.replace(path)
        super().store(changes, file)

    def change(self, name: str, edit: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace a tensor by `edit` of a copy of it."""
        self.store({name: edit(self.read(name).clone())})

    def write(self, name: str, content: str | bytes) -> None:
        path = self.directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)

    def remove(self, *names: str) -> None:
        for name in names:
            (self.directory / name).unlink()


Edit = Callable[[Linked], None]


@dataclass(frozen=True)
class Row:
    """One planted fault.

    Attributes:
        part: file or tensor (or key of a file) that is edited.
        level: of the finding.
        words: regular expression that one line of a finding of that level must match.
        modes: ways of calling that find it; all others must find nothing wrong.
        recipe, model: of the checkpoint that is edited; "glm5" or "flash".
    """

    kind: str
    part: str
    edit: Edit
    words: str
    level: str = "error"
    modes: str = ALL
    recipe: str = "w4a8"
    model: str = "glm5"

    @property
    def name(self) -> str:
        return re.sub(r"\s+", " ", f"{self.kind}: {self.part}: {self.words}")[:100]


def key(file: str, name: str, value: Any) -> Edit:
    """Set a key of a JSON file."""

    def edit(ck: Linked) -> None:
        with ck.json(file) as content:
            content[name] = value

    return edit


def without(file: str, *names: str) -> Edit:
    """Remove keys of a JSON file."""

    def edit(ck: Linked) -> None:
        with ck.json(file) as content:
            for name in names:
                content.pop(name, None)

    return edit


def content(file: str, text: str | bytes) -> Edit:
    """Write a file."""
    return lambda ck: ck.write(file, text)


def removed(*files: str) -> Edit:
    return lambda ck: ck.remove(*files)


def tensor(name: str, edit: Callable[[torch.Tensor], torch.Tensor]) -> Edit:
    return lambda ck: ck.change(name, edit)


def tokenizer(edit: Callable[[dict[str, Any]], None]) -> Edit:
    """Change the parsed tokenizer.json."""

    def apply(ck: Linked) -> None:
        with ck.json("tokenizer.json") as parsed:
            edit(parsed)

    return apply


__all__ = ["DESCRIPTION", "Edit", "Linked", "Row", "key", "without"]
