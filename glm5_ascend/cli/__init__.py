"""The command line: parsing, messages and exit codes. Each command lives in its own module and imports late."""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any, NoReturn

import typer

from glm5_ascend import __version__
from glm5_ascend.cli import (
    analyze,
    chat,
    demo,
    demo_model,
    deploy,
    doctor,
    eval,
    parity,
    plan,
    quantize,
    serve,
    smoke,
    surroundings,
    ui,
    verify,
    warm_up,
)
from glm5_ascend.errors import EXIT_BAD_INPUT, EXIT_ENVIRONMENT, EXIT_INTERRUPTED, EXIT_OK, Glm5Error
from glm5_ascend.report.header import COMMAND
from glm5_kernels.registry import KernelUnavailableError

app = typer.Typer(
    name="glm5-ascend",
    help="GLM-5 on Ascend: quantize, verify, serve. Every step runs on a machine without an NPU.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
#: Newer typers carry their own copy of click; in both, UsageError is the parent of the public BadParameter.
_USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]
COMMANDS = (
    quantize,
    verify,
    eval,
    analyze,
    plan,
    serve,
    chat,
    ui,
    smoke,
    deploy,
    demo,
    demo_model,
    parity,
    doctor,
    warm_up,
)
for module in COMMANDS:
    module.register(app)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"glm5-ascend {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version."),
) -> None:
    pass


def main() -> NoReturn:
    """Entry point: run a command, turn every expected failure into one line and an exit code."""
    # A container or a job scheduler stops us with SIGTERM: clean up as for Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # Idle OpenMP threads must sleep, not spin: on a busy machine spinning makes a run five times slower (measured).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit code."""
    surroundings.settle()
    command = COMMAND.set(tuple(arguments))
    try:
        result: Any = app(arguments, standalone_mode=False, prog_name="glm5-ascend")
    except typer.Exit as error:
        return int(error.exit_code)
    except _USAGE_ERROR as error:
        error.show()  # type: ignore[attr-defined]
        return EXIT_BAD_INPUT
    except (typer.Abort, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except Glm5Error as error:
        return _report(error.message, error.tip, error.exit_code, arguments)
    except KernelUnavailableError as error:
        return _report(str(error), "unset GLM5_KERNELS, or install what is missing", EXIT_ENVIRONMENT, arguments)
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        return _report(
            f"{place}{error.strerror or error}", "check path, permissions and disk", EXIT_BAD_INPUT, arguments
        )
    finally:
        COMMAND.reset(command)
    return result if isinstance(result, int) else EXIT_OK


def _report(message: str, tip: str, code: int, arguments: list[str]) -> int:
    kind, label = ("interrupted", "next") if code == EXIT_INTERRUPTED else ("error", "fix")
    print(f"{kind}: {message}" + (f"\n  {label}: {tip}" if tip else ""), file=sys.stderr)
    if "--json" in arguments:
        value = {"schema_version": 1, "ok": False, "exit_code": code, "error": {"message": message, "fix": tip}}
        print(json.dumps(value))
    return code
