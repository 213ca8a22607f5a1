"""What is said where a command fails: one error line, one line that mends it, and one JSON object for scripts."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from typing import TextIO

import typer

from glm5_ascend.errors import EXIT_BAD_INPUT, EXIT_CHECK_FAILED, EXIT_INTERRUPTED, EXIT_OK, printable, shortened

#: Newer typers carry their own copy of click; in both, UsageError is the parent of the public BadParameter.
USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]
#: Characters of a line; a name that somebody else gave may have millions.
LONGEST = 1500


def report(message: str, tip: str, code: int, arguments: list[str]) -> int:
    """Print a failure; returns `code`."""
    message, tip = shortened(message, LONGEST), shortened(tip, LONGEST)
    kind, label = ("interrupted", "next") if code == EXIT_INTERRUPTED else ("error", "fix")
    # Both hold names out of files and answers of servers: an escape code in them must not reach the terminal.
    print(printable(f"{kind}: {message}") + (f"\n  {label}: {printable(tip)}" if tip else ""), file=sys.stderr)
    if "--json" in arguments:
        value = {"schema_version": 1, "ok": False, "exit_code": code, "error": {"message": message, "fix": tip}}
        with suppress(OSError):
            print(json.dumps(value))
    return code


def flush(code: int) -> int:
    """Write what is left of the output; returns `code`, or another one where a report that was made is lost.

    Raises:
        BrokenPipeError: nobody reads it.
    """
    try:
        if sys.stdout is not None:  # closed before we began
            sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        drop(sys.stdout)
        if code in (EXIT_OK, EXIT_CHECK_FAILED):
            said = f"standard output: cannot be written: {error.strerror}"
            return report(said, "free space where it goes to", EXIT_BAD_INPUT, [])
    return code


def drop(stream: TextIO) -> None:
    """Let what is left go nowhere: Python's own last flush would fail once more, with words and a code of its own."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def report_usage(error: Exception, arguments: list[str]) -> int:
    """A command line that cannot be understood. Without any argument the help is the answer."""
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()  # type: ignore[attr-defined]
        return EXIT_BAD_INPUT
    message = " ".join(error.format_message().split()).rstrip(".")  # type: ignore[attr-defined]
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "glm5-ascend"
    return report(message, f"{path} --help", EXIT_BAD_INPUT, arguments)
