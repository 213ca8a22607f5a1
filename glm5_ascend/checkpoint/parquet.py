"""Rows of a Parquet file as JSON objects, read by pyarrow, which the extra `parquet` installs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from glm5_ascend.errors import MissingEnvironmentError, TextError, shortened
from glm5_ascend.files.untrusted import defect

#: Bytes of a column chunk that are read at once; row groups of 1 GB are usual.
_BUFFER = 1024**2


def read_rows(path: Path, file: BinaryIO, limit: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """(row, object) of an open Parquet file, one row in memory at a time.

    A null, which stands for an absent key, and what JSON does not have (bytes of an image, a date) are left out.

    Raises:
        MissingEnvironmentError: pyarrow is not installed.
        TextError: damaged, or a row of more than `limit` bytes.
    """
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise MissingEnvironmentError(
            f"{path}: Parquet is read by pyarrow, which is not installed", "pip install 'pyarrow>=18', or give a .jsonl"
        ) from None
    index = 0
    try:
        rows = ParquetFile(file, buffer_size=_BUFFER, pre_buffer=False).iter_batches(1, use_threads=False)
        for index, row in enumerate(rows, start=1):
            if row.nbytes > limit:
                raise TextError(f"{path}:{index}: longer than {limit} bytes", "make it several rows")
            value = _json(row.to_pylist()[0])
            if problem := defect(value):
                raise TextError(f"{path}:{index}: {problem}", "correct the row")
            yield index, value
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError, RecursionError, MemoryError) as error:
        reason = shortened(str(error).partition("\n")[0], 160)
        raise TextError(f"{path}:{index + 1}: not readable as Parquet: {reason}", "copy the file again") from None


def _json(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: item for key, entry in value.items() if (item := _json(entry)) is not None}
    if isinstance(value, list):
        return [_json(entry) for entry in value]
    return value if isinstance(value, str | int | float | bool) else None
