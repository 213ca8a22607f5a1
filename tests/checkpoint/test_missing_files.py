"""Several files of an index are missing: their number and the first one, in one error."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from glm5_ascend.verify import verify
from tests.support.command import assert_one_clear_line, in_process
from tests.support.tiny_model import write_tiny_model


@pytest.mark.parametrize(("gone", "words"), [
    ((2,), "model-00002-of-00005.safetensors: not found, but"),
    ((1, 3), "2 of 5 files of the index are missing, first model-00001-of-00005.safetensors"),
    ((2, 3, 4, 5), "4 of 5 files of the index are missing, first model-00002-of-00005.safetensors"),
])  # fmt: skip
def test_of_a_source(gone: tuple[int, ...], words: str, tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "source", shards=5)
    for shard in gone:
        (source / f"model-{shard:05d}-of-00005.safetensors").unlink()
    assert_one_clear_line(in_process("quantize", source, tmp_path / "out", "--dry-run"), 2, words)


def test_of_an_output(tiny_w8a8: Path, tmp_path: Path) -> None:
    """And no error for any of the tensors in them."""

    from tests.verify.support.editor import Checkpoint

    out = tmp_path / "out"
    shutil.copytree(tiny_w8a8, out)
    ck = Checkpoint(out)
    with ck.json(ck.index) as index:
        names = list(index["weight_map"])
        index["weight_map"] = {name: f"model-{place % 7}.safetensors" for place, name in enumerate(names)}
    for shard in ck.shards:
        (out / shard).unlink()
    ck.forget_hashes()
    findings = [f for f in verify(out).findings if f.level == "error"]
    assert "7 of 7 files of the index are missing" in findings[0].message
    assert findings[0].file == "model-0.safetensors"
    assert {finding.id for finding in findings} == {"index.file_missing"}, findings
