"""`glm5-ascend warm-up`: compile every kernel in advance."""

from __future__ import annotations

import sys
import time

import typer

from glm5_ascend.cli.command import NoOptions, Output, add_command
from glm5_ascend.errors import EXIT_OK, MissingEnvironmentError


def register(app: typer.Typer) -> None:
    add_command(app, "warm-up", run, "warm-up")


def run(options: NoOptions, output: Output) -> int:
    """Compile all kernels for this processor and store them, for example while a container image is built."""
    from glm5_kernels import registry
    from glm5_kernels.ops import compile_all
    from glm5_kernels.registry import cache

    missing = registry.missing("cpu")
    if missing is not None:
        raise MissingEnvironmentError(missing, "pip install glm5-ascend")
    cache.compilation.say = lambda message: None  # the lines below report it
    start = time.monotonic()
    for op in compile_all():
        print(f"compiling {op}", file=sys.stderr, flush=True)
    folder, functions = cache.prepare(), cache.compilation.functions
    location = f"stored in {folder}" if folder is not None else f"not stored: export {cache.VARIABLE}=DIRECTORY"
    print(f"{functions} functions compiled in {time.monotonic() - start:.0f} s, {location}")
    return EXIT_OK
