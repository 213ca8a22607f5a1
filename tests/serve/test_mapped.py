"""Weights that stay where the checkpoint's files are mapped."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from glm5_ascend.serve.plugin import mapped_files


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    tensors = {"whole": torch.ones(512, 8192, dtype=torch.int8), "narrow": torch.ones(4, 96, dtype=torch.int8)}
    save_file(tensors | {"wide": torch.ones(4, 64)}, tmp_path / "model.safetensors")
    return tmp_path


def load(directory: Path, name: str) -> torch.Tensor:
    with safe_open(directory / "model.safetensors", framework="pt") as file:
        tensor: torch.Tensor = file.get_tensor(name)
    return tensor


def resident(file: Path) -> int:
    """Bytes of a mapped file in this process's memory."""
    text, total, inside = Path("/proc/self/smaps").read_text(), 0, False
    for line in text.splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = line.endswith(str(file))
        elif inside and line.startswith("Rss:"):
            total += 1024 * int(line.split()[1])
    return total


def test_a_loaded_tensor_is_a_view_of_the_file(directory: Path) -> None:
    """What all of this rests on: safetensors maps the file and reads nothing before it is needed."""
    tensor = load(directory, "whole")
    assert resident(directory / "model.safetensors") < tensor.nbytes / 2
    assert int(tensor.sum()) == 512 * 8192
    assert resident(directory / "model.safetensors") >= tensor.nbytes


@pytest.mark.parametrize("fits", [True, False])
def test_files_that_fit_are_read_at_once(fits: bool, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped_files, "available", lambda: 10**12 if fits else 0)
    tensor = load(directory, "whole")
    mapped_files.read_ahead(directory)
    assert (resident(directory / "model.safetensors") >= tensor.nbytes) == fits


def test_only_whole_parameters_stay_in_the_file(directory: Path) -> None:
    pytest.importorskip("vllm")
    from glm5_ascend.serve.plugin.linear import mapped

    copied: list[torch.Tensor] = []
    loader = mapped(lambda param, loaded, *shard: copied.append(loaded))
    whole, narrow, wide = (load(directory, name) for name in ("whole", "narrow", "wide"))
    kept = torch.nn.Parameter(torch.empty_like(whole), requires_grad=False)
    loader(kept, whole)
    assert kept.data_ptr() == whole.data_ptr() and not copied
    fused = torch.nn.Parameter(torch.empty(1024, 8192, dtype=torch.int8), requires_grad=False)
    other_type = torch.nn.Parameter(torch.empty(4, 64, dtype=torch.bfloat16), requires_grad=False)
    no_whole_vectors = torch.nn.Parameter(torch.empty_like(narrow), requires_grad=False)
    loader(fused, whole)
    loader(kept, whole, 0)  # a part of a fused parameter, even if it is as large
    loader(other_type, wide)
    loader(no_whole_vectors, narrow)
    assert len(copied) == 4
