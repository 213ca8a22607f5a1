"""Hostile directories, continued: sizes, nesting, names and code (see hostile.py)."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

from tests.verify.mutations.hostile import CASES, CONFIG, SHARD, case, cases, extra_shard
from tests.verify.support.editor import DESCRIPTION, INDEX, PROVENANCE, QUAROT, Checkpoint

ODD_NAME = "model.layers.0.\x1b[2J\nok: 0 errors\ud800\u202e.weight"


# -- sizes -----------------------------------------------------------------------------------------------------------


def header_claims(ck: Checkpoint, outside: Path, value: str) -> str:
    """A sparse file as long as its header says it is."""
    length = int(value)
    with (ck.directory / SHARD).open("r+b") as file:
        file.write(struct.pack("<Q", length))
        file.truncate(min(length + 8, 2**36))
    return SHARD


cases("header_claims", [str(size) for size in (99_999_000, 2**31, 2**40, 2**63 - 9, 2**64 - 1)], header_claims)


def header_text(ck: Checkpoint, outside: Path, value: str) -> str:
    ck.write_header(SHARD, value, b"")
    return SHARD


LARGE = str(10**400)
cases(
    "header_text",
    [
        "[" * 1_000_000,
        '{"a":' * 100_000,
        '{"a": {"dtype": "I8", "shape": [' + ",".join([str(2**62)] * 200_000) + '], "data_offsets": [0, 0]}}',
        '{"a": {"dtype": "I8", "shape": [' + ",".join([LARGE] * 20_000) + '], "data_offsets": [0, 0]}}',
        '{"a": {"dtype": "I8", "shape": [0], "data_offsets": [0, 0]}, "a": {}}',
        '{"a": {"dtype": "I8", "shape": [' + "9" * 5000 + '], "data_offsets": [0, 0]}}',
        '{"a": {"dtype": "I8", "shape": [1e999, NaN, -Infinity], "data_offsets": [0, 0]}}',
        '{"__metadata__": [[]], "a": 7}',
    ],
    header_text,
)


def large_json(ck: Checkpoint, outside: Path, value: str) -> str:
    os.truncate(ck.directory / value, 2**36)
    return value


def deep_json(ck: Checkpoint, outside: Path, value: str) -> str:
    (ck.directory / value).write_text('{"a":' * 200_000)
    return value


def doubled_json(ck: Checkpoint, outside: Path, value: str) -> str:
    text = (ck.directory / value).read_text()
    key, first = next(iter(json.loads(text).items()))
    (ck.directory / value).write_text(f"{{{json.dumps(key)}: {json.dumps(first)}, {text.lstrip()[1:]}")
    return value


for change in (large_json, deep_json):
    cases(change.__name__, [INDEX, DESCRIPTION, PROVENANCE], change)
cases("doubled_json", [INDEX, DESCRIPTION], doubled_json)


# -- names -----------------------------------------------------------------------------------------------------------


@case
def odd_tensor_name(ck: Checkpoint, outside: Path) -> str:
    header, data = ck.header(SHARD)
    header[ODD_NAME.replace("\ud800", "")] = header.pop("lm_head.weight")
    ck.write_header(SHARD, header, data)
    return "lm_head.weight"


@case
def tensor_name_with_half_a_pair(ck: Checkpoint, outside: Path) -> str:
    """No UTF-8 has it: the safetensors library refuses the file."""
    header, data = ck.header(SHARD)
    header[ODD_NAME] = header.pop("lm_head.weight")
    ck.write_header(SHARD, header, data)
    return SHARD


@case
def odd_description_key(ck: Checkpoint, outside: Path) -> str:
    with ck.json(DESCRIPTION) as description:
        description[ODD_NAME] = ODD_NAME
    return DESCRIPTION


@case
def odd_file_name(ck: Checkpoint, outside: Path) -> str:
    name = os.fsdecode(b"\xff\n\x1b[2J.safetensors")
    shutil.copyfile(ck.directory / SHARD, ck.directory / name)
    return "not in the index"


# -- code ------------------------------------------------------------------------------------------------------------


class Payload:
    """Unpickling it runs a command."""

    def __init__(self, outside: Path) -> None:
        self.outside = outside

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.outside}/executed",)


def pickled(ck: Checkpoint, outside: Path, value: str) -> str:
    (ck.directory / value).write_bytes(pickle.dumps(Payload(outside)))
    return value


cases("pickled", [SHARD, INDEX, DESCRIPTION, CONFIG, QUAROT, PROVENANCE, "pytorch_model.bin", "optional/a.PT"], pickled)


@case
def code_in_the_config(ck: Checkpoint, outside: Path) -> str:
    """Hugging Face's way to run code of a checkpoint, and a module that would shadow a library's."""
    for name in ("modeling_glm.py", "torch.py", "json.py", "sitecustomize.py"):
        (ck.directory / name).write_text(f"open('{outside}/executed', 'w')")
    with ck.json(CONFIG) as config:
        config["auto_map"] = {"AutoConfig": "modeling_glm.Config", "AutoModelForCausalLM": "modeling_glm.Model"}
    return extra_shard(ck)


__all__ = ["CASES"]
