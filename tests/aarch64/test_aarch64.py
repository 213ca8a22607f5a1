"""On aarch64, emulated: commands, ops in the instructions of Kunpeng 920, a quantization beside this machine's.

`EMULATED` names a folder that `python -m tests.aarch64.support.emulated FOLDER` has made. What an emulator of processes
cannot show: speed, threads racing on a weakly ordered memory, and vLLM, whose aarch64 wheel is too slow to start in it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml

from glm5_ascend.fidelity.api import evaluate
from glm5_ascend.quantize import quantize
from glm5_ascend.verify import verify
from glm5_kernels import registry
from glm5_kernels.parity.cases import cases
from glm5_kernels.parity.run import judge, results
from tests.aarch64.support.differences import Differences, compare
from tests.aarch64.support.emulated import Emulated, make, obstacle
from tests.support.command import ROOT
from tests.support.tiny_model import write_calibration, write_tiny_model

pytestmark = [pytest.mark.aarch64, pytest.mark.skipif(obstacle() is not None, reason=str(obstacle()))]


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulated]:
    folder = os.environ.get("EMULATED")
    yield make(Path(folder).resolve() if folder else tmp_path_factory.mktemp("aarch64"))


def test_it_is_another_processor(emulated: Emulated) -> None:
    done = emulated.run(["-c", "import platform, torch, glm5_ascend; print(platform.machine(), torch.__version__)"])
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("aarch64 ")


def test_doctor(emulated: Emulated) -> None:
    done = emulated.run(["-m", "glm5_ascend", "doctor", "--json"])
    output = json.loads(done.stdout)
    assert done.returncode == output["exit_code"], done.stderr[-2000:]
    assert any("aarch64" in json.dumps(row) for row in output["rows"])


#: The references in torch would take an hour there.
RUN_OPS = """import sys, torch
from glm5_kernels.parity.run import results
torch.save([results(case, "cpu", "cpu") for case in torch.load(sys.argv[1], weights_only=False)], sys.argv[2])"""


@pytest.mark.parametrize("isa", ["dotprod", "i8mm"])
def test_parity_of_all_ops(emulated: Emulated, isa: str, tmp_path: Path) -> None:
    """Every op for Kunpeng 920, and for CPUs with i8mm, against the references that this machine computes."""
    tried, operands, output = list(cases()), tmp_path / "operands", tmp_path / "output"
    torch.save(tried, operands)
    done = Emulated(emulated.folder, isa).run(["-c", RUN_OPS, str(operands), str(output)])
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    pairs = zip(tried, torch.load(output, weights_only=False), strict=True)
    rows = [row for case, got in pairs for row in judge(case, isa, got, results(case, "reference", "cpu"))]
    assert not [row for row in rows if not row.ok]
    assert {row.op for row in rows} == set(registry.OPS) and len(rows) > 300
    done = Emulated(emulated.folder, isa).run(["-m", "glm5_ascend", "parity", "--op", "rms_norm"])
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def quantize_both(emulated: Emulated, folder: Path, recipe: str) -> tuple[Path, Path, Path]:
    """The source of a very small model, and its outputs made here and there."""
    source, calib = write_tiny_model(folder / "source"), write_calibration(folder / "calib.jsonl")
    here, there = folder / "here", folder / "there"
    job = {"recipe": recipe, "calib": calib, "samples": 3, "seq_len": 64}
    quantize(source, here, **job)  # type: ignore[arg-type]
    command = ["-m", "glm5_ascend", "quantize", str(source), str(there), "--recipe", recipe, "--calib", str(calib)]
    done = emulated.run([*command, "--samples", "3", "--seq-len", "64", "--quiet"])
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    checked = emulated.run(["-m", "glm5_ascend", "verify", str(there), "--against", str(source)])
    assert checked.returncode == 0, checked.stdout[-2000:] + checked.stderr[-2000:]
    assert verify(there, against=source).ok
    return source, here, there


def test_weights_are_rounded_alike(emulated: Emulated, tmp_path: Path) -> None:
    """Rotation, scales and rounding of weights: the same integers, but where the last bit of a scale differs."""
    recipe = yaml.safe_load((ROOT / "quant_recipes" / "w4a8.yaml").read_text(encoding="utf-8"))
    steps = recipe["spec"]["process"]
    recipe["spec"]["process"] = [step for step in steps if step["type"] in ("quarot", "group")]
    (tmp_path / "plain.yaml").write_text(yaml.safe_dump(recipe))
    _, here, there = quantize_both(emulated, tmp_path, str(tmp_path / "plain.yaml"))
    differences: Differences = compare(here, there)
    print(differences)
    assert differences.integers > 10_000 and differences.other_integers <= differences.integers * 1e-3
    assert differences.largest_step <= 1 and differences.largest_relative < 1e-5


def test_a_calibrated_quantization_is_as_good(emulated: Emulated, tmp_path: Path) -> None:
    """The last bits of a forward pass in bf16 differ between processors, and a search for scales may then take another
    of two that are as good: the outputs differ, their error must not."""
    source, here, there = quantize_both(emulated, tmp_path, "w4a8")
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"Question {number}: what is {number} plus one?" for number in range(400)))
    figures = [evaluate(x, against=source, text=text, window=64, windows=16).rows for x in (here, there)]
    one, other = (next(row.value for row in rows if row.name == "kl_mean") for rows in figures)
    print(compare(here, there), f"KL here {one:.5f}, there {other:.5f}")
    assert abs(other - one) < 0.2 * one
