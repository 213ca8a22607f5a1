"""The output directory: refused if the user could lose a file, built under a hidden name, renamed at the end."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from glm5_ascend.errors import CheckpointError, OutputError
from glm5_ascend.files.untrusted import read_json_object
from glm5_ascend.files.written import copy_file, disk_error, write_file
from glm5_ascend.model.config_file import read_config

PROVENANCE_NAME = "glm5_ascend_provenance.json"
#: First words of the line that explains why `--overwrite` reads for a while.
CHECKING = "--overwrite: comparing"
#: By file: device, inode, size and times, which change when it is written.
Stamps = dict[str, tuple[int, ...]]
#: Content of `lock` in the folder of an unfinished run.
_MARK = b"glm5-ascend: an unfinished run\n"
#: Files beside the weights that serving needs; copied unchanged. tokenizer.model and *.tiktoken are easily forgotten.
_COPY = ("tokenizer*", "*.tiktoken", "*.jinja", "special_tokens_map.json", "generation_config.json", "chat_template*",
         "vocab.json", "merges.txt", "added_tokens.json")  # fmt: skip


def check_output(
    source: Path,
    out: Path,
    overwrite: bool,
    say: Callable[[str], object] = lambda _: None,
    unchanged: Stamps | None = None,
) -> Stamps:
    """Refuse an output directory that overlaps the source, or contains files that this tool did not write.

    Args:
        overwrite: a checkpoint of this tool may be there: every file is compared with the hash in its record.
        say: called before that comparison, which reads the whole checkpoint.
        unchanged: result of an earlier call: files that did not change since are not read again.
    Returns:
        the stamps of all files.
    Raises:
        OutputError: what is wrong and what to do; nothing was changed.
    """
    src, dst = source.resolve(), out.resolve()
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
        return {}
    if not overwrite:
        raise OutputError(f"{out}: not empty", "pass --overwrite to replace a checkpoint written by this tool")
    say(f"{CHECKING} {out} with the hashes in its record")
    try:
        return _check_ours(out, unchanged or {})
    except OSError as error:
        raise OutputError(f"{out}: cannot be read: {error.strerror}", "check permissions and the disk") from None


def _check_ours(out: Path, unchanged: Stamps) -> Stamps:
    """Compare all files with the provenance of the run that wrote them: names, sizes, hashes."""
    try:
        record = read_json_object(out / PROVENANCE_NAME)
        ours = {str(name) for name in record["files"]}
        recorded = {name: (facts["bytes"], facts.get("sha256")) for name, facts in record.get("outputs", {}).items()}
    except (CheckpointError, KeyError, TypeError, AttributeError):
        raise OutputError(
            f"{out}: not empty and not written by this tool (no readable {PROVENANCE_NAME})", "choose another directory"
        ) from None
    stamps: Stamps = {}
    for path in sorted(out.rglob("*")):
        facts, name = path.lstat(), path.relative_to(out).as_posix()
        if stat.S_ISDIR(facts.st_mode):
            continue
        if name not in ours or not stat.S_ISREG(facts.st_mode) or (name not in recorded and name != PROVENANCE_NAME):
            raise OutputError(
                f"{out / name}: not written by this tool, --overwrite would delete it", "move it away first"
            )
        if name == PROVENANCE_NAME:
            continue
        stamps[name] = (facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns)
        if recorded[name][0] != facts.st_size:
            raise _changed(path)
    unread = [name for name, stamp in stamps.items() if unchanged.get(name) != stamp]
    for name, facts_read in file_facts(out, unread).items():
        if (facts_read["bytes"], facts_read["sha256"]) != recorded[name]:
            raise _changed(out / name)
    return stamps


def _changed(path: Path) -> OutputError:
    return OutputError(f"{path}: not as this tool wrote it, --overwrite would delete it", "move it away first")


def serving_files(source: Path) -> list[str]:
    """Names of the files that `copy_serving_files` writes."""
    paths = {path for pattern in _COPY for path in source.glob(pattern)}
    names = {path.name for path in paths if path.is_file() and path.suffix != ".py"}  # never code
    return sorted({*names, "config.json"})


def served_config(raw: dict[str, Any]) -> dict[str, Any]:
    """Return a source's config.json without quantization_config: with it vLLM would not open the description."""
    config = {key: value for key, value in raw.items() if key != "quantization_config"}
    if isinstance(inner := config.get("text_config"), dict):
        config["text_config"] = {key: value for key, value in inner.items() if key != "quantization_config"}
    return config


