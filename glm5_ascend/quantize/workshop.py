"""What lies in the folder of an unfinished run; whatever else is found there is refused, never removed or published."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from glm5_ascend.checkpoint import schemes
from glm5_ascend.checkpoint.output import PROVENANCE_NAME, exclusive, serving_files
from glm5_ascend.errors import OutputError
from glm5_ascend.files.written import PARTIAL, disk_error, make_folder, make_room, plain
from glm5_ascend.quantize.plan import QuantizationPlan
from glm5_ascend.quantize.provenance import RECIPE_NAME
from glm5_ascend.quantize.run.job import ROTATION_FILE

CHECKPOINT, ACTIVATIONS, LOCK, JOURNAL = "checkpoint", "activations", "lock", "journal.jsonl"


class StrangerError(OutputError):
    """Something in the folder of an unfinished run that no run of ours has left there; it is not touched."""


@contextmanager
def open_workshop(place: Path, restart: bool) -> Iterator[Path]:
    """Hold the folder `place`, its own folders made; it is removed when the block ends without an error.

    Args:
        restart: begin with an empty one.
    Raises:
        OutputError: something in it is not of a run of ours; it stays where it is.
    """
    with exclusive(place):
        try:
            for entry in sorted(place.iterdir()):
                if not _ours(entry):
                    raise StrangerError(f"{entry}: not of this run, and in its folder", "move it away")
            if restart:
                clear(place)
        except OSError as error:
            raise disk_error(place, error) from None
        for name in (CHECKPOINT, ACTIVATIONS):
            make_folder(place / name)
        yield place
        clear(place)
    remove(place)


def _ours(entry: Path) -> bool:
    if entry.name in (CHECKPOINT, ACTIVATIONS):
        return stat.S_ISDIR(entry.lstat().st_mode)
    journal = entry.name.startswith("journal") and entry.name.endswith(".jsonl")
    return entry.name == LOCK or ((journal or entry.name.endswith(PARTIAL)) and not entry.is_dir())


def clear(place: Path) -> None:
    """Remove what is ours but the lock; the journal last, it says what the rest is."""
    for path in sorted(place.iterdir(), key=lambda p: p.name == JOURNAL):
        if path.name == LOCK or not _ours(path):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def remove(place: Path) -> None:
    """Remove the folder if nothing of others is in it."""
    with suppress(OSError):
        if set(os.listdir(place)) <= {LOCK}:
            (place / LOCK).unlink()
            place.rmdir()


def output_files(plan: QuantizationPlan, shards: Collection[str]) -> list[str]:
    """Names of all files of the finished checkpoint; `shards` are those of the tensors, with their index."""
    rotation = [ROTATION_FILE] if plan.recipe.rotates else []
    own = [schemes.DESCRIPTION_NAME, RECIPE_NAME, PROVENANCE_NAME]
    return sorted({*shards, *rotation, *own, *serving_files(plan.source.directory)})


def refuse_strangers(folder: Path, ours: Collection[str], begins: bool = False) -> None:
    """Allow plain files of these names below `folder`, and the folders they need; what a kill left half is removed.

    Args:
        begins: nothing was written yet: a link that has one of the names makes room.
    Raises:
        StrangerError: the first other thing, by name.
    """
    folders = {parent.as_posix() for name in ours for parent in Path(name).parents}
    for path in sorted(folder.rglob("*")):
        facts, name = path.lstat(), path.relative_to(folder).as_posix()
        if plain(facts) and name.endswith(PARTIAL):
            path.unlink()
        elif begins and name in ours and not plain(facts):
            make_room(path)
        elif not (name in folders if stat.S_ISDIR(facts.st_mode) else plain(facts) and name in ours):
            raise StrangerError(
                f"{path}: not written by this run, it would be published", "move it away; run the same command again"
            )
