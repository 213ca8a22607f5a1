"""Checkpoints of zeros, of any size: complete as if quantized, and served with less memory than they have."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pytest

from benchmarks.tools.limited_server import FailedError, control_group
from glm5_ascend.verify import verify
from tests.support.command import ROOT, made_model, ran


def test_a_hollow_checkpoint_is_complete(tmp_path: Path) -> None:
    """Files, names, shapes and rotations are those that `quantize` writes, as the check of `serve` wants them."""
    model = made_model(tmp_path / "model", "--preset", "tiny", "--mtp", "1", "--recipe", "w4a8")
    report = verify(model, engine="vllm", deep=False)
    assert report.ok and not report.findings, report.lines()
    assert {path.name for path in tmp_path.glob("model/*") if path.suffix == ".json"} >= {
        "config.json", "tokenizer.json", "quant_model_description.json", "glm5_ascend_provenance.json",
    }  # fmt: skip


@pytest.mark.long
@pytest.mark.server
def test_a_server_with_less_memory_than_weights(tmp_path: Path) -> None:
    """Real widths, few layers: the script checks tokens, MTP, where weights are read from, anonymous memory, Ctrl-C."""
    try:
        with control_group(6 * 10**9):
            pass
    except FailedError as error:
        pytest.skip(str(error))
    with tempfile.TemporaryDirectory(dir=tmp_path) as work:
        command = [sys.executable, ROOT / "benchmarks/bench_hollow.py", work, "--layers", "4", "--memory", "6"]
        done = ran(*command, "--prompt", "300", timeout=None)
    print(done.stdout, done.stderr)
    assert done.returncode == 0 and "ok: all checks passed" in done.stdout, done.stderr
