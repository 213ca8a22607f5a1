"""Has a file changed since the quantizer wrote it?"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from glm5_ascend.checkpoint.checks.loaded_checkpoint import FLOATS
from glm5_ascend.checkpoint.checks.report import Report
from glm5_ascend.checkpoint.output import sha256
from glm5_ascend.checkpoint.types import ROT_FILE
from glm5_ascend.verify import verify
from glm5_ascend.verify.checked import Checked
from glm5_ascend.verify.description import check_description
from glm5_ascend.verify.open_checkpoint import open_directory
from glm5_ascend.verify.plausible import Doubts
from glm5_ascend.verify.read_once import read_once
from glm5_ascend.verify.tensors import check_tensors
from tests.conftest import Copy
from tests.verify.support.editor import INDEX


@pytest.mark.parametrize("name", ["chat_template.jinja", INDEX, "tokenizer.json"])
def test_an_edited_file(name: str, tiny_w4a8: Path, editable: Copy) -> None:
    """An error where the engine computes with it; a template people edit on purpose."""
    out = editable(tiny_w4a8)
    (out / name).write_text((out / name).read_text() + " ")
    level = "warning" if name == "chat_template.jinja" else "error"
    assert [(f.id, f.file, f.level) for f in verify(out).findings] == [("provenance.changed", name, level)]


def test_a_file_that_shrinks_while_it_is_read(tiny_w4a8: Path, editable: Copy) -> None:
    """Every float tensor behind its new end is named, no hash of it is taken, and the other shards are read."""
    report = Report(out := editable(tiny_w4a8))
    checkpoint = open_directory(out, report)
    schemes = check_description(checkpoint, report)
    checked = Checked(checkpoint, schemes, complete=check_tensors(checkpoint, schemes, report))
    shard = checkpoint.shards[next(file for file in checkpoint.shards if file != ROT_FILE)]
    end = shard.path.stat().st_size // 2
    os.truncate(shard.path, end)
    hashes = read_once(checked, checkpoint.shards, report, Doubts(checkpoint))
    lost = {f.tensor for f in report.findings if f.id == "shard.damaged"}
    # Of a linear whose scale is lost, the scale is named.
    assert lost == {name for name, entry in shard.entries.items() if entry.end > end and entry.dtype in FLOATS}
    assert hashes == {ROT_FILE: sha256(out / ROT_FILE)}
