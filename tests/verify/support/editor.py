"""Edits a checkpoint with json, struct and the safetensors library alone: nothing of the code under test."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

INDEX = "model.safetensors.index.json"
REFERENCE_INDEX = "quant_model_weights.safetensors.index.json"
DESCRIPTION = "quant_model_description.json"
PROVENANCE = "glm5_ascend_provenance.json"
QUAROT = "optional/quarot.safetensors"
ROT = "rot.weight"


def module_of(name: str) -> str:
    return name.rpartition(".")[0]


class Checkpoint:
    """One private copy of a quantized checkpoint, of any layout: where every tensor lies, and how to change it.

    Attributes:
        source: the float checkpoint it was made from, for mistakes of a quantizer.
        index: name of its index file.
        file_of, facts: tensor -> shard, and -> header entry (dtype, shape, data_offsets).
    """

    def __init__(self, directory: Path, source: Path | None = None) -> None:
        self.directory, self.source = directory, source
        self.index = INDEX if (directory / INDEX).is_file() else REFERENCE_INDEX
        raw: dict[str, Any] = json.loads((directory / "config.json").read_text())
        self.config: dict[str, Any] = raw.get("text_config", raw)
        self.refresh()

    def refresh(self) -> None:
        path = self.directory / DESCRIPTION
        self.description: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}  # a source has none
        self.shards = sorted(path.name for path in self.directory.glob("*.safetensors"))
        self.file_of: dict[str, str] = {}
        self.facts: dict[str, dict[str, Any]] = {}
        for file in self.shards:
            for name, facts in self.header(file)[0].items():
                if name != "__metadata__":
                    self.file_of[name], self.facts[name] = file, facts

    # -- what there is ------------------------------------------------------------------------------------------------

    def names(self, pattern: str = "") -> list[str]:
        """Tensors whose name contains a match of the regular expression."""
        return sorted(name for name in self.file_of if re.search(pattern, name))

    def shape(self, name: str) -> list[int]:
        return list(self.facts[name]["shape"])

    def kind(self, name: str) -> str:
        """Type of a tensor in the description; "" if it is not listed."""
        return str(self.description.get(name, ""))

    def modules(self, kind: str = "", pattern: str = "") -> list[str]:
        """Modules of that type (any if not given) whose name contains a match."""
        weights = self.names(r"\.weight$")
        return [module_of(n) for n in weights if kind in ("", self.kind(n)) and re.search(pattern, module_of(n))]

    def of_module(self, module: str) -> list[str]:
        return [name for name in self.names() if module_of(name) == module]

    def partner(self, module: str) -> list[str]:
        """Tensors of the module the engine fuses with this one (experts aside); which is wrong is anyone's guess."""
        parent, _, last = module.rpartition(".")
        pairs = {"q_a_proj": "kv_a_proj_with_mqa", "gate_proj": "up_proj"}
        other = (pairs | {second: first for first, second in pairs.items()}).get(last)
        return self.of_module(f"{parent}.{other}") if other and ".experts." not in module else []

    @property
    def layers(self) -> list[int]:
        matches = (re.search(r"\.layers\.(\d+)\.", name) for name in self.file_of)
        return sorted({int(match[1]) for match in matches if match})

    def read(self, name: str) -> torch.Tensor:
        with safe_open(self.directory / self.file_of[name], "pt") as file:
            return file.get_tensor(name)

    # -- how to change it ---------------------------------------------------------------------------------------------

    @contextmanager
    def json(self, name: str) -> Iterator[dict[str, Any]]:
        path = self.directory / name
        content = json.loads(path.read_text())
        yield content
        path.write_text(json.dumps(content))

    @contextmanager
    def model_keys(self) -> Iterator[dict[str, Any]]:
        """Keys of config.json that belong to the language model, to be changed."""
        with self.json("config.json") as config:
            yield config.get("text_config", config)

    def store(self, changes: dict[str, torch.Tensor | None], file: str | None = None) -> None:
        """Replace, add (to `file`, else beside the siblings) or remove (None) tensors.

        Index and description follow: a consistent writer made this mistake.
        """
        homes: dict[str, dict[str, torch.Tensor | None]] = {}
        for name, tensor in changes.items():
            homes.setdefault(self.file_of.get(name) or file or self._home(name), {})[name] = tensor
        for home, edits in homes.items():
            path = self.directory / home
            tensors = (load_file(path) if path.is_file() else {}) | edits
            tensors_left = {name: tensor.clone().contiguous() for name, tensor in tensors.items() if tensor is not None}
            if tensors_left:
                save_file(tensors_left, path, {"format": "pt"})
            else:
                path.unlink()
        with self.json(DESCRIPTION) as description:
            for name, tensor in changes.items():
                if tensor is None:
                    description.pop(name, None)
                elif name != ROT and name not in description:
                    description[name] = description.get(f"{module_of(name)}.weight", "FLOAT")
        self.refresh()
        with self.json(self.index) as index:
            index["weight_map"] = dict(self.file_of)
            sizes = [facts["data_offsets"] for facts in self.facts.values()]
            index["metadata"]["total_size"] = sum(end - start for start, end in sizes)

    def _home(self, name: str) -> str:
        def common(other: str) -> int:
            return next((i for i, (a, b) in enumerate(zip(name, other, strict=False)) if a != b), len(name))

        return self.file_of[max(self.file_of, key=common)]

    def retype(self, module: str, kind: str, tensors: dict[str, torch.Tensor]) -> None:
        """Store `module` as `kind` with these tensors by suffix, in shard, index and description alike."""
        old: dict[str, torch.Tensor | None] = dict.fromkeys(self.of_module(module))
        self.store(old | {f"{module}.{suffix}": tensor for suffix, tensor in tensors.items()})
        with self.json(DESCRIPTION) as description:
            description |= {f"{module}.{suffix}": kind for suffix in tensors}
        self.refresh()

    def header(self, file: str) -> tuple[dict[str, Any], bytes]:
        raw = (self.directory / file).read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        return json.loads(raw[8 : 8 + length]), raw[8 + length :]

    def write_header(self, file: str, header: dict[str, Any] | str, data: bytes) -> None:
        encoded = (header if isinstance(header, str) else json.dumps(header)).encode()
        (self.directory / file).write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)

    def forget_hashes(self) -> None:
        """Remove what our provenance knows about the bytes, or every edit would be found by its hash alone."""
        if (self.directory / PROVENANCE).is_file():
            with self.json(PROVENANCE) as provenance:
                provenance.pop("outputs", None)
