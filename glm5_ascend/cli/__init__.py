"""The command line: parsing, messages and exit codes. Each command lives in its own module and imports late."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any, NoReturn

import typer

from glm5_ascend import __version__
from glm5_ascend.cli import (
    accept,
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
    rehearse,
    serve,
    smoke,
    surroundings,
    ui,
    usage,
    verify,
    warm_up,
    watch,
)
from glm5_ascend.cli.interruption import Interruption
from glm5_ascend.errors import EXIT_BAD_INPUT, EXIT_CHECK_FAILED, EXIT_ENVIRONMENT, EXIT_INTERRUPTED, EXIT_OK, Glm5Error
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
    watch,
    accept,
    deploy,
    rehearse,
    demo,
    demo_model,
    parity,
    doctor,
    warm_up,
)
for module in COMMANDS:
    module.register(app)
_STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


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
    sys.exit(run_process(sys.argv[1:], at_end=signal.SIG_DFL))


def run_process(arguments: list[str], at_end: Any) -> int:
    """`run` as all that this process does: with its signals, and with a reader of the output that may go away.

    Args:
        at_end: handler of the signals when the command is over.
    """
    # A container, a job scheduler or a terminal that closes stops us as Ctrl-C does: clean up alike.
    heeded = [each for each in _STOP if signal.getsignal(each) is not signal.SIG_IGN]
    # Idle OpenMP threads must sleep, not spin: on a busy machine spinning makes a run five times slower (measured).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    surroundings.make_stderr_lossy()
    interruption = Interruption()
    try:
        interruption.heed(heeded)
        code = usage.flush(run(arguments))
    except KeyboardInterrupt:  # between the parts of `run`
        print("interrupted", file=sys.stderr)
        code = EXIT_INTERRUPTED
    except BrokenPipeError:  # `| head`
        usage.drop(sys.stdout)
        code = EXIT_CHECK_FAILED
    except Exception:
        if not interruption.came:  # else it is what a library made of the signal
            raise
        print("interrupted", file=sys.stderr)
        code = EXIT_INTERRUPTED
    for each in heeded:
        signal.signal(each, at_end)
    return code


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
    except MemoryError:
        return usage.report("not enough memory", "free some, or give less at once", EXIT_ENVIRONMENT, arguments)
    except BrokenPipeError:
        raise
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        return usage.report(
            f"{place}{error.strerror or error}", "check path, permissions and disk", EXIT_BAD_INPUT, arguments
        )
    finally:
        COMMAND.reset(command)
    if result == EXIT_INTERRUPTED:  # no command returns it: others of typer's make a result of Ctrl-C
        print("interrupted", file=sys.stderr)
    return result if isinstance(result, int) else EXIT_OK
