"""The directory of an unfinished run: the new checkpoint, activations, a lock and a journal."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from glm5_ascend.checkpoint import schemes
from glm5_ascend.checkpoint.output import PROVENANCE_NAME, exclusive, serving_files
from glm5_ascend.errors import OutputError
from glm5_ascend.files.written import PARTIAL, disk_error, make_folder
from glm5_ascend.quantize.model_card import CARD, CONFIGURATION
from glm5_ascend.quantize.plan import QuantizationPlan
from glm5_ascend.quantize.provenance import RECIPE_NAME
from glm5_ascend.quantize.run.store import ROTATION_FILE

CHECKPOINT, ACTIVATIONS, LOCK, JOURNAL = "checkpoint", "activations", "lock", "journal.jsonl"


@contextmanager
def open_run_dir(path: Path, restart: bool) -> Iterator[None]:
    """Create and lock the run directory; it is removed when the block ends without an error.

    Args:
        restart: discard the unfinished run in it.
    """
    with exclusive(path):
        if restart:
            clear(path)
        for name in (CHECKPOINT, ACTIVATIONS):
            make_folder(path / name)
        try:
            yield
            clear(path)
        finally:
            if os.listdir(path) == [LOCK]:
                shutil.rmtree(path)


def clear(path: Path) -> None:
    """Remove the run's files but the lock, the journal last: it describes the others. Files of others stay."""
    try:
        for entry in (path / CHECKPOINT, path / ACTIVATIONS, *path.glob(f"*{PARTIAL}"), path / JOURNAL):
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink(missing_ok=True)
    except OSError as error:
        raise disk_error(path, error) from None


def output_files(plan: QuantizationPlan, shards: Collection[str]) -> list[str]:
    """Names of all files of the finished checkpoint; `shards` are those of the tensors, with their index."""
    rotation = [ROTATION_FILE] if plan.recipe.rotates else []
    written = [schemes.DESCRIPTION_NAME, RECIPE_NAME, PROVENANCE_NAME, CARD, CONFIGURATION]
    return sorted({*shards, *rotation, *written, *serving_files(plan.source.directory)})


def check_only_known_files(folder: Path, names: Collection[str]) -> None:
    """Allow only files of these names below `folder`; half files of a kill are removed.

    Raises:
        OutputError: the first other file, by name.
    """
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if name.endswith(PARTIAL):
            path.unlink()
        elif name not in names and not (path.is_dir() and not path.is_symlink()):
            raise OutputError(
                f"{path}: not written by this run, it would be published",
                "move it away, then run the same command again",
            )
