"""The one reader of JSON that others wrote: files, lines, answers of servers. Nothing in it is taken on trust."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from glm5_ascend.errors import CheckpointError, Glm5Error, shortened
from glm5_ascend.files.foreign import MAX_DEPTH as MAX_DEPTH
from glm5_ascend.files.foreign import MAX_DIGITS, defect, read_bytes, shortened_path

MIB = 1024**2
#: config.json and the generation config have some kB.
MAX_CONFIG_BYTES = 4 * MIB
#: Our provenance file has some 100 kB, GLM-5's tokenizer.json 20 MB.
MAX_BYTES = 64 * MIB
#: An index or a quantization description has a line per tensor: 25 MB for GLM-5.
MAX_BYTES_BY_TENSOR = 512 * MIB


def read_json_object(
    path: Path,
    *,
    max_bytes: int = MAX_BYTES,
    error: type[Glm5Error] = CheckpointError,
    fix: str = "copy the file again",
) -> dict[str, Any]:
    """The JSON object in `path`. Arguments and errors as `read_json`, which also is the error for another value."""
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
    """The JSON value in `path`.

    Args:
        max_bytes: a larger file is refused before it is read.
        error: class of what is raised.
        fix: what the user should do about a file that is not sound.
    Raises:
        error: one line with the path: not there, not a regular file (a FIFO would be waited for forever), too large,
            unreadable, or not what `parse_json` takes.
    """
    data = read_bytes(path, max_bytes, error, fix)
    try:
        return parse_json(data)
    except ValueError as problem:
        raise error(f"{shortened_path(path)}: not valid JSON: {shortened(str(problem), 160)}", fix) from None


def parse_json(data: bytes | str) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: not UTF-8, not JSON, nested too deeply, a number of too many digits, half a UTF-16 pair (it cannot
            be printed), or a key given twice (which of the two counts is the parser's choice). JSONDecodeError, with
            the line, where it is no JSON at all.
    """
    text = data.decode("utf-8") if isinstance(data, bytes) else data
    try:
        value = json.loads(text, object_pairs_hook=_unique_keys, parse_int=_integer, parse_float=_fraction)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if problem := defect(value):
        raise ValueError(problem)
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is given twice")
    return found


def _integer(digits: str) -> int:
    _check_digits(digits)
    return int(digits)


def _fraction(digits: str) -> float:
    _check_digits(digits)
    return float(digits)


def _check_digits(digits: str) -> None:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
