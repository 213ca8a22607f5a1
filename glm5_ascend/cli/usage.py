"""Errors of a command: one line that says what is wrong, one that says what to do, and a JSON object for scripts."""

from __future__ import annotations

import json
import sys
from contextlib import suppress

import typer

from glm5_ascend.cli.streams import discard
from glm5_ascend.errors import EXIT_BAD_INPUT, EXIT_CHECK_FAILED, EXIT_INTERRUPTED, EXIT_OK, printable, shortened

#: Newer typers carry their own copy of click; in both, UsageError is the parent of the public BadParameter.
USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]
#: Most characters of a line: a name in a foreign file may have millions.
LONGEST = 1500


def report(message: str, tip: str, code: int, arguments: list[str]) -> int:
    """Print a failure; returns `code`."""
    message, tip = shortened(message, LONGEST), shortened(tip, LONGEST)
    kind, label = ("interrupted", "next") if code == EXIT_INTERRUPTED else ("error", "fix")
    # Names in files and answers of servers may contain escape codes, which must not reach the terminal.
    print(printable(f"{kind}: {message}") + (f"\n  {label}: {printable(tip)}" if tip else ""), file=sys.stderr)
    if "--json" in arguments:
        value = {"schema_version": 1, "ok": False, "exit_code": code, "error": {"message": message, "fix": tip}}
        with suppress(OSError):
            print(json.dumps(value))
    return code


def flush(code: int) -> int:
    """Write the rest of the output; returns `code`, or an error's where the output cannot be written.

    Raises:
        BrokenPipeError: the reader is gone.
    """
    try:
        if sys.stdout is not None:  # None if it was closed at the start
            sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        discard(sys.stdout)
        if code in (EXIT_OK, EXIT_CHECK_FAILED):
            message = f"standard output: cannot be written: {error.strerror}"
            return report(message, "free space on the disk of the output", EXIT_BAD_INPUT, [])
    return code


def report_usage(error: Exception, arguments: list[str]) -> int:
    """Report a command line that cannot be parsed; without any argument print the help."""
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()  # type: ignore[attr-defined]
        return EXIT_BAD_INPUT
    message = " ".join(error.format_message().split()).rstrip(".")  # type: ignore[attr-defined]
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "glm5-ascend"
    return report(message, f"{path} --help", EXIT_BAD_INPUT, arguments)
