"""Text files -> token ids, through a checkpoint's own tokenizer and chat template."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from glm5_ascend.checkpoint.chats import SHAPES, chat, plain_text, tools
from glm5_ascend.checkpoint.records import opened, read_records
from glm5_ascend.checkpoint.tokenizer import SourceTokenizer
from glm5_ascend.errors import CheckpointError, Glm5Error, TextError

#: Characters that are tokenized at once: the tokenizer needs some 1300 bytes for each.
PIECE = 64 * 1024
_BEHIND_LINE = re.compile(r"(?<=\n)(?=\S)")
_BEFORE_WORD = re.compile(r"(?<=\w)(?= \w)")
#: Markers of a beginning. Those of turns have bars: <|user|>, <|im_start|>.
_MARKER = re.compile(r"\s*(\[\w+\]|<\w+>)")


class Piece(NamedTuple):
    """Token ids of a record, or of a part of a long one.

    Attributes:
        task: that the record names; "" for none.
        begins: it is the record's first.
        may_begin: a sequence may begin anywhere in it: a text, not a chat.
    """

    task: str
    ids: list[int]
    begins: bool = True
    may_begin: bool = True


def encoded_pieces(path: Path, tokenizer: SourceTokenizer) -> Iterator[Piece]:
    """The records of `path`, in order; read and tokenized lazily, piece by piece.

    A record of up to `PIECE` characters is one item; a longer one is one item for each of its `pieces`, so that memory
    does not depend on its length.

    Args:
        path: a file of `read_records`, whose records have one of the `SHAPES` of `chats.py`; "task" names the family
            of tasks that a record belongs to. Or .txt.
    Raises:
        TextError: unreadable file or record, by line.
    """
    with opened(path) as (ending, file):
        if ending == ".txt":
            for index, piece in enumerate(pieces(iter(lambda: file.read(PIECE), ""))):
                yield Piece("", tokenizer.encode(piece), begins=index == 0)
            return
    for line, record in read_records(path):
        task = record.get("task", "") if isinstance(record, dict) else ""
        if not isinstance(task, str):
            raise TextError(f'{path}:{line}: "task" is not a string', "name the family of tasks, or leave it out")
        is_text, text = plain_text(record) is not None, _text(tokenizer, record, path, line)
        for index, piece in enumerate(pieces(iter([text]))):
            yield Piece(task, tokenizer.encode(piece), begins=index == 0, may_begin=is_text)


class Packer:
    """Packs records one behind the other into sequences of equal length; none begins inside a chat.

    Args:
        opening: of every text, and of every sequence that begins inside one, unless it has it itself. Chats have it by
            their template.

    Attributes:
        rest: the sequence that is not full yet.
    """

    def __init__(self, length: int, opening: list[int]) -> None:
        self.length, self.opening = length, opening
        self.rest: list[int] = []

    def add(self, piece: Piece) -> Iterator[list[int]]:
        """Add a piece, and yield the sequences that it fills."""
        ids, at, begins = piece.ids, 0, piece.begins
        while at < len(ids) and (self.rest or begins or piece.may_begin):
            if piece.may_begin and (begins or not self.rest) and ids[at : at + len(self.opening)] != self.opening:
                self.rest += self.opening
            stop, begins = at + max(self.length - len(self.rest), 0), False
            self.rest += ids[at:stop]
            at = stop
            if len(self.rest) >= self.length:
                yield self.rest[: self.length]
                self.rest = []


def pieces(parts: Iterator[str]) -> Iterator[str]:
    """The text that `parts` add up to, in pieces of at most `PIECE` characters.

    A piece ends where tokenizers begin a new word anyway: after the last line end in its second half that no white
    space follows; else before the last single space between two words; else where it is full.
    """
    rest = ""
    for text in parts:
        rest += text
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


def opening(tokenizer: SourceTokenizer) -> tuple[str, list[int]]:
    """Text and token ids of the markers that the chat template begins every prompt with: `[gMASK]<sop>` for GLM.

    Without them a model does worse than its weights can: attention keeps much of its mass on them. "" and [] where
    there is no template, or one that begins otherwise.
    """
    try:
        prompt = tokenizer.render([{"role": "user", "content": "a"}], None)
    except Glm5Error:
        return "", []
    text, ids, end = "", list[int](), 0
    while (marker := _MARKER.match(prompt, end)) and len(token := tokenizer.encode(marker[1])) == 1:
        text, ids, end = text + marker[1], [*ids, *token], marker.end()
    return text, ids


def check_vocabulary(source: Path, largest: int, vocab_size: int) -> None:
    """Raise `CheckpointError` where the tokenizer of `source` gives ids that its model does not have."""
    if largest >= vocab_size:
        raise CheckpointError(
            f"{source}: the tokenizer gives id {largest}, config.json has vocab_size {vocab_size}",
            "tokenizer and model differ",
        )


def _text(tokenizer: SourceTokenizer, record: Any, path: Path, line: int) -> str:
    text = plain_text(record)
    try:
        messages = None if text is not None else chat(record)
    except ValueError as error:
        raise TextError(f"{path}:{line}: {error}", "correct the record") from None
    if text is not None:
        return text
    if messages is not None:
        try:
            return tokenizer.render(messages, tools(record))
        except TextError as error:
            raise TextError(
                f"{path}:{line}: chat template refuses the messages: {error.message.split(': ', 2)[-1]}",
                "correct the record",
            ) from None
    has = f"has the keys {', '.join(map(repr, record))[:200]}, " if isinstance(record, dict) else ""
    raise TextError(f"{path}:{line}: {has}needs {SHAPES}", "correct the record")
