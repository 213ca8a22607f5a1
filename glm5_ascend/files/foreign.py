"""Bytes of files that anybody may have made, before anything parses them, and values of theirs in our messages.

The three readers stand on this: JSON (`model/json_file.py`), YAML (`yaml_file.py`), safetensors headers
(`checkpoint/shards.py`). Nothing else in this package parses a foreign file.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

from glm5_ascend.errors import Glm5Error, shortened, shown

#: Levels of nesting; the files we read have at most a dozen. Far below what the parsers or our own loops could take.
MAX_DEPTH = 64
#: A longer integer has no float; one of 4300 digits and more Python refuses to parse at all.
MAX_DIGITS = 300
#: How the file begins that `git clone` without Git LFS leaves in the place of a large one.
_LFS_POINTER = b"version https://git-lfs.github.com/"


def open_regular(path: Path, error: type[Glm5Error], fix: str) -> BinaryIO:
    """`path`, opened for reading.

    Raises:
        error: one line with the path: not there, no regular file, or not readable. A FIFO, a device or a socket is not
            opened; one that takes the file's place in between is opened without waiting, and refused then.
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
    """All of a file.

    Raises:
        error: as `open_regular`, or larger than `max_bytes`, which is known before it is read.
    """
    with open_regular(path, error, fix) as file:
        try:
            size = os.fstat(file.fileno()).st_size
            data = bytearray()
            # Files of /proc say 0 bytes and hold more; others grow while they are read.
            while size <= max_bytes and len(data) <= max_bytes:
                piece = file.read(min(1 << 20, max_bytes + 1 - len(data)))
                if not piece:
                    return bytes(data)
                data += piece
        except OSError as problem:
            raise error(f"{shortened_path(path)}: cannot be read: {problem.strerror}", fix) from None
    raise error(f"{shortened_path(path)}: larger than {_amount(max_bytes)}", fix)


def _amount(count: int) -> str:
    return f"{count // 2**20} MiB" if count >= 2**20 else f"{count // 2**10} KiB"


def shortened_path(path: Path) -> str:
    return shortened(str(path), 400)


def defect(value: object) -> str | None:
    """What parsers let through and callers cannot handle: half a UTF-16 pair, or nesting without end."""
    pending = [(value, 1)]
    while pending:
        item, depth = pending.pop()
        if isinstance(item, str):
            if not item.isascii() and any("\ud800" <= character <= "\udfff" for character in item):
                return f"half of a UTF-16 pair in {shown(item)!a:.80}"
        elif isinstance(item, dict | list):
            if depth > MAX_DEPTH:
                return f"nested more than {MAX_DEPTH} levels deep"
            pending += [(child, depth + 1) for child in item]
            if isinstance(item, dict):
                pending += [(child, depth + 1) for child in item.values()]
    return None
