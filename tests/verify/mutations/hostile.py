"""Directories made to harm whoever opens them. Each case changes a correct checkpoint and names what must be reported.

`outside` is a directory beside the checkpoint: whatever lies there must not be opened, and PAYLOAD not be run.
"""

from __future__ import annotations

import os
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

from tests.verify.support.editor import DESCRIPTION, INDEX, PROVENANCE, QUAROT, Checkpoint

Case = Callable[[Checkpoint, Path], str]  # (checkpoint, outside) -> file or tensor that must be named
CASES: dict[str, Case] = {}
CONFIG = "config.json"


def case(make: Case) -> Case:
    CASES[make.__name__] = make
    return make


def cases(prefix: str, values: list[str], make: Callable[[Checkpoint, Path, str], str]) -> None:
    for number, value in enumerate(values):
        CASES[f"{prefix}_{number}"] = lambda ck, outside, value=value: make(ck, outside, value)


# -- links, and things that are no files -----------------------------------------------------------------------------


def linked(ck: Checkpoint, outside: Path, name: str) -> str:
    path = ck.directory / name
    shutil.move(path, outside / path.name)
    path.symlink_to(outside / path.name)
    return name


def fifo(ck: Checkpoint, outside: Path, name: str) -> str:
    """Opening it waits until somebody writes."""
    (ck.directory / name).unlink()
    os.mkfifo(ck.directory / name)
    return name


SHARD = "quant_model_weights-00001-of-00001.safetensors"
FILES = [SHARD, INDEX, DESCRIPTION, CONFIG, QUAROT, PROVENANCE, "tokenizer.json"]
for change in (linked, fifo):
    cases(change.__name__, FILES, change)


@case
def linked_directory(ck: Checkpoint, outside: Path) -> str:
    shutil.move(ck.directory / "optional", outside / "optional")
    (ck.directory / "optional").symlink_to(outside / "optional")
    return "optional"


@case
def linked_root(ck: Checkpoint, outside: Path) -> str:
    (ck.directory / "x.safetensors").symlink_to("/")
    return "x.safetensors"


@case
def deep_directories(ck: Checkpoint, outside: Path) -> str:
    here = os.open(ck.directory, os.O_RDONLY)
    for _ in range(1050):
        os.mkdir("a", dir_fd=here)
        here, old = os.open("a", os.O_RDONLY, dir_fd=here), here
        os.close(old)
    os.close(here)
    return extra_shard(ck)


def extra_shard(ck: Checkpoint) -> str:
    """Something to be reported in cases whose harm is not the message."""
    shutil.copyfile(ck.directory / SHARD, ck.directory / "stale.safetensors")
    return "stale.safetensors"


# -- paths -----------------------------------------------------------------------------------------------------------

PATHS = [
    "../../outside/secret.safetensors",
    "OUTSIDE/secret.safetensors",
    "..",
    "..\\outside\\secret.safetensors",
    "\0.safetensors",
    "secret\n.safetensors",
]


def index_path(ck: Checkpoint, outside: Path, value: str) -> str:
    value = value.replace("OUTSIDE", str(outside))
    with ck.json(INDEX) as index:
        index["weight_map"]["lm_head.weight"] = value
    return INDEX if "/" in value or value == ".." else value.encode("unicode_escape").decode().replace("\\\\", "\\")


def rotation_path(ck: Checkpoint, outside: Path, value: str) -> str:
    with ck.json(DESCRIPTION) as description:
        rotation_map = {"global_rotation": value.replace("OUTSIDE", str(outside))}
        description["optional"]["quarot"]["rotation_map"] = rotation_map
    return "global_rotation"


def hash_path(ck: Checkpoint, outside: Path, value: str) -> str:
    with ck.json(PROVENANCE) as provenance:
        facts = {"bytes": (outside / "secret.safetensors").stat().st_size, "sha256": "0" * 64}
        provenance["outputs"][value.replace("OUTSIDE", str(outside))] = facts
    return extra_shard(ck)


cases("index_path", PATHS, index_path)
cases("rotation_path", PATHS, rotation_path)
cases("hash_path", PATHS, hash_path)


# -- sizes and names -------------------------------------------------------------------------------------------------

ODD_NAME = "model.layers.0.\x1b[2J\nok: 0 errors\u202e.weight"


@case
def header_claims(ck: Checkpoint, outside: Path) -> str:
    """A sparse file as long as its header says it is."""
    with (ck.directory / SHARD).open("r+b") as file:
        file.write(struct.pack("<Q", 2**36))
        file.truncate(2**36 + 8)
    return SHARD


def large_json(ck: Checkpoint, outside: Path, value: str) -> str:
    os.truncate(ck.directory / value, 2**36)
    return value


cases(large_json.__name__, [INDEX, DESCRIPTION, PROVENANCE], large_json)


@case
def odd_tensor_name(ck: Checkpoint, outside: Path) -> str:
    header, data = ck.header(SHARD)
    header[ODD_NAME] = header.pop("lm_head.weight")
    ck.write_header(SHARD, header, data)
    return "lm_head.weight"


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
