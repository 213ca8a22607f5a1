"""The one reader of the JSON files a checkpoint brings: anybody may have made them, so nothing is taken on trust."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from glm5_ascend.errors import CheckpointError, Glm5Error

MIB = 1024**2
#: config.json has some kB, our provenance file some 100 kB.
MAX_BYTES = 64 * MIB
#: An index or a quantization description has a line per tensor: 25 MB for GLM-5.
MAX_BYTES_BY_TENSOR = 512 * MIB
#: Levels of nesting; the files of the format have at most six. Far below what the parser or our own loops could take.
MAX_DEPTH = 64
#: A longer integer has no float; one of 4300 digits and more Python refuses to parse at all.
_MAX_DIGITS = 300


def read_json_object(
    path: Path,
    *,
    max_bytes: int = MAX_BYTES,
    error: type[Glm5Error] = CheckpointError,
    fix: str = "copy the file again",
) -> dict[str, Any]:
    """The JSON object in `path`.

    Args:
        max_bytes: a larger file is refused before it is read.
        error: class of what is raised.
        fix: what the user should do about a file that is not sound.
    Raises:
        error: one line with the path: not there, not a regular file (a FIFO would be waited for forever), too large,
            unreadable, not UTF-8, not JSON, not an object, nested too deeply, a number of too many digits, half a
            UTF-16 pair (it cannot be printed), or a key given twice (which of the two counts is the parser's choice).
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise error(f"{path}: not a regular file", fix)
        with path.open("rb") as file:
            data = file.read(max_bytes + 1) if os.fstat(file.fileno()).st_size <= max_bytes else None
    except FileNotFoundError:
        raise error(f"{path}: not found", "the checkpoint is incomplete: copy it again") from None
    except OSError as problem:
        raise error(f"{path}: cannot be read: {problem.strerror}", fix) from None
    if data is None or len(data) > max_bytes:
        raise error(f"{path}: larger than {max_bytes // MIB} MiB", fix)
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=unique_keys, parse_int=_integer)
    except RecursionError:
        raise error(f"{path}: not valid JSON: nested too deeply", fix) from None
    except ValueError as problem:
        raise error(f"{path}: not valid JSON: {problem}", fix) from None
    if not isinstance(value, dict):
        raise error(f"{path}: not a JSON object", fix)
    if defect := _defect(value):
        raise error(f"{path}: not valid JSON: {defect}", fix)
    return value


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """`object_pairs_hook` for JSON: of two equal keys one parser takes the first and another the last.

    Raises:
        ValueError: a key is given twice.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is given twice")
    return found


def _integer(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _defect(value: object) -> str | None:
    """What the parser lets through and callers cannot handle; without recursion."""
    pending = [(value, 1)]
    while pending:
        item, depth = pending.pop()
        if isinstance(item, str):
            if not item.isascii() and any("\ud800" <= character <= "\udfff" for character in item):
                return f"half of a UTF-16 pair in {item!a:.80}"
        elif isinstance(item, dict | list):
            if depth > MAX_DEPTH:
                return f"nested more than {MAX_DEPTH} levels deep"
            pending += [(child, depth + 1) for child in item]
            if isinstance(item, dict):
                pending += [(child, depth + 1) for child in item.values()]
    return None
