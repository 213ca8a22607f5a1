"""The errors a user sees: one line that says what and where, one that says what to do, and an exit code."""

from __future__ import annotations

import os
import reprlib
import shlex

EXIT_OK, EXIT_CHECK_FAILED, EXIT_BAD_INPUT, EXIT_ENVIRONMENT, EXIT_INTERRUPTED = 0, 1, 2, 3, 130


def json_frame(command: str, code: int = EXIT_OK) -> dict[str, object]:
    """The keys that every JSON answer of a command begins with."""
    return {"schema_version": 1, "command": command, "ok": code == EXIT_OK, "exit_code": code}


def printable(text: str) -> str:
    """One line for a terminal: names and answers of strangers may hold line ends, escape codes, half characters."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shell_word(text: str) -> str:
    """Any text as one printable word of bash, which means the text itself."""
    if text.isprintable():
        return shlex.quote(text)
    written = (chr(b) if 32 <= b < 127 and b not in b"\\'" else f"\\x{b:02x}" for b in os.fsencode(text))
    return f"$'{''.join(written)}'"


def shortened(text: str, limit: int = 80) -> str:
    """At most `limit` characters of `text`: its begin and its end."""
    return text if len(text) <= limit else f"{text[: limit * 2 // 3 - 5]} ... {text[-(limit // 3) :]}"


def shown(value: object, limit: int = 60) -> str:
    """A value as Python writes it, at most some `limit` characters; nothing longer is built on the way."""
    writer = reprlib.Repr()
    writer.maxlevel, writer.maxstring, writer.maxother, writer.maxlong = 3, limit, limit, limit
    return shortened(writer.repr(value), limit)


class Glm5Error(Exception):
    """Base of every error this package raises on purpose.

    Args:
        message: one line: what is wrong, and where (file, tensor, shard, line).
        tip: one line: what to do about it.

    Both may hold names out of a stranger's file: what is no printable character is written as its escape.
    """

    exit_code = EXIT_BAD_INPUT

    def __init__(self, message: str, tip: str = "") -> None:
        self.message, self.tip = printable(message), printable(tip)
        super().__init__(self.message)


class CheckFailedError(Glm5Error):
    """A check ran and its answer is no (exit code 1)."""

    exit_code = EXIT_CHECK_FAILED


class ConfigError(Glm5Error):
    """config.json is missing, unreadable, inconsistent, or of another architecture."""


class CheckpointError(Glm5Error):
    """A checkpoint directory, shard or tensor is missing, damaged, or not what its index says."""


class RecipeError(Glm5Error):
    """A quantization recipe that cannot be honoured; the message names file, line and key."""


class TextError(Glm5Error):
    """A file of texts or prompts that cannot be read or holds too little; the message names file and line."""


class EvaluationError(Glm5Error):
    """Two models, or a model and a server, that cannot be compared."""


class OutputError(Glm5Error):
    """The output place cannot be used: exists, overlaps the source, no space."""


class StoppedError(Glm5Error):
    """Stopped by the user; what is done is kept, and run the same command again from there."""

    exit_code = EXIT_INTERRUPTED


class MissingEnvironmentError(Glm5Error):
    """A package, device or version is missing or broken (exit code 3)."""

    exit_code = EXIT_ENVIRONMENT


class PlanError(Glm5Error):
    """A plan that cannot be made: unknown hardware, impossible layout, a context the model does not have."""
