"""Calibration files as people have them: which are read, and the line that names the others."""

from __future__ import annotations

import csv
import gzip
import io
import json
from pathlib import Path
from typing import Any

import pytest

from glm5_ascend.checkpoint import records
from glm5_ascend.checkpoint.chats import chat, plain_text, tools
from glm5_ascend.checkpoint.records import read_records
from glm5_ascend.errors import TextError
from tests.support.command import assert_one_clear_line, in_process

QUESTION, ANSWER = "What is 2 + 2?", "4, of course."
TURN = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
SYSTEM = {"role": "system", "content": "Be brief."}
#: name -> (record, messages)
CHATS: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "messages": ({"messages": TURN}, TURN),
    "ShareGPT": ({"conversations": [{"from": "human", "value": QUESTION}, {"from": "gpt", "value": ANSWER}]}, TURN),
    "ShareGPT with a system": (
        {"system": "Be brief.",
         "conversations": [{"from": "user", "value": QUESTION}, {"from": "GPT", "value": ANSWER}]},
        [SYSTEM, *TURN],
    ),
    "ShareGPT in roles": ({"conversation": TURN}, TURN),
    "alpaca": ({"instruction": QUESTION, "input": "", "output": ANSWER, "text": "### Instruction"}, TURN),
    "alpaca with an input": (
        {"instruction": "Add.", "input": "2 + 2", "output": "4"},
        [{"role": "user", "content": "Add.\n2 + 2"}, {"role": "assistant", "content": "4"}],
    ),
    "prompt and completion": ({"prompt": QUESTION, "completion": ANSWER}, TURN),
    "prompt and chosen, of TRL": ({"prompt": TURN[:1], "chosen": TURN[1:], "rejected": []}, TURN),
    "question and answer": ({"question": QUESTION, "answer": ANSWER}, TURN),
    "messages in a string": ({"messages": json.dumps(TURN)}, TURN),
    "a function call": (
        {"conversations": [{"from": "function_call", "value": '{"name": "f", "arguments": {"a": 1}}'}]},
        [{"role": "assistant", "content": "",
          "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]}],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHATS)
def test_records_that_are_chats(name: str) -> None:
    record, messages = CHATS[name]
    assert plain_text(record) is None and chat(record) == messages


@pytest.mark.parametrize(
    "record",
    ["text", {"text": "text"}, {"inputs_pretokenized": "text"}, {"content": "text"}, {"prompt": "text"}],
    ids=str,
)
def test_records_that_are_one_text(record: Any) -> None:
    assert plain_text(record) == "text"


def test_a_role_that_nobody_knows() -> None:
    with pytest.raises(ValueError, match="unknown role 'narrator'"):
        chat({"conversations": [{"from": "narrator", "value": "x"}]})


def test_tools_in_a_string() -> None:
    assert tools({"tools": '[{"name": "f"}]'}) == [{"name": "f"}] and tools({"tools": ""}) is None


ROWS = [{"text": "one, with a comma"}, {"text": 'two\nlines and "quotes"'}]


def as_csv(delimiter: str) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, ["text", "id"], delimiter=delimiter)
    writer.writeheader()
    writer.writerows(row | {"id": 1} for row in ROWS)
    return out.getvalue()


LINES = "".join(json.dumps(row) + "\n" for row in ROWS)
#: name of the file -> its content
FILES: dict[str, bytes] = {
    "a.jsonl": LINES.encode(),
    "bom.jsonl": b"\xef\xbb\xbf" + LINES.encode(),
    "crlf.jsonl": LINES.replace("\n", "\r\n").encode(),
    "a.ndjson": LINES.encode(),
    "packed.jsonl.gz": gzip.compress(LINES.encode()),
    "packed-without-its-name.jsonl": gzip.compress(LINES.encode()),
    "a.json": json.dumps(ROWS).encode(),
    "bom.json": b"\xef\xbb\xbf" + json.dumps(ROWS).encode(),
    "packed.json.gz": gzip.compress(json.dumps(ROWS).encode()),
    "data.json": json.dumps({"version": 1, "data": ROWS}).encode(),
    "train.json": json.dumps({"train": ROWS, "test": []}).encode(),
    "lines.json": LINES.encode(),
    "a.csv": as_csv(",").encode(),
    "bom.csv": b"\xef\xbb\xbf" + as_csv(",").encode(),
    "a.tsv": as_csv("\t").encode(),
    "packed.csv.gz": gzip.compress(as_csv(",").encode()),
}


@pytest.mark.parametrize("name", FILES)
def test_files_that_are_read(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(FILES[name])
    assert [plain_text(record) for _, record in read_records(tmp_path / name)] == [row["text"] for row in ROWS]


#: name of the file -> (its content, words of the line, words of the way out)
OTHERS: dict[str, tuple[bytes, str, str]] = {
    "a.parquet.gz": (gzip.compress(b"PAR1\x15\x04"), "Parquet packed by gzip", "gunzip"),
    "a.arrow": (b"ARROW1\0\0", "Arrow", "read_feather"),
    "a.xlsx": (b"PK\x03\x04..", "Excel", ".csv"),
    "a.jsonl.zst": (b"\x28\xb5\x2f\xfd..", "zstd", "zstd -d"),
    "a.zip": (b"PK\x03\x04..", "zip", "unpack"),
    "a.pkl": (b"\x80\x04..", "pickle", "never opened"),
    "utf16.jsonl": (LINES.encode("utf-16"), "UTF-16", "iconv -f UTF-16"),
    "utf16-be.txt": (b"\xfe\xff\0a", "UTF-16", "iconv"),
    "utf16-without-bom.jsonl": ("{}".encode("utf-16-le"), "zero bytes", "iconv"),
    "gbk.jsonl": (json.dumps("中文", ensure_ascii=False).encode("gbk"), "not UTF-8", "iconv -f GBK"),
    "cut-off.jsonl.gz": (gzip.compress(LINES.encode() * 200)[:-20], "cannot be read", "give a .jsonl"),
    "a.yaml": (b"text: a", "must be .jsonl", "convert"),
    "empty.jsonl": (b"", "fewer than 16 tokens", "--calib"),
    "empty.csv": (b"", "fewer than 16 tokens", "--calib"),
    "columns.csv": (b"a,b\n1,2\n", "has the keys 'a', 'b'", "correct"),
    "keys.jsonl": (b'{"id": 1, "url": "x"}', "has the keys 'id', 'url'", "correct"),
    "roles.jsonl": (b'{"conversations": [{"from": "x", "value": "y"}]}', "unknown role 'x'", "correct"),
    "object.json": (b'{"a": {"b": 1}}', "has the keys 'a'", "correct"),
}


@pytest.mark.parametrize("mode", ["--dry-run", "--quiet"])
@pytest.mark.parametrize("name", OTHERS)
def test_files_that_are_not_read_are_named_in_a_dry_run_too(
    name: str, mode: str, tiny_source: Path, tmp_path: Path
) -> None:
    content, words, fix = OTHERS[name]
    (tmp_path / name).write_bytes(content)
    done = in_process("quantize", tiny_source, tmp_path / "out", "--calib", tmp_path / name, mode)
    assert_one_clear_line(done, 2, name, words)
    assert fix in done.stderr and not (tmp_path / "out").exists()


def test_a_packed_line_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """4 MB of zeros are some kB packed: no more is unpacked than a record may have."""
    monkeypatch.setattr(records, "MAX_RECORD", 1000)
    (tmp_path / "bomb.jsonl.gz").write_bytes(gzip.compress(b'"' + b"0" * 4_000_000))
    with pytest.raises(TextError, match="longer than 1000"):
        list(read_records(tmp_path / "bomb.jsonl.gz"))
