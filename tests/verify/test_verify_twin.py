"""The same job on two machines: damage, or another instruction set? And: has a file changed since it was written?"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import torch

from glm5_ascend.errors import CheckpointError
from glm5_ascend.verify import Report, verify
from tests.support.command import ROOT
from tests.support.tiny_model import write_calibration
from tests.verify.support.editor import INDEX, PROVENANCE, Checkpoint
from tests.verify.support.integers import integers, linear, weight_scale

Copy = Callable[[Path], Path]
UP = "model.layers.1.mlp.experts.2.up_proj"


def write_again(checkpoint: Checkpoint, **facts: object) -> None:
    """Update the record, so that the quantizer seems to have written these bytes."""
    with checkpoint.json(PROVENANCE) as record:
        for name in record["outputs"]:
            data = (checkpoint.directory / name).read_bytes()
            record["outputs"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        record |= facts


def ids(report: Report) -> list[str]:
    return [finding.id for finding in report.findings]


@pytest.fixture
def plain_instructions(tiny_source: Path, tmp_path: Path) -> Path:
    """The tiny W4A8 made without AVX, by all the libraries torch calls."""
    plain = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41"}
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")]), "OMP_NUM_THREADS": "1"}
    without = {name: value for name, value in os.environ.items() if name not in plain}
    if torch.backends.cpu.get_cpu_capability() == "DEFAULT":  # these tests run without AVX themselves: then with it
        plain = {}
    command = [sys.executable, "-m", "glm5_ascend", "quantize", tiny_source, tmp_path / "w4a8", "--quiet"]
    command += ["--calib", write_calibration(tmp_path / "calib.jsonl"), "--samples", "4", "--seq-len", "64"]
    subprocess.run([str(part) for part in command], env=without | plain | paths, check=True)
    return tmp_path / "w4a8"


def test_another_instruction_set_is_no_damage(tiny_w4a8: Path, plain_instructions: Path, tiny_source: Path) -> None:
    facts = [json.loads((path / PROVENANCE).read_text())["machine"] for path in (tiny_w4a8, plain_instructions)]
    if facts[0] == facts[1]:
        pytest.skip(f"torch knows one instruction set of this processor only: {facts[0]['cpu_capability']}")
    for twin in (plain_instructions, plain_instructions / PROVENANCE):
        report = verify(tiny_w4a8, against=twin)
        assert report.ok, "\n".join(report.lines())
        (finding,) = report.findings
        assert finding.id == "twin.build"
        assert facts[0]["cpu_capability"] in finding.message and facts[1]["cpu_capability"] in finding.message
    assert verify(plain_instructions, against=tiny_source).ok


def test_equal_runs(tiny_w4a8: Path, editable: Copy) -> None:
    assert ids(verify(tiny_w4a8, against=editable(tiny_w4a8))) == []
    assert ids(verify(tiny_w4a8, against=tiny_w4a8 / PROVENANCE)) == []


def test_equal_builds_and_other_bytes_are_damage(tiny_w4a8: Path, editable: Copy) -> None:
    checkpoint = Checkpoint(editable(tiny_w4a8))
    norm = "model.layers.2.input_layernorm.weight"
    checkpoint.store({norm: checkpoint.read(norm) * (1 + 2**-20)})
    write_again(checkpoint)
    for twin in (tiny_w4a8, tiny_w4a8 / PROVENANCE):
        report = verify(checkpoint.directory, against=twin)
        assert not report.ok
        assert {(f.id, f.file) for f in report.findings} >= {("twin.differs", checkpoint.file_of[norm])}


def test_another_build_and_another_meaning_is_damage(tiny_w4a8: Path, editable: Copy) -> None:
    """One integer two steps off may be rounding. Two rows swapped, with all that belongs to them, are not."""
    checkpoint = Checkpoint(editable(tiny_w4a8))
    machine = json.loads((tiny_w4a8 / PROVENANCE).read_text())["machine"] | {"cpu_capability": "AVX9"}
    q = integers(checkpoint, UP)
    q[3, 5] += 2 if q[3, 5] < 0 else -2
    checkpoint.store(linear(checkpoint, UP, q))
    write_again(checkpoint, machine=machine)
    report = verify(checkpoint.directory, against=tiny_w4a8)
    assert ids(report) == ["twin.build"]
    assert "AVX9" in report.findings[0].message
    q[[3, 4]] = q[[4, 3]]
    scale = weight_scale(checkpoint, UP)
    checkpoint.store(linear(checkpoint, UP, q, scale))
    write_again(checkpoint, machine=machine)
    report = verify(checkpoint.directory, against=tiny_w4a8)
    assert not report.ok
    assert f"{UP}.weight" in {finding.tensor for finding in report.findings if finding.id == "against.mismatch"}


@pytest.mark.parametrize(
    "change", [{"seed": 7}, {"calibration": None}, {"tool": {"name": "glm5-ascend", "version": "0"}}]
)
def test_another_job_is_not_compared(change: dict[str, object], tiny_w4a8: Path, editable: Copy) -> None:
    checkpoint = Checkpoint(editable(tiny_w4a8))
    write_again(checkpoint, **change)
    (finding,) = verify(checkpoint.directory, against=tiny_w4a8).findings
    assert finding.id == "twin.inputs" and next(iter(change)) in finding.message


def test_names_of_the_same_inputs_do_not_matter(tiny_w4a8: Path, editable: Copy) -> None:
    checkpoint = Checkpoint(editable(tiny_w4a8))
    with checkpoint.json(PROVENANCE) as record:
        record["source"]["path"], record["recipe"]["name"] = "/elsewhere", "my.yaml"
        record["calibration"]["file"], record["command"] = "texts.jsonl", "glm5-ascend quantize a b"
    assert ids(verify(checkpoint.directory, against=tiny_w4a8)) == []


def test_the_other_has_changed_since(tiny_w4a8: Path, editable: Copy) -> None:
    other = editable(tiny_w4a8)
    shard = next(other.glob("*.safetensors"))
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1
    shard.write_bytes(raw)
    with pytest.raises(CheckpointError, match="not the bytes that were written"):
        verify(tiny_w4a8, against=other)


def test_without_a_record(tiny_w4a8: Path, editable: Copy) -> None:
    checkpoint = Checkpoint(editable(tiny_w4a8))
    checkpoint.forget_hashes()
    assert ids(verify(checkpoint.directory, against=tiny_w4a8)) == ["twin.inputs"]
    (checkpoint.directory / PROVENANCE).unlink()
    assert ids(verify(checkpoint.directory, against=tiny_w4a8)) == ["twin.inputs"]
    with pytest.raises(CheckpointError, match=f"{PROVENANCE}: not found"):
        verify(tiny_w4a8, against=checkpoint.directory)


@pytest.mark.parametrize(
    ("name", "level"), [("chat_template.jinja", "warning"), (INDEX, "error"), ("tokenizer.json", "error")]
)
def test_an_edited_file(name: str, level: str, tiny_w4a8: Path, editable: Copy) -> None:
    """An error where the engine computes with it; a template people edit on purpose."""
    out = editable(tiny_w4a8)
    (out / name).write_text((out / name).read_text() + " ")
    level = "warning" if name == "chat_template.jinja" else "error"
    assert [(f.id, f.file, f.level) for f in verify(out).findings] == [("provenance.changed", name, level)]


def test_another_tokenizer_is_no_twin(tiny_w4a8: Path, editable: Copy) -> None:
    out = editable(tiny_w4a8)
    with Checkpoint(out).json(PROVENANCE) as record:
        record["outputs"]["tokenizer.json"] = {"bytes": 1, "sha256": "0" * 64}
    findings = verify(tiny_w4a8, against=out / PROVENANCE).findings
    assert [(f.id, f.level, f.file) for f in findings] == [("twin.inputs", "error", "tokenizer.json")]


def test_odd_records(tiny_w4a8: Path, editable: Copy) -> None:
    """A damaged provenance file never stops the check of the rest."""
    out, chance = editable(tiny_w4a8), Random(0)
    odd = [None, 7, [], {}, "x", {"bytes": 0}, [1], {"a": {"bytes": None, "sha256": 3}}, True]
    keys = ["outputs", "seed", "machine", "versions", "source", "recipe", "calibration", "tool"]
    for _ in range(4):
        record = json.loads((tiny_w4a8 / PROVENANCE).read_text())
        for key in chance.sample(keys, 3):
            record[key] = chance.choice(odd)
        (out / PROVENANCE).write_text(json.dumps(record))
        for twin in (None, tiny_w4a8, tiny_w4a8 / PROVENANCE):
            json.dumps(verify(out, against=twin).to_dict())
        verify(tiny_w4a8, against=out / PROVENANCE)
