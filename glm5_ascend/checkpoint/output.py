"""The output directory: refused if the user could lose a file, built under a hidden name, renamed at the end."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import stat
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from glm5_ascend.errors import CheckpointError, OutputError
from glm5_ascend.files.untrusted import read_json_object
from glm5_ascend.files.written import copy_file, disk_error, sync, sync_tree, write_file
from glm5_ascend.model.config_file import served_config

PROVENANCE_NAME = "glm5_ascend_provenance.json"
#: Content of `lock` in the folder of an unfinished run.
_MARK = b"glm5-ascend: an unfinished run\n"
#: Files beside the weights that serving, or the licence, needs; copied unchanged. tokenizer.model and *.tiktoken are
#: easily forgotten.
_COPY = ("tokenizer*", "*.tiktoken", "*.jinja", "special_tokens_map.json", "generation_config.json", "chat_template*",
         "vocab.json", "merges.txt", "added_tokens.json", "processor_config.json", "preprocessor_config.json",
         "video_preprocessor_config.json", "[Ll][Ii][Cc][Ee][Nn][CcSs][Ee]*", "NOTICE*")  # fmt: skip


def check_output(source: Path, out: Path, overwrite: bool) -> None:
    """Refuse an output directory that overlaps the source, or contains files that this tool did not write.

    Args:
        overwrite: a checkpoint of this tool may be there: names and sizes are those of its record, and the hashes of
            all files but the shards, which nobody edits by hand.
    Raises:
        OutputError: what is wrong and what to do; nothing was changed.
    """
    # Path.resolve raises at a link to itself.
    src, dst = Path(os.path.realpath(source)), Path(os.path.realpath(out))
    if src == dst:
        raise OutputError(f"{out}: output and source are the same directory", "choose another output directory")
    if dst.is_relative_to(src):
        raise OutputError(f"{out}: output lies inside the source {source}", "choose a directory outside it")
    if src.is_relative_to(dst):
        raise OutputError(f"{out}: output contains the source {source}", "choose another output directory")
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise OutputError(f"{out}: exists and is not a plain directory", "choose another output directory")
    if not dst.parent.is_dir():
        raise OutputError(f"{out.parent}: no such directory", "create it first")
    if not out.is_dir() or not any(out.iterdir()):
        return
    if not overwrite:
        raise OutputError(f"{out}: not empty", "pass --overwrite to replace a checkpoint written by this tool")
    try:
        _check_ours(out)
    except OSError as error:
        raise OutputError(f"{out}: cannot be read: {error.strerror}", "check permissions and the disk") from None


def _check_ours(out: Path) -> None:
    """Compare all files with the provenance of the run that wrote them."""
    try:
        outputs = read_json_object(out / PROVENANCE_NAME).get("outputs", {})
        recorded = {str(name): (facts["bytes"], facts.get("sha256")) for name, facts in outputs.items()}
    except (CheckpointError, KeyError, TypeError, AttributeError):
        raise OutputError(
            f"{out}: not empty and not written by this tool (no readable {PROVENANCE_NAME})", "choose another directory"
        ) from None
    for path in sorted(out.rglob("*")):
        facts, name = path.lstat(), path.relative_to(out).as_posix()
        if stat.S_ISDIR(facts.st_mode) or (name == PROVENANCE_NAME and stat.S_ISREG(facts.st_mode)):
            continue
        size, digest = recorded.get(name, (None, None))
        edited = not stat.S_ISREG(facts.st_mode) or facts.st_size != size
        if edited or (path.suffix != ".safetensors" and sha256(path) != digest):
            raise OutputError(
                f"{out / name}: not as this tool wrote it, --overwrite would delete it", "move it away first"
            )


def serving_files(source: Path) -> list[str]:
    paths = {path for pattern in _COPY for path in source.glob(pattern)}
    names = {path.name for path in paths if path.is_file() and path.suffix != ".py"}  # never code
    return sorted({*names, "config.json"})


def copy_serving_files(source: Path, raw: dict[str, Any], destination: Path) -> None:
    """Copy tokenizer, chat template and generation files, and config.json without its quantization_config.

    Args:
        raw: content of the source's config.json.
    """
    served = served_config(raw)
    for name in serving_files(source):
        if name != "config.json" or served == raw:
            copy_file(source / name, destination / name)
        else:
            write_file(destination / name, json.dumps(served, indent=2) + "\n")


def run_dir_of(out: Path) -> Path:
    """Return the hidden folder on the same disk in which `out` is built; the same for every run of a command."""
    return out.parent / f".{out.name}.partial"


@contextmanager
def exclusive(directory: Path) -> Iterator[None]:
    """Create `directory`, or reuse that of a stopped run, and lock it against other processes.

    Raises:
        OutputError: it cannot be created, is not ours, or another process has the lock.
    """
    lock = directory / "lock"
    try:
        try:
            directory.mkdir()
        except FileExistsError:
            _check_run_dir(directory)
        descriptor = os.open(lock, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise disk_error(directory, error) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise OutputError(f"{directory}: another process is writing here", "wait for it, or stop it") from None
    try:
        lock.write_bytes(_MARK)
        yield
    finally:
        os.close(descriptor)


def _check_run_dir(directory: Path) -> None:
    """Raise OutputError if an existing folder is not that of an unfinished run; links are not followed."""
    lock = directory / "lock"
    if not directory.is_symlink() and directory.is_dir():
        marked = lock.is_file() and not lock.is_symlink() and lock.read_bytes() in (_MARK, b"")
        if marked or not any(directory.iterdir()):
            return
    raise OutputError(
        f"{directory}: already exists and is not the folder of an unfinished run of this tool",
        "move it away, or choose another OUT",
    )


def publish(work: Path, out: Path) -> None:
    """Give the finished directory `work` its name; an old `out` is first renamed to OUT.before-TIME, then removed."""
    aside = out.parent / f"{out.name}.before-{time.strftime('%Y%m%d-%H%M%S')}"
    moved = os.path.lexists(out)
    try:
        sync_tree(work)
        if moved:
            out.rename(aside)
        try:
            work.rename(out)
        except BaseException:
            if moved:
                aside.rename(out)
            raise
        sync(out.parent)
    except OSError as error:
        raise disk_error(out, error) from None
    shutil.rmtree(aside, ignore_errors=True)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_facts(directory: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    """Size and sha256 of these files, several at a time: hashing does not hold the interpreter lock."""

    def facts(name: str) -> dict[str, Any]:
        return {"bytes": (directory / name).stat().st_size, "sha256": sha256(directory / name)}

    with ThreadPoolExecutor(thread_name_prefix="hash") as pool:
        return dict(zip(names, pool.map(facts, names), strict=True))
