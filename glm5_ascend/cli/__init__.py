"""The command line: parsing, messages and exit codes. Each command lives in its own module and imports late."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any, NoReturn

import typer

from glm5_ascend import __version__
from glm5_ascend.cli import streams, usage
from glm5_ascend.cli.command import app
from glm5_ascend.errors import EXIT_BAD_INPUT, EXIT_CHECK_FAILED, EXIT_ENVIRONMENT, EXIT_INTERRUPTED, EXIT_OK, Glm5Error
from glm5_ascend.report.origin import COMMAND
from glm5_ascend.stop_signals import StopSignals, report_interrupted
from glm5_kernels.registry import KernelUnavailableError

#: Modules of this package, in the order of `--help`.
COMMANDS = (
    "quantize", "verify", "eval", "analyze", "plan", "serve", "chat", "smoke", "watch", "accept", "deploy",
    "rehearse", "demo", "demo_model", "parity", "doctor",
)  # fmt: skip
for _name in COMMANDS:
    import_module(f"{__name__}.{_name}")


def _version(value: bool) -> None:
    if value:
        typer.echo(f"glm5-ascend {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", "-V", callback=_version, is_eager=True, help="Show the version."),
) -> None:
    pass


def end(signals: StopSignals) -> NoReturn:
    """Run this process's command line, and exit with its code, whatever signals arrive meanwhile."""
    code = run_process(sys.argv[1:], signals)
    signals.ignore()
    sys.exit(code)


def run_process(arguments: list[str], signals: StopSignals) -> int:
    """Run one command line as the whole purpose of this process; returns its exit code."""
    # Idle OpenMP threads must sleep, not spin: on a busy machine spinning makes a run five times slower (measured).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    streams.make_stderr_non_failing()
    signals.running = True
    try:
        return usage.flush(run(arguments))
    except KeyboardInterrupt:  # outside of `run`
        return report_interrupted()
    except BrokenPipeError:  # `| head`
        streams.discard(sys.stdout)
        return EXIT_CHECK_FAILED
    except Exception:
        if signals.received:  # a library turned the signal into another error
            return report_interrupted()
        raise
    finally:
        signals.running = False


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit code."""
    streams.prepare_process()
    command = COMMAND.set(tuple(arguments))
    try:
        code: Any = app(arguments, standalone_mode=False, prog_name="glm5-ascend")
    except typer.Exit as error:
        code = error.exit_code
    except usage.USAGE_ERROR as error:
        return usage.report_usage(error, arguments)
    except (typer.Abort, KeyboardInterrupt):
        code = EXIT_INTERRUPTED
    except Glm5Error as error:
        return usage.report(error.message, error.tip, error.exit_code, arguments)
    except KernelUnavailableError as error:
        return usage.report(str(error), "unset GLM5_KERNELS, or install what is missing", EXIT_ENVIRONMENT, arguments)
    except MemoryError:
        return usage.report("not enough memory", "free memory, or use a smaller input", EXIT_ENVIRONMENT, arguments)
    except BrokenPipeError:
        raise
    except OSError as error:
        path = f"{error.filename}: " if error.filename else ""
        message = f"{path}{error.strerror or error}"
        return usage.report(message, "check path, permissions and disk", EXIT_BAD_INPUT, arguments)
    finally:
        COMMAND.reset(command)
    if code == EXIT_INTERRUPTED:  # typer makes an exit code of Ctrl-C
        return report_interrupted()
    return code if isinstance(code, int) else EXIT_OK
