"""A hollow checkpoint (benchmarks/tools/make_model.py): zeros of any size, which `serve` takes as if quantized."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from glm5_ascend.verify import verify
from tests.support.command import ROOT, environment


def test_a_hollow_checkpoint_is_complete(tmp_path: Path) -> None:
    """Files, names, shapes and rotations are those that `quantize` writes, as the check of `serve` wants them."""
    command = [sys.executable, ROOT / "benchmarks/tools/make_model.py", tmp_path / "model", "--preset", "tiny"]
    subprocess.run([*command, "--mtp", "1", "--recipe", "w4a8"], check=True, env=environment())
    report = verify(tmp_path / "model", engine="vllm", deep=False)
    assert report.ok and not report.findings, report.lines()
    assert {path.name for path in tmp_path.glob("model/*") if path.suffix == ".json"} >= {
        "config.json", "tokenizer.json", "quant_model_description.json", "glm5_ascend_provenance.json",
    }  # fmt: skip
