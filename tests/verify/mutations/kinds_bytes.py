"""Damaged shards: cut off, or with a bit that is not as it was written."""

from __future__ import annotations

import os
import struct
from random import Random

from tests.verify.mutations.mutator import Place, kind, pick, place
from tests.verify.support.editor import PROVENANCE, QUAROT, Checkpoint


@kind()
def shard_cut_in_its_data(ck: Checkpoint, chance: Random) -> str:
    file = pick(chance, ck.shards)
    size, data = (ck.directory / file).stat().st_size, ck.header(file)[1]
    os.truncate(ck.directory / file, chance.randrange(size - len(data), size))
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
