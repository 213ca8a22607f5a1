"""`quantize --upgrade DIR`: an output of an earlier version becomes what this one writes, and no weight is touched.

Earlier versions kept `rot.weight` in a shard, where SGLang looks for `rot.safetensors`, and called INT8 indexer caches
by a word that no engine knows. The new directory is built beside the old one, of hard links, but for the files that
change and the provenance; then it takes the old one's name, as a finished quantization does. Killed at any time, DIR
is the old one or the new one, and the same command goes on. Hashes of files that are only linked stay those of the run
that wrote them.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm5_ascend.checkpoint.index import INDEX_NAME, CheckpointDir
from glm5_ascend.checkpoint.output import (
    PROVENANCE_NAME,
    exclusive,
    file_facts,
    finish_publishing,
    publish,
    replaced,
    sha256,
    workshop,
)
from glm5_ascend.checkpoint.shards import Shard, TensorEntry
from glm5_ascend.checkpoint.types import (
    DESCRIPTION_NAME,
    INDEXER_CACHE_SUFFIX,
    INDEXER_CACHE_TYPE,
    OLD_INDEXER_CACHE_TYPE,
    ROT_FILE,
    ROT_NAME,
)
from glm5_ascend.checkpoint.writer import check_free_space, disk_error, shard_header, write_json
from glm5_ascend.errors import CheckpointError, OutputError
from glm5_ascend.model.json_file import MAX_BYTES_BY_TENSOR, read_json_object

#: Bytes copied at once.
_PIECE = 1 << 24


@dataclass(frozen=True)
class UpgradeResult:
    """What became of a directory.

    Attributes:
        written: the files that are new or have other bytes, empty if none had to.
        kept: where the old directory stays, since somebody changed a file in it meanwhile; else None.
    """

    out: Path
    written: list[str]
    kept: Path | None = None

    def to_dict(self) -> dict[str, Any]:
        """What `--json` prints, without its frame."""
        return {"out": str(self.out), "written": self.written, "kept": None if self.kept is None else str(self.kept)}


def upgrade_output(directory: str | Path) -> UpgradeResult:
    """Give an output of an earlier version the files that engines look for today.

    Raises:
        OutputError: not written by this tool, changed since, in use, or no room for one shard; nothing was touched.
        CheckpointError: damaged.
    """
    out = Path(os.path.abspath(directory))
    place = workshop(out)
    if not out.is_dir() and not replaced(out).is_dir():
        raise OutputError(f"{out}: no such directory", "give an output of glm5-ascend quantize")
    with exclusive(place):
        if any(place.glob("journal*")):
            raise OutputError(
                f"{place}: holds an unfinished run of {out}", "finish it, or discard it with quantize --restart"
            )
        work = place / "upgraded"
        _finish_stopped(work, out)
        shutil.rmtree(work, ignore_errors=True)
        try:
            written, kept = _upgrade(out, work)
        finally:
            shutil.rmtree(place, ignore_errors=True)
    return UpgradeResult(Path(directory), written, kept)


def _finish_stopped(work: Path, out: Path) -> None:
    """A run killed between the two renames of `publish` has set the old directory aside, and the new one is whole."""
    aside = replaced(out)
    if not os.path.lexists(out) and (aside / PROVENANCE_NAME).is_file() and (work / PROVENANCE_NAME).is_file():
        publish(work, out)


def _upgrade(out: Path, work: Path) -> tuple[list[str], Path | None]:
    record, found = _record(out), _state(out)
    shard, description = _shard_with_rot(out), _renamed_caches(out)
    changed = [] if description is None else [DESCRIPTION_NAME]
    if shard is not None:
        changed += [shard.path.name, INDEX_NAME]
    if not changed:
        finish_publishing(out)
        return [], None
    _check_unchanged(out, changed, record)
    gone = None
    try:
        if shard is None:
            _link(out, work, without={*changed, PROVENANCE_NAME})
        else:
            _check_room_for_file(out, shard)
            check_free_space(out.parent, shard.path.stat().st_size)
            _link(out, work, without={*changed, PROVENANCE_NAME, ROT_FILE})
            gone = _move_rot(shard, work)
            changed += [ROT_FILE]
        if description is not None:
            write_json(work / DESCRIPTION_NAME, description)
    except OSError as error:
        raise disk_error(work, error) from None
    written = [name for name in changed if name != gone]
    write_json(work / PROVENANCE_NAME, _renewed(record, work, written, gone))
    kept = publish(work, out, keep=_state(out) != found)
    return sorted([*written, PROVENANCE_NAME]), kept


def _state(out: Path) -> dict[Path, tuple[int, int, int]]:
    """Of every file of the tree: which one it is, its size, and when it was written; a second link changes none."""
    found = {path: path.lstat() for path in out.rglob("*")}
    return {
        path: (facts.st_ino, facts.st_size, facts.st_mtime_ns)
        for path, facts in found.items()
        if not stat.S_ISDIR(facts.st_mode)
    }


def _shard_with_rot(out: Path) -> Shard | None:
    """The shard that holds `rot.weight`, unless that is where engines look for it."""
    files = CheckpointDir(out)
    home = files.file_of.get(ROT_NAME)
    return None if home is None or home == ROT_FILE else files.shards[home]


def _renamed_caches(out: Path) -> dict[str, Any] | None:
    """The description with today's word for INT8 indexer caches; None if it has no other."""
    if not (out / DESCRIPTION_NAME).is_file():
        return None  # `verify` says so
    description = read_json_object(out / DESCRIPTION_NAME, max_bytes=MAX_BYTES_BY_TENSOR)
    old = {
        key: INDEXER_CACHE_TYPE
        for key, value in description.items()
        if key.endswith(INDEXER_CACHE_SUFFIX) and value == OLD_INDEXER_CACHE_TYPE
    }
    return description | old if old else None


