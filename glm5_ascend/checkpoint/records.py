"""Records of a text file: .jsonl, .json, .csv, .tsv, .txt, also compressed by gzip, or .parquet. Others are named."""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TextIO, cast

from glm5_ascend.errors import MissingEnvironmentError, TextError, shortened
from glm5_ascend.files.untrusted import defect, open_regular, parse_json

#: Characters of one line of a .jsonl, or of a whole .json.
MAX_RECORD = 64 * 1024**2
#: Names of files that are read, by their end.
KINDS = (".jsonl", ".json", ".csv", ".tsv", ".txt", ".parquet")
_SAME = {".ndjson": ".jsonl", ".text": ".txt", ".md": ".txt"}
_FIX = "give a .jsonl, .json, .csv or .txt file, or one of them with .gz"
_ICONV = "convert it to UTF-8: iconv -f {} -t UTF-8 FILE > NEW"
_PICKLE = ("a pickle", "save it as .jsonl: a pickle is never opened")
#: First bytes of files that are no text -> (their format, what to do).
_MAGIC = {
    b"ARROW1": ("an Arrow file", "convert it to .jsonl: pandas.read_feather, then DataFrame.to_json"),
    b"PK\x03\x04": ("a zip archive or an Excel sheet", "unpack it, or save the sheet as .csv"),
    b"\x28\xb5\x2f\xfd": ("compressed by zstd", "unpack it: zstd -d FILE"),
    b"\x80\x04": _PICKLE,
    b"\x80\x05": _PICKLE,
    b"\xff\xfe": ("UTF-16 text", _ICONV.format("UTF-16")),
    b"\xfe\xff": ("UTF-16 text", _ICONV.format("UTF-16")),
}
#: Bytes of a column chunk that are read at once; row groups of 1 GB are usual.
_BUFFER = 1024**2
#: Keys of a JSON object around a list of records.
_AROUND = ("data", "train", "rows", "examples", "instances", "records", "samples", "items", "texts")


@contextmanager
def opened(path: Path) -> Iterator[tuple[str, TextIO]]:
    """Open a text file, unpacked: its kind (of `KINDS`) and its text; every error while it is read is a TextError.

    A Parquet file has no text: its bytes are the `buffer` of what is returned.
    """
    try:
        with open_regular(path, TextError, _FIX) as raw:
            packed = raw.peek(2)[:2] == b"\x1f\x8b"  # type: ignore[attr-defined]
            data = cast(BinaryIO, io.BufferedReader(gzip.GzipFile(fileobj=raw))) if packed else raw
            ending = _kind(path, data.peek(16)[:16])  # type: ignore[attr-defined]
            if packed and ending == ".parquet":
                raise TextError(f"{path}: Parquet packed by gzip: not read", f"unpack it: gunzip {path.name}")
            with io.TextIOWrapper(
                data, encoding="utf-8-sig", newline="" if ending in (".csv", ".tsv") else None
            ) as file:
                yield ending, file
    except UnicodeDecodeError as error:
        raise TextError(f"{path}: cannot be read: not UTF-8: {error.reason}", _ICONV.format("GBK")) from None
    except (OSError, EOFError, zlib.error) as error:
        raise TextError(f"{path}: cannot be read: {error}", _FIX) from None


def _kind(path: Path, head: bytes) -> str:
    name = Path(path.stem) if path.suffix.lower() == ".gz" else path
    ending = _SAME.get(name.suffix.lower(), name.suffix.lower())
    if head.startswith(b"PAR1") or ending == ".parquet":
        return ".parquet"
    for magic, (what, fix) in _MAGIC.items():
        if head.startswith(magic):
            raise TextError(f"{path}: {what}: not read", fix.replace("FILE", path.name))
    if b"\0" in head:
        raise TextError(f"{path}: zero bytes: no text in UTF-8", _ICONV.format("UTF-16"))
    if ending not in KINDS:
        raise TextError(
            f"{path}: a text file must be {', '.join(KINDS)}, or text with .gz", "name it so, or convert it"
        )
    return ending