def copy_serving_files(source: Path, destination: Path) -> None:
    """Copy tokenizer, chat template and generation files, and config.json without its quantization_config."""
    try:
        for name in serving_files(source):
            if name != "config.json":
                copy_file(source / name, destination / name)
        raw = read_config(source)
        text = (source / "config.json").read_text(encoding="utf-8")
        if (config := served_config(raw)) != raw:
            text = json.dumps(config, indent=2) + "\n"
        write_file(destination / "config.json", text)
    except OSError as error:
        raise disk_error(destination, error) from None


def run_dir_of(out: Path) -> Path:
    """Return the hidden folder on the same disk in which `out` is built; the same for every run of a command."""
    return out.parent / f".{out.name}.partial"


@contextmanager
def exclusive(directory: Path) -> Iterator[None]:
    """Create `directory`, or reuse that of a stopped run, and lock it against other processes.

    Raises:
        OutputError: it cannot be created, is not ours, or another process has the lock.
    """
    try:
        try:
            directory.mkdir()
        except FileExistsError:
            _check_run_dir(directory)
        descriptor = os.open(directory / "lock", os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise disk_error(directory, error) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise OutputError(f"{directory}: another process is writing here", "wait for it, or stop it") from None
    try:
        if not os.fstat(descriptor).st_size:
            os.write(descriptor, _MARK)
        yield
    finally:
        os.close(descriptor)


def _check_run_dir(directory: Path) -> None:
    """Check that an existing folder belongs to an unfinished run of this tool; links are not followed.

    Raises:
        OutputError: it does not; nothing in it was changed.
    """
    lock = directory / "lock"
    if stat.S_ISDIR(directory.lstat().st_mode):
        left = os.listdir(directory)
        if not left:
            return
        if "lock" in left and stat.S_ISREG(lock.lstat().st_mode):
            mark = lock.read_bytes()[: len(_MARK) + 1]
            if mark == _MARK or (not mark and left == ["lock"]):  # ended before it could write
                return
    raise OutputError(
        f"{directory}: already exists and is not the folder of an unfinished run of this tool",
        "move it away, or choose another OUT",
    )


def publish(work: Path, out: Path, keep: bool = False) -> Path | None:
    """Give the finished directory `work` its name; an old `out` is set aside first and removed last.

    keep: the old one may not be removed; it is renamed to OUT.before-TIME, which is returned.

    A run killed between the two renames leaves `.OUT.replaced`; re-run the same command to finish.
    """
    aside = replaced(out)
    if keep:
        aside = out.parent / f"{out.name}.before-{time.strftime('%Y%m%d-%H%M%S')}"
    try:
        _sync_tree(work)
        moved = os.path.lexists(out)
        if moved:
            if not keep and os.path.lexists(aside):
                _remove_replaced(aside)
            out.rename(aside)
        else:
            keep = False
        try:
            work.rename(out)
        except BaseException:
            if aside.is_dir() and not out.exists():
                aside.rename(out)
            raise
        _sync(out.parent)
    except OSError as error:
        raise disk_error(out, error) from None
    if keep:
        return aside
    if moved:
        _remove(aside)
    elif os.path.lexists(aside):
        _remove_replaced(aside)
    return None


def replaced(out: Path) -> Path:
    """Return the path that holds the old `out` during `publish`."""
    return out.parent / f".{out.name}.replaced"


def _remove_replaced(aside: Path) -> None:
    """Remove the old output of an earlier run; any other folder of this name stays."""
    if not _is_replaced(aside):
        raise OutputError(f"{aside}: already exists and was not written by this tool", "move it away")
    _remove(aside)


def _is_replaced(aside: Path) -> bool:
    """Return True if it is an unchanged checkpoint of this tool, or empty."""
    if aside.is_symlink() or not aside.is_dir():
        return False
    try:
        if any(aside.iterdir()):
            _check_ours(aside, {})
    except OutputError:
        return False
    return True


def _remove(aside: Path) -> None:
    """Remove a checkpoint of this tool; its record last, so that a killed removal can be finished."""
    if aside.is_symlink():  # what it leads to is not what was looked at
        return
    with suppress(OSError):
        for path in sorted(aside.rglob("*"), reverse=True):
            if path.name != PROVENANCE_NAME and not path.is_dir():
                path.unlink()
    shutil.rmtree(aside, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_tree(directory: Path) -> None:
    for path in (*directory.rglob("*"), directory):
        _sync(path)


def sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_facts(directory: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    """Size and sha256 of these files, several at a time: hashing does not hold the interpreter lock."""

    def facts(name: str) -> dict[str, Any]:
        return {"bytes": (directory / name).stat().st_size, "sha256": sha256(directory / name)}

    with ThreadPoolExecutor(thread_name_prefix="hash") as pool:
        return dict(zip(names, pool.map(facts, names), strict=True))