def _move_rot(shard: Shard, work: Path) -> str | None:
    """Write the file of `rot.weight`, the index and the rest of the shard; returns the shard's name if none is left."""
    kept = [entry for entry in shard.entries.values() if entry.name != ROT_NAME]
    if kept:
        _copy_tensors(shard, kept, work / shard.path.name)
    _copy_tensors(shard, [shard.entries[ROT_NAME]], work / ROT_FILE)
    index = read_json_object(shard.path.parent / INDEX_NAME, max_bytes=MAX_BYTES_BY_TENSOR)
    index["weight_map"][ROT_NAME] = ROT_FILE
    write_json(work / INDEX_NAME, index)
    return None if kept else shard.path.name


def _record(out: Path) -> dict[str, Any]:
    """The provenance of our own output."""
    ours = not out.is_symlink() and (out / PROVENANCE_NAME).is_file()
    try:
        record = read_json_object(out / PROVENANCE_NAME, max_bytes=MAX_BYTES_BY_TENSOR) if ours else {}
    except CheckpointError:
        record = {}
    if not isinstance(record.get("files"), list) or not isinstance(record.get("outputs", {}), dict):
        raise OutputError(
            f"{out}: not written by this tool (no readable {PROVENANCE_NAME})",
            "only outputs of glm5-ascend quantize are upgraded; give the directory itself, not a link",
        )
    return record


def _check_unchanged(out: Path, names: Iterable[str], record: dict[str, Any]) -> None:
    """The files that are written anew must be those of our run: an upgrade must not give damage a fresh hash."""
    for name in names:
        facts = record.get("outputs", {}).get(name)
        linked = (out / name).is_symlink() or name not in record["files"]
        if linked or (isinstance(facts, dict) and facts.get("sha256") != sha256(out / name)):
            raise OutputError(
                f"{out / name}: not as this tool wrote it", f"glm5-ascend verify {out} says more; copy it again"
            )


def _check_room_for_file(out: Path, shard: Shard) -> None:
    """A file of this name that somebody put there may be replaced by an equal tensor only."""
    path = out / ROT_FILE
    if os.path.lexists(path):
        theirs = Shard(path)
        if path.is_symlink() or set(theirs.entries) != {ROT_NAME} or not _same(theirs, shard):
            raise OutputError(f"{path}: in the way, and not the tensor of {shard.path.name}", "move it away first")


def _same(a: Shard, b: Shard) -> bool:
    x, y = a.read(ROT_NAME), b.read(ROT_NAME)
    return x.dtype is y.dtype and x.shape == y.shape and bool((x == y).all())


def _link(out: Path, work: Path, without: set[str]) -> None:
    """Every file of the tree under a second name, links as links; but for some of its top."""
    work.mkdir()
    for folder, folders, names in os.walk(out):
        inside = Path(folder).relative_to(out)
        for name in names + [each for each in folders if (Path(folder) / each).is_symlink()]:
            if (inside / name).as_posix() not in without:
                os.link(Path(folder) / name, work / inside / name, follow_symlinks=False)
        for name in folders:
            if not (Path(folder) / name).is_symlink():
                (work / inside / name).mkdir()
    shutil.copymode(out, work)


def _copy_tensors(shard: Shard, entries: list[TensorEntry], path: Path) -> None:
    """The bytes of some tensors of a shard as a shard of their own, in the order in which they lie there."""
    entries = sorted(entries, key=lambda entry: entry.start)
    with shard.path.open("rb") as source, path.open("xb") as target:
        target.write(shard_header(entries))
        for entry in entries:
            source.seek(entry.start)
            left = entry.nbytes
            while left:
                piece = source.read(min(left, _PIECE))
                if not piece:
                    raise CheckpointError(f"{shard.path}: file shrank while it was read", "copy it again")
                target.write(piece)
                left -= len(piece)


def _renewed(record: dict[str, Any], work: Path, written: list[str], gone: str | None) -> dict[str, Any]:
    """The provenance with the new list of files, and new hashes of those that were written."""
    names = sorted({*record["files"], *written} - {gone})
    if "outputs" not in record:  # of the first versions
        return record | {"files": names}
    facts = record["outputs"] | file_facts(work, written)
    return record | {"files": names, "outputs": {name: facts[name] for name in names if name in facts}}
