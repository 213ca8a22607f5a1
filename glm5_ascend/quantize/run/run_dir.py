"""The directory of an unfinished run: the new checkpoint, activations, a lock and a journal.

Only files of the run may be in it: another one is refused by name, never removed and never published.
"""

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
from glm5_ascend.quantize.run.store import ROTATION_FILE

CHECKPOINT, ACTIVATIONS, LOCK, JOURNAL = "checkpoint", "activations", "lock", "journal.jsonl"


class UnexpectedFileError(OutputError):
    """The run directory holds a file that no run has written."""


@contextmanager
def open_run_dir(path: Path, restart: bool) -> Iterator[None]:
    """Create and lock the run directory; it is removed when the block ends without an error.

    Args:
        restart: discard the unfinished run in it.
    Raises:
        OutputError: it holds a file of another origin, which stays where it is.
    """
    with exclusive(path):
        try:
            for entry in sorted(path.iterdir()):
                if not _is_known(entry):
                    raise UnexpectedFileError(f"{entry}: not a file of this run, and in its directory", "move it away")
            if restart:
                clear(path)
        except OSError as error:
            raise disk_error(path, error) from None
        for name in (CHECKPOINT, ACTIVATIONS):
            make_folder(path / name)
        yield
        clear(path)
    remove(path)


def _is_known(entry: Path) -> bool:
    if entry.name in (CHECKPOINT, ACTIVATIONS):
        return stat.S_ISDIR(entry.lstat().st_mode)
    journal = entry.name.startswith("journal") and entry.name.endswith(".jsonl")
    return entry.name == LOCK or ((journal or entry.name.endswith(PARTIAL)) and not entry.is_dir())


def clear(path: Path) -> None:
    """Remove the run's files but the lock, the journal last: it describes the others."""
    for entry in sorted(path.iterdir(), key=lambda entry: entry.name == JOURNAL):
        if entry.name == LOCK or not _is_known(entry):
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def remove(path: Path) -> None:
    """Remove the directory if nothing but the lock is in it."""
    with suppress(OSError):
        if set(os.listdir(path)) <= {LOCK}:
            (path / LOCK).unlink()
            path.rmdir()


def output_files(plan: QuantizationPlan, shards: Collection[str]) -> list[str]:
    """Names of all files of the finished checkpoint; `shards` are those of the tensors, with their index."""
    rotation = [ROTATION_FILE] if plan.recipe.rotates else []
    written = [schemes.DESCRIPTION_NAME, RECIPE_NAME, PROVENANCE_NAME]
    return sorted({*shards, *rotation, *written, *serving_files(plan.source.directory)})


def check_only_known_files(folder: Path, names: Collection[str], before_writing: bool = False) -> None:
    """Allow plain files of these names below `folder`, and the folders they need; half files of a kill are removed.

    Args:
        before_writing: a link with one of the names is removed instead of refused.
    Raises:
        UnexpectedFileError: the first other file, by name.
    """
    folders = {parent.as_posix() for name in names for parent in Path(name).parents}
    for path in sorted(folder.rglob("*")):
        facts, name = path.lstat(), path.relative_to(folder).as_posix()
        if plain(facts) and name.endswith(PARTIAL):
            path.unlink()
        elif before_writing and name in names and not plain(facts):
            make_room(path)
        elif not (name in folders if stat.S_ISDIR(facts.st_mode) else plain(facts) and name in names):
            raise UnexpectedFileError(
                f"{path}: not written by this run, it would be published",
                "move it away, then run the same command again",
            )
