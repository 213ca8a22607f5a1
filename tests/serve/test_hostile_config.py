"""Bad values and contents of config.json and the description: one line, exit code 2."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from _pytest.capture import CaptureFixture

from glm5_ascend.cli import run
from glm5_ascend.errors import CheckpointError
from glm5_ascend.serve.plugin.description import load_description

CHANGES = [
    {"num_hidden_layers": 10**9}, {"num_hidden_layers": 2.5}, {"num_hidden_layers": [1]}, {"num_hidden_layers": None},
    {"num_hidden_layers": -1}, {"num_hidden_layers": True}, {"n_routed_experts": 10**12},
    {"first_k_dense_replace": 2e8}, {"indexer_types": 5}, {"indexer_types": {"a": 1}}, {"index_topk_freq": "4"},
    {"architectures": 5}, {"model_type": "\x1b[2Jglm"}, {"model_type": ["glm_moe_dsa"]},
]  # fmt: skip
TEXTS = {
    "nested": '{"a":' * 100_000, "digits": '{"a": 1' + "0" * 10_000 + "}", "surrogate": '{"a": "\\ud800"}',
    "twice": '{"a": 1, "a": 2}', "empty": "", "list": "[]", "null": "null",
}  # fmt: skip


@pytest.fixture
def copy(tiny_w4a8: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_w4a8, tmp_path / "copy"))


def assert_refused(directory: Path, capsys: CaptureFixture[str]) -> None:
    assert run(["serve", str(directory), "--dry-run"]) == 2
    message = capsys.readouterr().err
    lines = message.rstrip("\n").split("\n")
    assert lines[0].startswith("error: ") and len(lines) <= 2, message
    assert all(line.isprintable() for line in lines), message


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_config_values(change: dict[str, object], copy: Path, capsys: CaptureFixture[str]) -> None:
    path = copy / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert_refused(copy, capsys)


@pytest.mark.parametrize("content", [*TEXTS, "fifo", "device"])
def test_config_texts(content: str, copy: Path, capsys: CaptureFixture[str]) -> None:
    spoil(copy / "config.json", content)
    assert_refused(copy, capsys)


@pytest.mark.parametrize("content", [*TEXTS, "fifo", "device"])
def test_description_texts(content: str, copy: Path) -> None:
    spoil(copy / "quant_model_description.json", content)
    with pytest.raises(CheckpointError, match=r"not a|not valid"):
        load_description(copy)


def spoil(path: Path, content: str) -> None:
    path.unlink()
    if content == "fifo":
        os.mkfifo(path)
    elif content == "device":
        path.symlink_to("/dev/zero")
    else:
        path.write_text(TEXTS[content])
