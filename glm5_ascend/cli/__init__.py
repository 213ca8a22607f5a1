"""The command line: parsing, messages and exit codes. Each command lives in its own module and imports late."""

from __future__ import annotations

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
    usage,
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
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
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
    version: bool = typer.Option(False, "--version", "-V", callback=_version, is_eager=True, help="Show the version."),
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
        if error.exit_code == EXIT_INTERRUPTED:  # newer typers make this of Ctrl-C
            print("interrupted", file=sys.stderr)
        return int(error.exit_code)
    except usage.USAGE_ERROR as error:
        return usage.report_usage(error, arguments)
    except (typer.Abort, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except Glm5Error as error:
        return usage.report(error.message, error.tip, error.exit_code, arguments)
    except KernelUnavailableError as error:
        return usage.report(str(error), "unset GLM5_KERNELS, or install what is missing", EXIT_ENVIRONMENT, arguments)
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        return usage.report(
            f"{place}{error.strerror or error}", "check path, permissions and disk", EXIT_BAD_INPUT, arguments
        )
    finally:
        COMMAND.reset(command)
    return result if isinstance(result, int) else EXIT_OK