def read_records(path: Path) -> Iterator[tuple[int, Any]]:
    """(line or row, record) of a text file; a .jsonl, .csv or .parquet is read line by line.

    A .json is a list of records, an object with such a list (`{"data": [...]}`), or JSON lines; a row of a .csv or
    .parquet is an object.

    Raises:
        TextError: unreadable, or a line, or a whole .json or .txt file, of more than `MAX_RECORD` characters.
        MissingEnvironmentError: a .parquet, and pyarrow is not installed.
    """
    with opened(path) as (ending, file):
        if ending == ".jsonl":
            yield from _lines(path, file)
        elif ending in (".csv", ".tsv"):
            yield from _rows(path, file, "\t" if ending == ".tsv" else ",")
        elif ending == ".parquet":
            yield from _parquet_rows(path, file.buffer)
        elif ending == ".txt":
            yield 1, _whole(path, file)
        else:
            yield from _values(path, _whole(path, file))


def _whole(path: Path, file: TextIO) -> str:
    text = file.read(MAX_RECORD + 1)
    if len(text) > MAX_RECORD:
        raise TextError(
            f"{path}: longer than {MAX_RECORD} characters", "make it a .jsonl: jq -c '.[]' FILE > calib.jsonl"
        )
    return text


def _lines(path: Path, file: TextIO) -> Iterator[tuple[int, Any]]:
    for position, line in enumerate(iter(lambda: file.readline(MAX_RECORD + 1), ""), start=1):
        if len(line) > MAX_RECORD:
            raise TextError(f"{path}:{position}: longer than {MAX_RECORD} characters", "make it several lines")
        if not line.strip():
            continue
        try:
            yield position, parse_json(line)
        except ValueError as error:
            raise TextError(f"{path}:{position}: not valid JSON: {error}", "one JSON value per line") from None


def _rows(path: Path, file: TextIO, delimiter: str) -> Iterator[tuple[int, Any]]:
    limit = csv.field_size_limit(MAX_RECORD)
    try:
        reader = csv.DictReader(file, delimiter=delimiter, strict=True)
        for row in reader:
            yield reader.line_num, {key: value for key, value in row.items() if key and isinstance(value, str)}
    except csv.Error as error:
        raise TextError(
            f"{path}:{reader.line_num}: no valid .csv: {error}", 'quote texts with " and double the quotes inside'
        ) from None
    finally:
        csv.field_size_limit(limit)


def _values(path: Path, text: str) -> Iterator[tuple[int, Any]]:
    try:
        value = parse_json(text)
    except ValueError as error:
        lines = text.strip().splitlines()
        if len(lines) > 1 and lines[0].strip()[-1:] in ("}", "]", '"') and lines[0].strip()[:1] in ("{", '"'):
            yield from _lines(path, io.StringIO(text))
            return
        line = getattr(error, "lineno", 1)
        raise TextError(f"{path}:{line}: not valid JSON: {error}", "a list of texts") from None
    if isinstance(value, dict):
        lists = [key for key in _AROUND if isinstance(value.get(key), list)]
        value = value[lists[0]] if lists else [value] if value else value
    if not isinstance(value, list):
        raise TextError(f"{path}:1: not a list", "a list of texts")
    yield from enumerate(value, start=1)


def _parquet_rows(path: Path, file: BinaryIO) -> Iterator[tuple[int, dict[str, Any]]]:
    """(row, object) of an open Parquet file, one row in memory at a time.

    A null, which stands for an absent key, and what JSON does not have (bytes of an image, a date) are left out.

    Raises:
        MissingEnvironmentError: pyarrow is not installed.
        TextError: damaged, or a row of more than `MAX_RECORD` bytes.
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
            if row.nbytes > MAX_RECORD:
                raise TextError(f"{path}:{index}: longer than {MAX_RECORD} bytes", "make it several rows")
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
