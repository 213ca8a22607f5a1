"""JSON files of a checkpoint: whatever they hold, the answer is an object or one line, never a traceback."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from glm5_ascend.checkpoint.index import INDEX_NAME, read_weight_map
from glm5_ascend.checkpoint.summary import summarize
from glm5_ascend.checkpoint.types import DESCRIPTION_NAME
from glm5_ascend.errors import CheckpointError, ConfigError, Glm5Error
from glm5_ascend.files.untrusted import MAX_BYTES, MAX_BYTES_BY_TENSOR, MAX_CONFIG_BYTES, MAX_DEPTH, read_json_object
from glm5_ascend.model.config_file import load_config
from tests.support.tiny_model import tiny_config

BAD = {
    "empty": (b"", "not valid JSON"),
    "cut off": (b'{"a": ', "not valid JSON"),
    "not utf-8": (b'{"a": "\xff"}', "not valid JSON"),
    "utf-16": ('{"a": 1}'.encode("utf-16"), "not valid JSON"),
    "a list": (b"[1]", "not a JSON object"),
    "a number": (b"7", "not a JSON object"),
    "too deep for us": (b'{"a":' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}", "levels deep"),
    "too deep for the parser": (b'{"a":' * 200_000, "not valid JSON"),
    "more digits than a float": (b'{"a": 1' + b"0" * 400 + b"}", "a number of too many digits"),
    "more digits than Python parses": (b'{"a": 1' + b"0" * 9000 + b"}", "digits"),
    "half a pair in a value": (b'{"a": ["\\ud800"]}', "half of a UTF-16 pair"),
    "half a pair in a key": (b'{"a": {"x\\uDFFF": 1}}', "half of a UTF-16 pair"),
    "a key twice": (b'{"a": 1, "a": 2}', "a key is given twice"),
    "a key twice, further down": (b'{"b": [{"a": 1, "a": 2}]}', "a key is given twice"),
}
READERS: dict[str, tuple[str, Callable[[Path], object], type[Glm5Error]]] = {
    "config": ("config.json", load_config, ConfigError),
    "description": (DESCRIPTION_NAME, summarize, CheckpointError),
    "index": (INDEX_NAME, read_weight_map, CheckpointError),
    "any": ("any.json", lambda directory: read_json_object(directory / "any.json"), CheckpointError),
}


def refused(reader: str, directory: Path) -> str:
    name, read, error = READERS[reader]
    with pytest.raises(Glm5Error) as raised:
        read(directory)
    assert raised.type is error
    assert raised.value.message.isprintable() and str(directory / name) in raised.value.message
    assert raised.value.tip
    return raised.value.message


@pytest.fixture(params=READERS)
def reader(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    return str(request.param)


@pytest.mark.parametrize("kind", BAD)
def test_bad_content(reader: str, kind: str, tmp_path: Path) -> None:
    content, expected = BAD[kind]
    (tmp_path / READERS[reader][0]).write_bytes(content)
    assert expected in refused(reader, tmp_path)


def test_a_fifo_a_device_and_a_directory_are_not_opened(reader: str, tmp_path: Path) -> None:
    path = tmp_path / READERS[reader][0]
    for make in (os.mkfifo, os.mkdir, lambda target: os.symlink("/dev/zero", target)):
        path.unlink(missing_ok=True) if not path.is_dir() else path.rmdir()
        make(path)
        assert "not a regular file" in refused(reader, tmp_path)


def test_a_huge_file_is_not_read(reader: str, tmp_path: Path) -> None:
    path = tmp_path / READERS[reader][0]
    path.touch()
    os.truncate(path, 2**36)
    limits = {"index": MAX_BYTES_BY_TENSOR, "description": MAX_BYTES_BY_TENSOR, "any": MAX_BYTES}
    limit = limits.get(reader, MAX_CONFIG_BYTES)
    assert f"larger than {limit // 2**20} MiB" in refused(reader, tmp_path)


def test_the_limits_themselves_are_accepted(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    text = '{"a":' + "[" * (MAX_DEPTH - 1) + "1" + "0" * 299 + "]" * (MAX_DEPTH - 1) + ', "\\ud83d\\ude00": "é"}'
    path.write_text(text)
    assert "\U0001f600" in read_json_object(path, max_bytes=path.stat().st_size)
    with pytest.raises(CheckpointError, match="larger than"):
        read_json_object(path, max_bytes=path.stat().st_size - 1)


def test_a_missing_file_is_said_to_be_missing(tmp_path: Path) -> None:
    assert "not found" in refused("any", tmp_path)
    (tmp_path / "any.json").symlink_to(tmp_path / "nothing")
    assert "not found" in refused("any", tmp_path)
