"""Directories made to harm whoever opens them. Each case changes a correct checkpoint and names what must be reported.

`outside` is a directory beside the checkpoint: whatever lies there must not be opened, and PAYLOAD not be run.
"""

from __future__ import annotations

import os
import shutil
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


def endless(ck: Checkpoint, outside: Path, name: str) -> str:
    (ck.directory / name).unlink()
    (ck.directory / name).symlink_to("/dev/zero")
    return name


def ring(ck: Checkpoint, outside: Path, name: str) -> str:
    (ck.directory / name).unlink()
    (ck.directory / name).symlink_to(Path(name).name)
    return name


def folder(ck: Checkpoint, outside: Path, name: str) -> str:
    (ck.directory / name).unlink()
    (ck.directory / name).mkdir()
    return name


SHARD = "quant_model_weights-00001-of-00001.safetensors"
FILES = [SHARD, INDEX, DESCRIPTION, CONFIG, QUAROT, PROVENANCE, "tokenizer.json"]
for change in (linked, fifo, endless, ring):
    cases(change.__name__, FILES, change)
cases("folder", [SHARD, INDEX, DESCRIPTION, CONFIG, QUAROT], folder)


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
    for _ in range(2500):
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
    "optional/../../../outside/secret.safetensors",
    "OUTSIDE/secret.safetensors",
    "/etc/passwd",
    "//x.safetensors",
    "..",
    "~/secret.safetensors",
    "file:///etc/passwd",
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
