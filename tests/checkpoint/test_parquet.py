"""Parquet: the records of a .jsonl; damage, or a machine without pyarrow, is one line."""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from glm5_ascend.checkpoint import records
from glm5_ascend.checkpoint.records import read_records
from glm5_ascend.errors import TextError
from glm5_ascend.quantize.calibration.dataset import load_calibration
from tests.support.command import assert_one_clear_line, in_process
from tests.support.tiny_model import VOCAB_SIZE

WORDS = "The residual stream of a transformer carries few very large channels. "


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    """`rows` as Parquet in row groups of two."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pyarrow.Table.from_struct_array(pyarrow.array(rows))  # the columns of all rows
    parquet.write_table(table, path, row_group_size=2)
    return path


def test_a_null_is_an_absent_key(tmp_path: Path) -> None:
    """A table has one set of columns: each row has nulls for those of the others, at every depth."""
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"city": "Oslo"}}}]}
    rows = [
        {"text": "plain"},
        {"messages": [{"role": "user", "content": "a"}, call]},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "g", "arguments": {"n": 1}}}]}]},
    ]
    assert [row for _, row in read_records(write(tmp_path / "a.parquet", rows))] == rows


def test_what_json_does_not_have_is_left_out(tmp_path: Path) -> None:
    row = {"text": "a", "image": b"\x89PNG", "on": datetime.datetime(2026, 11, 27), "task": "b", "score": 0.5}
    ((_, read),) = read_records(write(tmp_path / "a.parquet", [row]))
    assert read == {"text": "a", "task": "b", "score": 0.5}


def test_the_same_tokens_as_from_a_jsonl(tiny_source: Path, tmp_path: Path) -> None:
    rows = [{"text": WORDS * n} for n in (1, 5, 2)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    paths = (tmp_path / "a.jsonl", write(tmp_path / "named-wrongly.jsonl", rows))
    first, second = (load_calibration(path, tiny_source, VOCAB_SIZE, 8, 64).sequences for path in paths)
    assert len(first) == len(second) > 4 and all(map(torch.equal, first, second))


def test_too_long_a_row_is_refused_by_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MAX_RECORD", 100)
    path = write(tmp_path / "a.parquet", [{"text": "ok"}, {"text": "x" * 200}])
    with pytest.raises(TextError, match=r"a\.parquet:2: longer than 100"):
        list(read_records(path))


DAMAGE = {
    "empty": lambda data: b"",
    "the first bytes": lambda data: data[:6],
    "cut off": lambda data: data[: len(data) // 2],
    "another end": lambda data: data[:-4] + b"....",
    "another footer": lambda data: data[:-200] + bytes(192) + data[-8:],
    "other pages": lambda data: data[:4] + b"\xff" * 60 + data[64:],
    "no Parquet": lambda data: b'{"text": "a"}\n' * 9,
}


@pytest.mark.parametrize("mode", ["--dry-run", "--quiet"])
@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_one_line(name: str, mode: str, tiny_source: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", [{"text": WORDS * n} for n in range(1, 9)])
    path.write_bytes(DAMAGE[name](path.read_bytes()))
    done = in_process("quantize", tiny_source, tmp_path / "out", "--calib", path, mode)
    assert_one_clear_line(done, 2, "a.parquet:1: not readable as Parquet")
    assert not (tmp_path / "out").exists()


def test_without_pyarrow(tiny_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1\x15\x04")
    done = in_process("quantize", tiny_source, tmp_path / "out", "--calib", tmp_path / "a.parquet", "--dry-run")
    assert_one_clear_line(done, 3, "a.parquet: Parquet is read by pyarrow, which is not installed")
    assert "pip install" in done.stderr
