"""`glm5-ascend warm-up`: compile every kernel now, so that nothing waits for it later."""

from __future__ import annotations

import sys
import time

import typer

from glm5_ascend.cli.help import command
from glm5_ascend.errors import EXIT_OK, MissingEnvironmentError


def register(app: typer.Typer) -> None:
    command(app, "warm-up", warm_up, "warm-up")


def warm_up() -> int:
    """Compile all kernels for this processor and keep them; an image calls it when it is built."""
    from glm5_ascend.plan.simulate import compile_all as compile_simulator
    from glm5_kernels import registry
    from glm5_kernels.ops import compile_all
    from glm5_kernels.registry import cache

    missing = registry.missing("cpu")
    if missing is not None:
        raise MissingEnvironmentError(missing, "pip install glm5-ascend")
    cache.compilation.say = lambda message: None  # the lines below say it
    began = time.monotonic()
    for op in compile_all():
        print(f"compiling {op}", file=sys.stderr, flush=True)
    print("compiling the planner's simulator", file=sys.stderr, flush=True)
    compile_simulator()
    folder, functions = cache.prepare(), cache.compilation.functions
    where = f"kept in {folder}" if folder is not None else f"not kept: export {cache.VARIABLE}=FOLDER"
    print(f"{functions} functions compiled in {time.monotonic() - began:.0f} s, {where}")
    return EXIT_OK
