"""Random damage: verify answers with findings or with one of our errors, never with a traceback."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from glm5_ascend.errors import Glm5Error
from glm5_ascend.verify import verify
from tests.conftest import Copy
from tests.verify.support.editor import DESCRIPTION, INDEX, PROVENANCE

ODD: list[Any] = [None, True, -1, 0, 2.5, "", "x", "../x.safetensors", [], [[]], {}, {"a": 1}, 10**30, "FLOAT"]


def answer(directory: Path, source: Path | None) -> None:
    try:
        report = verify(directory, against=source)
        json.dumps(report.to_dict(), allow_nan=False)
        report.lines()
    except Glm5Error as error:
        assert "\n" not in error.message


@pytest.mark.parametrize(
    "name", [DESCRIPTION, INDEX, PROVENANCE, "config.json", "tokenizer.json", "tokenizer_config.json"]
)
def test_odd_values_in_json_files(name: str, tiny_w8a8: Path, tiny_source: Path, editable: Copy) -> None:
    directory, chance = editable(tiny_w8a8), random.Random(name)
    original = json.loads((directory / name).read_text())
    for value in ODD:
        (directory / name).write_text(json.dumps(value))
        answer(directory, None)
    keys = sorted(original)
    for _ in range(4):
        content = json.loads(json.dumps(original))
        for key in chance.sample(keys, min(3, len(keys))):
            inner = content[key]
            if isinstance(inner, dict) and inner and chance.random() < 0.7:
                inner[chance.choice(sorted(inner))] = chance.choice(ODD)
            else:
                content[key] = chance.choice(ODD)
        (directory / name).write_text(json.dumps(content))
        answer(directory, tiny_source)
