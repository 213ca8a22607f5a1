"""Memory: what is predicted, what is chosen from it, and what a process really takes on layers of some size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from glm5_ascend.errors import OutputError
from glm5_ascend.quantize.estimate import memory as budget
from glm5_ascend.quantize.job import predict, prepare
from glm5_ascend.quantize.options import QuantizeOptions
from tests.support.command import ROOT


def test_threads_are_given_up_for_memory(tiny_source: Path, tmp_path: Path) -> None:
    plan = prepare(QuantizeOptions(tiny_source, tmp_path / "out")).plan
    one, four = (budget.peak_bytes(plan, 512, threads) for threads in (1, 4))
    assert one < four
    assert budget.threads_within(plan, 512, 4, four) == 4
    assert budget.threads_within(plan, 512, 4, four - 1) < 4
    assert budget.threads_within(plan, 512, 4, one) == 1
    with pytest.raises(OutputError, match=r"--max-ram .* this model needs"):
        budget.threads_within(plan, 512, 4, one - 1)


def test_prediction_follows_the_work(tiny_source: Path, tmp_path: Path) -> None:
    few, many = (
        predict(prepare(QuantizeOptions(tiny_source, tmp_path / "out", samples=samples, threads=1)))
        for samples in (2, 2000)
    )
    assert few.activation_bytes * 1000 == many.activation_bytes
    assert few.peak_rss_bytes == many.peak_rss_bytes  # activations lie on disk
    assert few.seconds < many.seconds
    assert few.output_bytes < few.source_bytes


@pytest.mark.parametrize(("recipe", "length"), [("w4a8", 128), ("w4a8-best", 128), ("w8a8", 128), ("w8a8", 3000)])
def test_a_middle_sized_model_stays_within_its_memory(recipe: str, length: int, tmp_path: Path) -> None:
    """Hidden size 3072, 0.36 GB: measured peak below the prediction, and below what was allowed."""
    model, samples, limit = tmp_path / "model", *(("4", 1.6) if length < 1024 else ("2", 4.0))
    make = [
        sys.executable,
        ROOT / "benchmarks/tools/make_model.py",
        model,
        "--preset",
        "mid",
        "--experts",
        "4",
        "--mtp",
        "0",
    ]
    subprocess.run(make, check=True)
    command = [sys.executable, "-m", "glm5_ascend", "quantize", model, tmp_path / "out", "--json", "--quiet"]
    command += ["--recipe", recipe, "--samples", samples, "--seq-len", str(length), "--max-ram", f"{limit}GiB"]
    planned = json.loads(subprocess.run([*command, "--dry-run"], check=True, capture_output=True, text=True).stdout)
    done = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    predicted = planned["prediction"]["peak_rss_bytes"]
    assert done["peak_rss_bytes"] <= predicted <= limit * 1024**3
    print(f"{recipe}, {length} tokens: {done['peak_rss_bytes']:,} bytes of {predicted:,} predicted")


def test_the_real_glm5_is_planned_on_any_machine(tmp_path: Path) -> None:
    """78 layers, 256 experts, 1.5 TB of holes: what `--dry-run` says before the disks are bought."""
    model = tmp_path / "glm5"
    make = [sys.executable, ROOT / "benchmarks/tools/make_model.py", model, "--preset", "real", "--hollow"]
    subprocess.run([*make, "--layers", "78", "--dense", "3", "--mtp", "1"], check=True)
    command = [sys.executable, "-m", "glm5_ascend", "quantize", model, tmp_path / "out", "--json", "--quiet"]
    command += ["--dry-run", "--samples", "64", "--seq-len", "2048", "--max-ram", "8GiB", "--threads", "2"]
    done = subprocess.run([str(part) for part in command], check=False, capture_output=True, text=True)
    answer = json.loads(done.stdout)
    found = answer["prediction"]
    assert found["source_bytes"] == 1_507_728_316_928  # what GLM-5's bf16 checkpoint holds without MTP copies
    assert 410e9 < found["output_bytes"] < 425e9
    assert found["activation_bytes"] == 64 * 2048 * 6144 * (8 + 8 + 4)
    assert found["peak_rss_bytes"] < 8 * 1024**3
    assert found["seconds"] > 3600
    if done.returncode:  # the disk is too small here; the numbers are shown all the same
        assert (done.returncode, answer["exit_code"]) == (2, 2)
        assert "GB free on this disk" in answer["error"]["message"]
