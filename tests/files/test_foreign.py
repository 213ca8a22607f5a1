"""What is no file of the kind that its name says, before anything parses it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from glm5_ascend.checkpoint.shards import Shard
from glm5_ascend.errors import CheckpointError
from glm5_ascend.files.untrusted import read_json
from glm5_ascend.verify import verify
from tests.support.command import assert_one_clear_line, in_process
from tests.support.tiny_model import write_tiny_model

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 5363000000\n"


@pytest.mark.parametrize("pattern", ["*.safetensors", "tokenizer.json"])
def test_a_pointer_of_git_lfs_is_named(pattern: str, tiny_source: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(tiny_source, tmp_path / "model"))
    name = min(path.name for path in model.glob(pattern))
    (model / name).write_text(POINTER)
    with pytest.raises(CheckpointError, match="a pointer of Git LFS"):
        (Shard if name.endswith(".safetensors") else read_json)(model / name)
    run = in_process("quantize", model, tmp_path / "out", "--dry-run")
    assert_one_clear_line(run, 2, f"error: {model / name}: a pointer of Git LFS, not the file itself")  # its path once


def test_a_finding_names_its_file_once(tiny_source: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(tiny_source, tmp_path / "model"))
    (model / "tokenizer.json").write_text("{")
    messages = [finding.message for finding in verify(model).findings if finding.file == "tokenizer.json"]
    assert messages and not any(str(model) in finding for finding in messages)


def test_a_float_source_keeps_its_quantization_config(tmp_path: Path) -> None:
    """Without the key an engine would take FP8 weights for values."""
    findings = verify(write_tiny_model(tmp_path, dtype="fp8")).findings
    assert [finding.id for finding in findings] == ["description.unreadable"]
    assert "glm5-ascend quantize" in findings[0].fix
