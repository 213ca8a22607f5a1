"""Damaged shards: cut, filled up, with a header that lies."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from random import Random
from typing import Any

from tests.verify.mutations.mutator import Place, kind, pick, place
from tests.verify.support.editor import DESCRIPTION, PROVENANCE, QUAROT, Checkpoint

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


@kind()
def shard_cut_in_its_header(ck: Checkpoint, chance: Random) -> str:
    file, path, length = some_shard(ck, chance)
    os.truncate(path, chance.randrange(8 + length))
    return file


@kind()
def bytes_appended(ck: Checkpoint, chance: Random) -> str:
    file, path, _ = some_shard(ck, chance)
    with path.open("ab") as opened:
        opened.write(chance.randbytes(chance.randint(1, 5000)))
    return file


@kind()
def bytes_lost_in_the_middle(ck: Checkpoint, chance: Random) -> str:
    """A failed resume of a download: everything behind moves."""
    file, path, length = some_shard(ck, chance)
    raw = path.read_bytes()
    at = chance.randrange(8 + length, len(raw))
    path.write_bytes(raw[:at] + raw[at + chance.randint(1, 512) :])
    return file


@kind()
def header_length_lies(ck: Checkpoint, chance: Random) -> str:
    """Up to 8 EiB."""
    file, path, length = some_shard(ck, chance)
    near = length + chance.choice([-1, 1]) * chance.randint(1, min(length, 1000))
    lie = pick(chance, [0, 1, near, 99_999_999, 2**31, 2**31 - 1, 2**63, 2**64 - 1])
    raw = path.read_bytes()
    path.write_bytes(struct.pack("<Q", lie) + raw[8:])
    return file


def lie(ck: Checkpoint, name: str, **fields: Any) -> str:
    """Change the header entry of a tensor; returns its shard."""
    file = ck.file_of[name]
    header, data = ck.header(file)
    header[name] |= fields
    ck.write_header(file, header, data)
    return file


@kind()
def header_shape_lies(ck: Checkpoint, chance: Random) -> str:
    """Another number of elements than there are bytes."""
    name = pick(chance, ck.names())
    shape: list[Any] = ck.shape(name)
    at = chance.randrange(len(shape))
    shape[at] = pick(
        chance, [shape[at] + 1, shape[at] * 2, 2**40, 2**63, 10**40, -shape[at], float(shape[at]), "2", []]
    )
    return lie(ck, name, shape=shape)


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


@kind()
def header_offsets_overlap(ck: Checkpoint, chance: Random) -> str:
    """Two tensors share their bytes, and those of the second belong to nobody."""
    same: dict[tuple[str, int], list[str]] = {}
    for name, file in ck.file_of.items():
        same.setdefault((file, ck.size(name)), []).append(name)
    name = pick(chance, sorted(name for names in same.values() for name in names if len(names) > 1))
    (others,) = [names for names in same.values() if name in names]
    other = pick(chance, [other for other in others if other != name])
    return lie(ck, name, data_offsets=ck.facts[other]["data_offsets"])


@kind()
def header_names_a_tensor_twice(ck: Checkpoint, chance: Random) -> str:
    """One parser takes the first of two equal keys, another the last."""
    name = pick(chance, ck.names())
    file = ck.file_of[name]
    header, data = ck.header(file)
    twin = header[name] | {"dtype": pick(chance, ["F32", "I8", header[name]["dtype"]])}
    text = f"{{{json.dumps(name)}: {json.dumps(twin)}, {json.dumps(header)[1:]}"
    ck.write_header(file, text, data)
    return file


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


@kind(by_hash=True)
def json_edited_after_writing(ck: Checkpoint, chance: Random) -> str:
    """A change that keeps the meaning."""
    written_by_us = (ck.directory / PROVENANCE).is_file()
    file = pick(chance, [ck.index, DESCRIPTION, "config.json"] if written_by_us else [])
    (ck.directory / file).write_text((ck.directory / file).read_text() + "\n")
    return file
