"""Text files -> token ids, through a checkpoint's own tokenizer and chat template."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from glm5_ascend.checkpoint.tokenizer_process import SourceTokenizer
from glm5_ascend.errors import CheckpointError, TextError
from glm5_ascend.files.untrusted import open_regular, parse_json

#: Characters that are tokenized at once: the tokenizer needs some 1300 bytes for each.
PIECE = 64 * 1024
#: Characters of one line of a .jsonl, or of a whole .json.
MAX_RECORD = 64 * 1024**2
_BEHIND_LINE = re.compile(r"(?<=\n)(?=\S)")
_BEFORE_WORD = re.compile(r"(?<=\w)(?= \w)")


def encoded_records(path: Path, tokenizer: SourceTokenizer) -> Iterator[list[int]]:
    """Yield the token ids of `encoded_tasks`."""
    return (ids for _, ids in encoded_tasks(path, tokenizer))


def encoded_tasks(path: Path, tokenizer: SourceTokenizer) -> Iterator[tuple[str, list[int]]]:
    """Task and token ids of the records of `path`, in order; read and tokenized lazily, piece by piece.

    A record of up to `PIECE` characters is one item; a longer one is one item for each of its `pieces`, so that memory
    does not depend on its length.

    Args:
        path: .jsonl (each line a string, {"text": ...}, {"inputs_pretokenized": ...} or {"messages": [...],
            "tools": [...]}; "task" names the family of tasks it belongs to), .json (a list of the same), or .txt.
    Raises:
        TextError: unreadable file or record, by line.
    """
    if path.suffix == ".txt":
        with _opened(path) as file:
            for piece in pieces(iter(lambda: file.read(PIECE), "")):
                yield "", tokenizer.encode(piece)
        return
    for line, record in read_records(path):
        task = record.get("task", "") if isinstance(record, dict) else ""
        if not isinstance(task, str):
            raise TextError(f'{path}:{line}: "task" is not a string', "name the family of tasks, or leave it out")
        for piece in pieces(iter([_text(tokenizer, record, path, line)])):
            yield task, tokenizer.encode(piece)


def pieces(parts: Iterator[str]) -> Iterator[str]:
    """The text that `parts` add up to, in pieces of at most `PIECE` characters.

    A piece ends where tokenizers begin a new word anyway: after the last line end in its second half that no white
    space follows; else before the last single space between two words; else where it is full.
    """
    rest = ""
    for part in parts:
        rest += part
        start = 0
        while len(rest) - start > PIECE:
            cut = _cut(rest, start)
            yield rest[start:cut]
            start = cut
        rest = rest[start:]
    if rest:
        yield rest


def _cut(text: str, start: int) -> int:
    window = text[start + PIECE // 2 : start + PIECE + 1]  # one character more: what follows the piece
    for boundary in (_BEHIND_LINE, _BEFORE_WORD):
        cuts = [match.start() for match in boundary.finditer(window)]
        if cuts:
            return start + PIECE // 2 + cuts[-1]
    return start + PIECE


def check_vocabulary(source: Path, largest: int, vocab_size: int) -> None:
    """Raise `CheckpointError` where the tokenizer of `source` gives ids that its model does not have."""
    if largest >= vocab_size:
        raise CheckpointError(
            f"{source}: the tokenizer gives id {largest}, config.json has vocab_size {vocab_size}",
            "tokenizer and model differ",
        )


def read_records(path: Path) -> Iterator[tuple[int, Any]]:
    """(line, record) of a .jsonl, .json or .txt file; a .jsonl is read line by line.

    Raises:
        TextError: unreadable, or a line, or a whole .json or .txt file, of more than `MAX_RECORD` characters.
    """
    with _opened(path) as file:
        if path.suffix == ".jsonl":
            yield from _lines(path, file)
            return
        text = file.read(MAX_RECORD + 1)
        if len(text) > MAX_RECORD:
            raise TextError(f"{path}: longer than {MAX_RECORD} characters", "make it a .jsonl of shorter texts")
        if path.suffix == ".txt":
            yield 1, text
        else:
            yield from _list(path, text)


@contextmanager
def _opened(path: Path) -> Iterator[TextIO]:
    """Open a text file; every error while it is read becomes a TextError."""
    if path.suffix not in (".jsonl", ".json", ".txt"):
        raise TextError(f"{path}: a text file must be .jsonl, .json or .txt", "name it so, or convert it")
    fix = "give a .jsonl or .txt file"
    try:
        with open_regular(path, TextError, fix) as raw, io.TextIOWrapper(raw, encoding="utf-8") as file:
            yield file
    except (OSError, UnicodeDecodeError) as error:
        raise TextError(f"{path}: cannot be read: {error}", fix) from None


def _lines(path: Path, file: TextIO) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(iter(lambda: file.readline(MAX_RECORD + 1), ""), start=1):
        if len(line) > MAX_RECORD:
            raise TextError(f"{path}:{number}: longer than {MAX_RECORD} characters", "make it several lines")
        if line.strip():
            try:
                yield number, parse_json(line)
            except ValueError as error:
                raise TextError(f"{path}:{number}: not valid JSON: {error}", "one JSON value per line") from None


def _list(path: Path, text: str) -> Iterator[tuple[int, Any]]:
    try:
        values = parse_json(text)
    except ValueError as error:
        line = getattr(error, "lineno", 1)
        raise TextError(f"{path}:{line}: not valid JSON: {error}", "a list of texts") from None
    if not isinstance(values, list):
        raise TextError(f"{path}:1: not a list", "a list of texts")
    yield from enumerate(values, start=1)


def _text(tokenizer: SourceTokenizer, record: Any, path: Path, line: int) -> str:
    text = record.get("text", record.get("inputs_pretokenized")) if isinstance(record, dict) else record
    if isinstance(text, str):
        return text
    if isinstance(record, dict) and isinstance(record.get("messages"), list):
        try:
            return tokenizer.render(record["messages"], record.get("tools"))
        except TextError as error:
            raise TextError(
                f"{path}:{line}: chat template refuses the messages: {error.message.split(': ', 2)[-1]}",
                "correct the record",
            ) from None
    raise TextError(f'{path}:{line}: needs a string, {{"text": ...}} or {{"messages": [...]}}', "correct the record")
