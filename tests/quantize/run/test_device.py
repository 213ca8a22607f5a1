"""`--device npu` takes the code path of the CPU: shown on a simulated device that refuses what a real one refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from glm5_ascend.errors import Glm5Error, MissingEnvironmentError
from glm5_ascend.model.device import find_device
from glm5_kernels import registry
from tests.quantize.support import python_device
from tests.support.command import said
from tests.support.tiny_model import quantize_tiny, write_calibration

DEVICE = Path(python_device.__file__)


@pytest.mark.parametrize("recipe", ["w4a8-best", pytest.param("w8a8", marks=pytest.mark.long)])
def test_the_same_bytes_on_another_device(
    recipe: str, tiny_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device computes with the plain versions of the kernels; the host does when told to."""
    monkeypatch.setenv("GLM5_KERNELS", "reference")  # for the child process
    calib, operators = write_calibration(tmp_path / "calib.jsonl"), tmp_path / "operators.json"
    out = tmp_path / "out"
    said(sys.executable, DEVICE, tiny_source, out, recipe, calib, operators)
    assert {"aten::mm", "aten::amax", "aten::round"} <= set(json.loads(operators.read_text()))  # it did compute there
    registry.select("reference")
    try:
        on_device, on_host = tensors(out), tensors(quantize_tiny(tiny_source, tmp_path / recipe, recipe))
    finally:
        registry.select(None)
    assert on_device.keys() == on_host.keys()
    assert not [name for name in on_device if not on_device[name].equal(on_host[name])]


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    return {name: value for path in checkpoint.glob("*.safetensors") for name, value in load_file(path).items()}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("npu", "torch_npu does not load"),
        ("cuda:7", "--device cuda:7: this torch is no CUDA build"),
        ("gpu", "unknown device"),
        ("npu:x", "unknown device"),
        ("cuda:-1", "unknown device"),
    ],
)
def test_a_device_that_is_not_here(name: str, message: str) -> None:
    with pytest.raises(Glm5Error, match=message) as raised:
        find_device(name, ("npu", "cuda"))
    if message == "unknown device":
        assert raised.value.tip == "give one of cpu, npu, npu:N, cuda, cuda:N"


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA build on a machine without that many."""
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert find_device("cuda:1", ("npu", "cuda")) == torch.device("cuda", 1)
    with pytest.raises(MissingEnvironmentError, match="--device cuda:2: no CUDA device 2, torch sees 2") as raised:
        find_device("cuda:2", ("npu", "cuda"))
    assert raised.value.tip == "run nvidia-smi"
