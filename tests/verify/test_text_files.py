"""A wrong or broken tokenizer, end token or template is an error, whatever the weights are."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from glm5_ascend.verify import verify


@pytest.fixture
def copy(tiny_w4a8: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_w4a8, tmp_path / "copy"))


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("tokenizer.json", "{}"),
        ("tokenizer.json", ""),
        ("tokenizer.json", '{"model": {"vocab": {"a": 0, "b": 0}}}'),
        ("tokenizer.json", '{"model": {"vocab": {"a": 0, "b": 1000000000}}}'),
        ("tokenizer.json", '{"model": {"vocab": {"a": 1}}}'),
        ("generation_config.json", "no JSON"),
        ("generation_config.json", '{"eos_token_id": [1]}'),
        ("chat_template.jinja", ""),
    ],
)
def test_broken_without_a_source(file: str, text: str, copy: Path) -> None:
    (copy / file).write_text(text)
    report = verify(copy, deep=False)
    assert [finding.file for finding in report.findings if finding.level == "error"] == [file]


def test_two_tokens_swapped(copy: Path, tiny_source: Path) -> None:
    path = copy / "tokenizer.json"
    content: dict[str, Any] = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    path.write_text(json.dumps(content))
    assert "against.tokenizer" in {finding.id for finding in verify(copy, against=tiny_source).findings}
