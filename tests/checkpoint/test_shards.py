"""Shards and indexes: the same tensors as the safetensors library, and one clear line for every damage."""

from __future__ import annotations

import json
import os
import random
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from glm5_ascend.checkpoint.index import CheckpointDir
from glm5_ascend.checkpoint.shards import Shard
from glm5_ascend.errors import CheckpointError
from tests.support.tiny_model import write_tiny_model

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.bool)


def one_line(error: pytest.ExceptionInfo[CheckpointError]) -> str:
    assert "\n" not in error.value.message and error.value.tip
    return error.value.message


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    tensors = {f"t{i}": torch.randn(3, i + 1).to(dtype) for i, dtype in enumerate(DTYPES)}
    tensors |= {
        "fp8": torch.randn(5, 7).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
    }
    save_file(tensors, tmp_path / "x.safetensors", {"format": "pt"})
    return tmp_path / "x.safetensors"


def rewrite(path: Path, header: Any, data: bytes = bytes(16)) -> None:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)


def test_reads_what_the_library_reads(shard: Path) -> None:
    ours, theirs = Shard(shard), load_file(shard)
    assert ours.entries.keys() == theirs.keys()
    assert ours.metadata == {"format": "pt"}
    for name, tensor in theirs.items():
        shard_read = ours.read(name)
        assert (shard_read.dtype, shard_read.shape) == (tensor.dtype, tensor.shape)
        if tensor.numel():
            assert torch.equal(shard_read.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("keep", [0, 5, 8, 100, -1])
def test_truncation_is_seen_before_anything_is_read(shard: Path, keep: int) -> None:
    size = shard.stat().st_size
    os.truncate(shard, keep if keep >= 0 else size + keep)
    with pytest.raises(CheckpointError, match=r"x\.safetensors.*truncated") as error:
        Shard(shard)
    one_line(error)


ENTRY = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}


@pytest.mark.parametrize(
    "header",
    [
        b"{",
        b"[1]",
        b"\xff\xfe",
        b'{"a": 1' + b"0" * 5000 + b"}",
        b"[" * 100_000,
        b'{"a\\fb": 0}',  # some readers take a form feed for a line end
        {"a": 1},
        {"a": {}},
        {"a": ENTRY | {"dtype": "F5"}},
        {"a": ENTRY | {"dtype": ["F32"]}},
        {"a": ENTRY | {"shape": [-4]}},
        {"a": ENTRY | {"shape": [2.0, 2]}},
        {"a": ENTRY | {"shape": "4"}},
        {"a": ENTRY | {"shape": [1 << 62, 1 << 62]}},
        {"a": ENTRY | {"data_offsets": [0, 17]}},
        {"a": ENTRY | {"data_offsets": [16, 0]}},
        {"a": ENTRY | {"data_offsets": [4, 20]}},
        {"a": ENTRY | {"data_offsets": [0]}},
        {"a": ENTRY, "b": ENTRY},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}},  # 8 bytes belong to nobody
        b'{"a": {"dtype": "I8", "shape": [16], "data_offsets": [0, 16]}, "a": {}}',
    ],
    ids=str,
)
def test_impossible_headers(tmp_path: Path, header: Any) -> None:
    rewrite(tmp_path / "x.safetensors", header)
    with pytest.raises(CheckpointError, match=r"x\.safetensors") as error:
        Shard(tmp_path / "x.safetensors")
    one_line(error)


def test_random_damage_never_ends_in_a_traceback(shard: Path) -> None:
    """Flip bytes in the header: the shard is refused, or every tensor still reads."""
    raw = shard.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    chance = random.Random(1)
    for _ in range(400):
        damaged = bytearray(raw)
        for _ in range(chance.randint(1, 4)):
            damaged[chance.randrange(8 + length)] = chance.randrange(256)
        shard.write_bytes(damaged)
        try:
            opened = Shard(shard)
            for name in opened.entries:
                opened.read(name)
        except CheckpointError as error:
            assert "\n" not in error.message


def test_index_and_no_index_give_the_same(tmp_path: Path) -> None:
    with_index = CheckpointDir(write_tiny_model(tmp_path / "a", shards=3))
    without = CheckpointDir(write_tiny_model(tmp_path / "b", shards=3, index=False))
    assert with_index.file_of == without.file_of
    assert len(with_index.shards) == 3
    assert torch.equal(with_index.read("lm_head.weight"), without.read("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"no tensor model\.nothing"):
        without.read("model.nothing")


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "not valid JSON"),
        ("{}", "no weight_map"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "is not the name of a shard in this directory"),
        ('{"weight_map": {"a": "x.bin"}}', "is not the name of a shard"),
        ('{"weight_map": {"a": null}}', "is not the name of a shard"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "gone.safetensors: not found"),
        ('{"weight_map": {"nothing": "x.safetensors"}}', "no tensor nothing"),
    ],
)
def test_wrong_index(shard: Path, index: str, message: str) -> None:
    (shard.parent / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=message) as error:
        CheckpointDir(shard.parent)
    one_line(error)


def test_directory_without_index(shard: Path) -> None:
    save_file({"t1": torch.zeros(2)}, shard.parent / "y.safetensors")
    with pytest.raises(CheckpointError, match=r"t1 is in x\.safetensors and in y\.safetensors"):
        CheckpointDir(shard.parent)


def test_a_dtype_that_is_not_read_is_no_damage(tmp_path: Path) -> None:
    save_file({"scale": torch.ones(2, 2).to(torch.float8_e8m0fnu)}, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match="scale: stored as F8_E8M0, which is not read") as error:
        Shard(tmp_path / "x.safetensors")
    assert "download" not in error.value.tip
