"""The reader of files that others wrote: bytes within limits, and JSON. YAML: `yaml_file.py`; shards: `Shard`.

A file is refused in one line before anything parses it, and so is content that callers could not handle.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from glm5_ascend.errors import CheckpointError, Glm5Error, shortened, shown

#: Levels of nesting; the files we read have at most a dozen. Far below what the parsers or our own loops could take.
MAX_DEPTH = 64
#: A longer integer has no float, and one of 4300 digits and more Python does not write.
MAX_BITS = 1000
MIB = 1024**2
#: config.json and the generation config have some kB.
MAX_CONFIG_BYTES = 4 * MIB
#: Our provenance file has some 100 kB, GLM-5's tokenizer.json 20 MB.
MAX_BYTES = 64 * MIB
#: An index or a quantization description has a line per tensor: 25 MB for GLM-5.
MAX_BYTES_BY_TENSOR = 512 * MIB
#: First bytes of the file that `git clone` without Git LFS leaves in place of a large one.
_LFS_POINTER = b"version https://git-lfs.github.com/"


def open_regular(path: Path, error: type[Glm5Error], fix: str) -> BinaryIO:
    """Open `path` for reading.

    Raises:
        error: one line with the path: not there, not a regular file, or not readable. A FIFO, device or socket is not
            opened; one that replaces the file in between is opened without waiting, and refused then.
    """
    try:
        _refuse_irregular(path, os.stat(path).st_mode, error, fix)
        file = open(path, "rb", opener=_without_waiting)  # noqa: SIM115  # the caller closes it
    except FileNotFoundError:
        raise error(f"{shortened_path(path)}: not found", fix) from None
    except (OSError, ValueError) as problem:  # ValueError: a zero byte in the name
        reason = getattr(problem, "strerror", None) or problem
        raise error(f"{shortened_path(path)}: cannot be read: {reason}", fix) from None
    try:
        _refuse_irregular(path, os.fstat(file.fileno()).st_mode, error, fix)
        if os.pread(file.fileno(), len(_LFS_POINTER), 0) == _LFS_POINTER:
            raise error(f"{shortened_path(path)}: a pointer of Git LFS, not the file itself", "fetch it: git lfs pull")
    except OSError as problem:
        file.close()
        raise error(f"{shortened_path(path)}: cannot be read: {problem.strerror}", fix) from None
    except BaseException:
        file.close()
        raise
    return file


def _without_waiting(name: str, flags: int) -> int:
    return os.open(name, flags | os.O_NONBLOCK | os.O_NOCTTY)


def _refuse_irregular(path: Path, mode: int, error: type[Glm5Error], fix: str) -> None:
    if not stat.S_ISREG(mode):
        raise error(f"{shortened_path(path)}: not a regular file", fix)


def read_bytes(path: Path, max_bytes: int, error: type[Glm5Error], fix: str) -> bytes:
    """Read a whole file.

    Raises:
        error: as `open_regular`, or larger than `max_bytes`, which is checked before reading.
    """
    with open_regular(path, error, fix) as file:
        try:
            size = os.fstat(file.fileno()).st_size
            data = bytearray()
            # Files of /proc say 0 bytes and hold more; others grow while they are read.
            while size <= max_bytes and len(data) <= max_bytes:
                chunk = file.read(min(MIB, max_bytes + 1 - len(data)))
                if not chunk:
                    return bytes(data)
                data += chunk
        except OSError as problem:
            raise error(f"{shortened_path(path)}: cannot be read: {problem.strerror}", fix) from None
    limit = f"{max_bytes // MIB} MiB" if max_bytes >= MIB else f"{max_bytes // 2**10} KiB"
    raise error(f"{shortened_path(path)}: larger than {limit}", fix)


def shortened_path(path: Path) -> str:
    return shortened(str(path), 400)


def defect(value: object) -> str | None:
    """Describe what parsers accept and callers cannot handle: half a UTF-16 pair, numbers and nesting without end."""
    pending = [(value, 1)]
    while pending:
        item, depth = pending.pop()
        if isinstance(item, str):
            if not item.isascii() and any("\ud800" <= character <= "\udfff" for character in item):
                return f"half of a UTF-16 pair in {shown(item)!a:.80}"
        elif isinstance(item, int):
            if item.bit_length() > MAX_BITS:
                return "a number of too many digits"
        elif isinstance(item, dict | list):
            if depth > MAX_DEPTH:
                return f"nested more than {MAX_DEPTH} levels deep"
            pending += [(child, depth + 1) for child in item]
            if isinstance(item, dict):
                pending += [(child, depth + 1) for child in item.values()]
    return None


def read_json_object(
    path: Path,
    *,
    max_bytes: int = MAX_BYTES,
    error: type[Glm5Error] = CheckpointError,
    fix: str = "copy the file again",
) -> dict[str, Any]:
    """Read the JSON object in `path`. Arguments and errors as `read_json`; another JSON value is an error, too."""
    value = read_json(path, max_bytes=max_bytes, error=error, fix=fix)
    if not isinstance(value, dict):
        raise error(f"{shortened_path(path)}: not a JSON object", fix)
    return value


def read_json(
    path: Path,
    *,
    max_bytes: int = MAX_BYTES,
    error: type[Glm5Error] = CheckpointError,
    fix: str = "copy the file again",
) -> Any:
    """Read the JSON value in `path`.

    Args:
        max_bytes: a larger file is refused before it is read.
        error: class of the error. fix: what the user should do about a damaged file.
    Raises:
        error: one line with the path: as `read_bytes`, or not what `parse_json` accepts.
    """
    data = read_bytes(path, max_bytes, error, fix)
    try:
        return parse_json(data)
    except ValueError as problem:
        raise error(f"{shortened_path(path)}: not valid JSON: {shortened(str(problem), 160)}", fix) from None


def parse_json(data: bytes | str) -> Any:
    """Parse a JSON text.

    Raises:
        ValueError: not UTF-8, not JSON, nested too deeply, a number of too many digits, half a UTF-16 pair (it cannot
            be printed), or a key given twice (parsers differ in which of the two counts). JSONDecodeError, with the
            line, if it is not JSON at all.
    """
    text = data.decode("utf-8") if isinstance(data, bytes) else data
    try:
        value = json.loads(text, object_pairs_hook=_unique_keys)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if problem := defect(value):
        raise ValueError(problem)
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        raise ValueError("a key is given twice")
    return entries
