"""Damaged shards: cut, filled up, with a header that lies."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from random import Random
from typing import Any

from tests.verify.mutations.mutator import Place, kind, pick, place
from tests.verify.support.editor import PROVENANCE, QUAROT, Checkpoint

Header = dict[str, Any]


def some_shard(ck: Checkpoint, chance: Random) -> tuple[str, Path, int]:
    """(name, path, length of its header)."""
    file = pick(chance, ck.shards)
    path = ck.directory / file
    with path.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
    return file, path, length


@kind()
def shard_cut_in_its_data(ck: Checkpoint, chance: Random) -> str:
    file, path, length = some_shard(ck, chance)
    os.truncate(path, chance.randrange(8 + length, path.stat().st_size))
    return file


def lie(ck: Checkpoint, name: str, **fields: Any) -> str:
    """Change the header entry of a tensor; returns its shard."""
    file = ck.file_of[name]
    header, data = ck.header(file)
    header[name] |= fields
    ck.write_header(file, header, data)
    return file


@kind()
def header_shape_turned(ck: Checkpoint, chance: Random) -> str:
    """The number of elements is right, the shape is not: wrong packing axis, or rows for columns."""
    name = pick(chance, ck.names())
    shape = ck.shape(name)
    rows = shape[0]
    shapes = [shape[::-1], [rows // 2, *(2 * side for side in shape[1:2])], [1, *shape], [*shape, 1]]
    shapes = [other for other in shapes if product(other) == product(shape) and other != shape]
    lie(ck, name, shape=pick(chance, shapes))
    return name


def product(shape: list[int]) -> int:
    out = 1
    for side in shape:
        out *= side
    return out


#: Types of the same size.
OTHER = {
    "I8": ["U8", "BOOL", "F8_E4M3"],
    "F32": ["I32"],
    "I32": ["F32"],
    "BF16": ["F16", "I16"],
    "F16": ["BF16", "I16"],
}


@kind()
def header_dtype_lies(ck: Checkpoint, chance: Random) -> str:
    name = pick(chance, ck.names())
    lie(ck, name, dtype=pick(chance, OTHER[ck.facts[name]["dtype"]]))
    return name


@kind(by_hash=True)
def byte_changed_after_writing(ck: Checkpoint, chance: Random) -> Place:
    """One bit anywhere in a file of weights: only the recorded hash can tell (and says so of this file)."""
    written_by_us = (ck.directory / PROVENANCE).is_file()
    file = pick(chance, [file for file in (*ck.shards, QUAROT) if written_by_us and (ck.directory / file).is_file()])
    raw = bytearray((ck.directory / file).read_bytes())
    (length,) = struct.unpack("<Q", raw[:8])
    raw[chance.randrange(8 + length, len(raw))] ^= 1 << chance.randrange(8)
    (ck.directory / file).write_bytes(raw)
    return place([file], ["global_rotation", *ck.names()])
