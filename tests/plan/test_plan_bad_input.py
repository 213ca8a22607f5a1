"""What `glm5-ascend plan` refuses, each in one clear line."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from glm5_ascend.cli import run
from glm5_ascend.files.resources import data_dir
from tests.conftest import Copy
from tests.support.tiny_model import change_json


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line that says what is wrong."""
    assert run(["plan", *map(str, arguments)]) == 2
    out, err = capsys.readouterr()
    assert not out and "Traceback" not in err
    first, fix = err.rstrip("\n").split("\n")
    assert first.startswith("error: ") and fix.startswith("  fix: ")
    return first


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--hardware", "a9"), "a9"),
        (("--hardware", "no/such.yaml"), "no/such.yaml"),
        (("--model", "glm-4.7"), "glm-4.7"),
        (("--quant", "w2a2"), "w2a2"),
        (("--nodes", 0), "--nodes"),
        (("--workload", "in=100"), "out="),
        (("--workload", "in=100,out=x"), "out='x'"),
        (("--workload", "in=100,out=10,colour=3"), "colour"),
        (("--workload", "in=100,out=10,prefix_hit=90"), "prefix_hit"),
        (("--workload", "in=300000,out=10"), "202752"),
        (("--slo", "tpot=50"), "unit"),
        (("--slo", "tpot=1e-320ms"), "tpot='1e-320ms'"),
        (("--layout", f"tp=8,mtp={9**400}"), "mtp="),
        (("--layout", "tp=8,dp=4", "--nodes", 1), "takes 2 x a3"),
        (("--layout", "tp=16,dcp=4"), "dcp 4"),
        (("--layout", "tp=32,dp=1", "--nodes", 2), "tp 32"),
        (("--layout", "tp=8,prefill_dp=8"), "prefill_tp"),
        (("--layout", "tp"), "is not KEY=VALUE"),
        (("--layout", "tp=16,tp=8"), "'tp' is given twice"),
        (("--slo", ","), "--slo"),
        (("--workload", "in=100,out=10,hits=tape"), "hits='tape'"),
        (("--layout", "tp=8,dsa_cp=2"), "dsa_cp='2'"),
        (("--layout", "tp=1,dp=48"), "do not divide"),
        (("--layout", "tp=8,dp=6,ep=0"), "ep=0"),
        (("--mtp", 16), "mtp 16"),
        (("--workload", "in=3500,out=10,warm=2"), "warm"),
        (("--acceptance", "0.5,0.9"), "--acceptance"),
        (("--cache", "fp4"), "--cache fp4"),
        (("--model", "glm-5.3-flash", "--cache", "li"), "bf16"),
        (("--model", "glm-5.3-flash", "--layout", "tp=8,dcp=8"), "P74"),
        (("--model", "glm-5.3-flash", "--mtp", 8), "mtp 8: at most 7"),
        (("--model", "glm-5", "--quant", "w4a7"), "w4a7"),
        (("--hardware", "a2", "--quant", "w8a8", "--nodes", 1), "does not fit"),
        (("nowhere",), "nowhere"),
    ],
)
def test_bad_input_is_one_clear_line(
    arguments: tuple[object, ...], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert word in refused(capsys, *arguments)


@pytest.mark.parametrize(
    ("option", "wrong", "meant"),
    [("--model", "glm5.1", "glm-5.1"), ("--quant", "w4a", "w4a8"), ("--hardware", "a33", "a3")],
)
def test_a_typing_error_is_answered_with_what_was_meant(
    option: str, wrong: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", option, wrong]) == 2
    assert f"did you mean {meant}?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "word"),
    [({"dies_per_node": 0}, "dies_per_node"), ({"colour": 1}, "colour"), ({"rates": None}, "rates")],
)
def test_a_wrong_hardware_file_is_refused_by_key(
    change: dict[str, object], word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = yaml.safe_load((data_dir("plan/data") / "hardware" / "a3.yaml").read_text(encoding="utf-8"))
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(raw | change), encoding="utf-8")
    line = refused(capsys, "--hardware", path)
    assert word in line and "mine.yaml" in line


def test_weights_that_contradict_their_description(
    tiny_w4a8: Path, editable: Copy, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = editable(tiny_w4a8)
    change_json(copy / "quant_model_description.json", **{"model.layers.0.self_attn.o_proj.weight": "FLOAT"})
    assert "o_proj" in refused(capsys, copy)
