"""One row per planted fault: its level and words, and exactly which ways of calling `verify` find it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from glm5_ascend.checkpoint.checks.report import Report
from glm5_ascend.verify import verify
from tests.conftest import Quantized
from tests.verify.faults import flash, keys, texts, values
from tests.verify.faults.row import ALL, HASHES, QUICK, SOURCE, Linked, Row

ROWS: list[Row] = [*keys.ROWS, *texts.ROWS, *values.ROWS, *flash.ROWS]


@pytest.fixture(scope="session")
def sources(tiny_source: Path, tiny_flash: Path) -> dict[str, Path]:
    return {"glm5": tiny_source, "flash": tiny_flash}


def called(mode: str, ck: Linked, source: Path) -> Report:
    return verify(ck.directory, against=source if mode == SOURCE else None, deep=mode != QUICK)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_planted_fault(row: Row, tiny_quantized: Quantized, sources: dict[str, Path], tmp_path: Path) -> None:
    """The least way of calling that finds it, and the next lower one, which must not."""
    least = ALL.index(row.modes[0])
    source = sources[row.model]
    check_modes(row, ALL[max(least - 1, 0) : least + 1], tiny_quantized(row.recipe, source), source, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_all_modes(row: Row, tiny_quantized: Quantized, sources: dict[str, Path], tmp_path: Path) -> None:
    source = sources[row.model]
    check_modes(row, ALL, tiny_quantized(row.recipe, source), source, tmp_path)


def check_modes(row: Row, modes: str, correct: Path, source: Path, tmp_path: Path) -> None:
    ck = Linked(correct, tmp_path / "copy")
    row.edit(ck)
    for mode in sorted(modes, key=lambda mode: mode != HASHES):  # hashes are removed for the others
        if mode != HASHES:
            ck.forget_hashes()
        report = called(mode, ck, source)
        lines = [f.line() for f in report.findings if f.level == row.level and re.search(row.words, f.line())]
        text = "\n".join(report.lines())
        assert bool(lines) == (mode in row.modes), f"{mode}: {text}"
        if mode in row.modes:
            assert report.ok is False or row.level == "warning", text
            assert all(f.fix and (f.file or f.tensor) and f.line().isprintable() for f in report.findings)
        elif mode not in (HASHES, SOURCE) and row.level == "error":  # those may say it in other words
            assert report.ok, f"{mode}: {text}"
            assert report.unchecked


@pytest.mark.parametrize(
    ("bits", "words"), [((1 << 40) + 0x3F800000, "more than the 32 bits"), (0x7FC00000, "scales must be finite")]
)
def test_bits_of_an_int64_deq_scale(bits: int, words: str, tiny_w8a8: Path, tmp_path: Path) -> None:
    """Beside the error that this model runs in bfloat16."""
    ck = Linked(tiny_w8a8, tmp_path / "copy")
    values.as_int64(bits)(ck)
    ck.forget_hashes()
    assert [f.tensor for f in verify(ck.directory).findings if words in f.message] == [values.DEQ]
