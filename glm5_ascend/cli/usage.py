"""What is said where a command fails: one error line, one line that mends it, and one JSON object for scripts."""

from __future__ import annotations

import json
import sys

import typer

from glm5_ascend.errors import EXIT_BAD_INPUT, EXIT_INTERRUPTED, printable, shortened

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
        print(json.dumps(value))
    return code


def report_usage(error: Exception, arguments: list[str]) -> int:
    """A command line that cannot be understood. Without any argument the help is the answer."""
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()  # type: ignore[attr-defined]
        return EXIT_BAD_INPUT
    message = " ".join(error.format_message().split()).rstrip(".")  # type: ignore[attr-defined]
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "glm5-ascend"
    return report(message, f"{path} --help", EXIT_BAD_INPUT, arguments)
