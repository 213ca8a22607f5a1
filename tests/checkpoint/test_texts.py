"""Texts of any length are read and tokenized in pieces: the same tokens, bounded memory, no more than is asked for."""

from __future__ import annotations

import json
import os
import sys
from itertools import chain, pairwise
from pathlib import Path

import pytest

from glm5_ascend.checkpoint import records as record_files
from glm5_ascend.checkpoint import texts
from glm5_ascend.checkpoint.records import read_records
from glm5_ascend.checkpoint.texts import encoded_pieces, pieces
from glm5_ascend.checkpoint.tokenizer import SourceTokenizer
from glm5_ascend.errors import TextError
from glm5_ascend.quantize.calibration.dataset import load_calibration
from tests.support.command import said
from tests.support.tiny_model import VOCAB_SIZE

WORDS = "The residual stream of a transformer carries\nfew  very large channels;\n\n    they stay.\n"


@pytest.mark.parametrize("part", [1, 7, 50, 10_000])
def test_pieces_add_up_and_end_between_words(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "PIECE", 50)
    text = WORDS * 5 + "no line end in sight but many words " * 5 + "x" * 200 + " \u00e9\u4e2d" * 40
    records = list(pieces(text[i : i + part] for i in range(0, len(text), part)))
    assert "".join(records) == text and max(map(len, records)) <= 50
    for before, after in pairwise(records):
        line_end = before.endswith("\n") and not after[0].isspace()
        between = before[-1].isalnum() and after[0] == " " and after[1].isalnum()
        assert line_end or between or len(before) == 50
    assert sum(len(piece) == 50 for piece in records) <= 5  # only inside the word of 200 characters


def test_a_long_text_gives_the_same_tokens(tmp_path: Path) -> None:
    """With the demo model's tokenizer, which merges words: every boundary is one of its own."""
    from glm5_ascend.demo_model.resources import data_folder

    tokenizer, text = SourceTokenizer(data_folder()), WORDS * 2000
    assert len(text) > 2 * texts.PIECE
    for path, content in ((tmp_path / "a.txt", text), (tmp_path / "a.jsonl", json.dumps(text))):
        path.write_text(content)
        records = [piece.ids for piece in encoded_pieces(path, tokenizer)]
        assert len(records) > 2 and list(chain(*records)) == tokenizer.encode(text)


def test_too_long_a_line_is_refused_by_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_files, "MAX_RECORD", 100)
    (tmp_path / "a.jsonl").write_text('"ok"\n"' + "x" * 200 + '"\n')
    with pytest.raises(TextError, match=r"a\.jsonl:2: longer than 100"):
        list(read_records(tmp_path / "a.jsonl"))
    (tmp_path / "a.json").write_text(json.dumps(["x" * 200]))
    with pytest.raises(TextError, match=r"a\.json: longer than 100"):
        list(read_records(tmp_path / "a.json"))


def test_only_what_is_needed_is_read(tiny_source: Path, tmp_path: Path) -> None:
    """The file after the needed tokens is not even text."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(json.dumps(WORDS).encode() + b"\n" * 20_000 + b"\xff\xff {\n")
    (records,) = load_calibration(path, tiny_source, VOCAB_SIZE, 1, 32).sequences
    assert len(records) == 32
    with pytest.raises(TextError, match="cannot be read"):
        load_calibration(path, tiny_source, VOCAB_SIZE, 100, 32)


CHILD = """
import sys
from pathlib import Path
from glm5_ascend.quantize.calibration.dataset import load_calibration
from glm5_ascend.quantize.pipeline import _peak_rss
path, source = Path(sys.argv[1]), Path(sys.argv[2])
load_calibration(path.parent / "small.txt", source, 320, 1, 32)
before = _peak_rss()
found = load_calibration(path, source, 320, 4, int(sys.argv[3]))
print(found.tokens, _peak_rss() - before)
"""


@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
def test_memory_does_not_depend_on_the_file(suffix: str, tiny_source: Path, tmp_path: Path) -> None:
    """One line; as many tokens are asked for as half a MB has. Whole, 3 MB took 3.9 GB."""
    (tmp_path / "small.txt").write_text(WORDS)
    path, line = tmp_path / f"big{suffix}", "word after word " * 65536
    with path.open("w") as file:
        file.write('"' if suffix == ".jsonl" else "")
        for _ in range(3):
            file.write(line)
        file.write('"\n' if suffix == ".jsonl" else "")
    tokens, growth = map(int, said(sys.executable, "-c", CHILD, path, tiny_source, 2**17).split())
    assert tokens == 2**19
    assert growth < 400e6 + (5 * os.path.getsize(path) if suffix == ".jsonl" else 0)
