"""Edits a checkpoint with json, struct and the safetensors library alone: nothing of the code under test."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

INDEX = "model.safetensors.index.json"
DESCRIPTION = "quant_model_description.json"
SHARD = "quant_model_weights-00001-of-00001.safetensors"
PROVENANCE = "glm5_ascend_provenance.json"
QUAROT = "optional/quarot.safetensors"

LAYER = "model.layers.1."
ATTENTION = f"{LAYER}self_attn."
EXPERT = f"{LAYER}mlp.experts."
UP, DOWN = f"{EXPERT}2.up_proj", f"{EXPERT}2.down_proj"
Q_A, KV_A = f"{ATTENTION}q_a_proj", f"{ATTENTION}kv_a_proj_with_mqa"


class Editor:
    """One private copy of a checkpoint."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.shard = directory / SHARD

    @contextmanager
    def json(self, name: str) -> Iterator[dict[str, Any]]:
        path = self.directory / name
        content = json.loads(path.read_text())
        yield content
        path.write_text(json.dumps(content))

    @contextmanager
    def tensors(self) -> Iterator[dict[str, torch.Tensor]]:
        """All tensors, to be changed; index and description follow: a consistent writer made this mistake."""
        tensors = load_file(self.shard)
        before = set(tensors)
        yield tensors
        self.save(tensors)
        with self.json(DESCRIPTION) as description:
            for name in before - set(tensors):
                description.pop(name, None)
            for name in set(tensors) - before:
                module = name.rpartition(".")[0]
                description[name] = description.get(f"{module}.weight", "FLOAT")

    def save(self, tensors: dict[str, torch.Tensor]) -> None:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, self.shard, {"format": "pt"})
        with self.json(INDEX) as index:
            index["weight_map"] = dict.fromkeys(tensors, SHARD)
            index["metadata"]["total_size"] = sum(tensor.nbytes for tensor in tensors.values())

    def retype(self, module: str, kind: str, tensors: dict[str, torch.Tensor]) -> None:
        """Store `module` as `kind` with these tensors by suffix, in shard, index and description alike."""
        stored = {k: v for k, v in load_file(self.shard).items() if not k.startswith(f"{module}.")}
        self.save(stored | {f"{module}.{suffix}": tensor for suffix, tensor in tensors.items()})
        with self.json(DESCRIPTION) as description:
            for name in [name for name in description if name.startswith(f"{module}.")]:
                del description[name]
            description |= {f"{module}.{suffix}": kind for suffix in tensors}
            (self.directory / DESCRIPTION).write_text(json.dumps(description))

    def header(self) -> tuple[dict[str, Any], bytes]:
        raw = self.shard.read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        return json.loads(raw[8 : 8 + length]), raw[8 + length :]

    def write_header(self, header: dict[str, Any], data: bytes) -> None:
        encoded = json.dumps(header).encode()
        self.shard.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)


def nibbles(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(even rows, odd rows) of a packed weight, written with integer arithmetic only."""
    byte = packed.to(torch.int32) % 256
    low, high = byte % 16, byte // 16
    return ((low + 8) % 16 - 8).to(torch.int8), ((high + 8) % 16 - 8).to(torch.int8)


def pack(even: torch.Tensor, odd: torch.Tensor) -> torch.Tensor:
    byte = even.to(torch.int32) % 16 + 16 * (odd.to(torch.int32) % 16)
    return torch.where(byte > 127, byte - 256, byte).to(torch.int8)


def unpacked(packed: torch.Tensor) -> torch.Tensor:
    even, odd = nibbles(packed)
    return torch.stack([even, odd], 1).reshape(-1, packed.shape[1])
