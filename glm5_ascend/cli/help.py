"""How commands are registered: examples under each help, groups of options, and plain words for their values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand

#: Groups of options in a long help.
CALIBRATION, RUN, SERVERS, SHOWN = "Calibration", "Run", "Servers", "Output"
#: What stands for a value of a type; the metavar of an option says it better where there is one.
WORDS: dict[Any, str] = {int: "N", float: "X", str: "TEXT", Path: "PATH"}


class Command(TyperCommand):
    """A command whose help shows no type names of Python."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for param in self.params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
            elif param.metavar is None:
                kind = getattr(getattr(param, "type_descriptor", None), "annotation", None)
                param.metavar = WORDS.get(kind)

    def get_help_option(self, ctx: Any) -> Any:
        option = super().get_help_option(ctx)
        if option is not None:
            option.metavar = ""
        return option


def command(
    app: typer.Typer, name: str, function: Callable[..., Any], *examples: str, extra_args: bool = False
) -> None:
    """Register a command; `examples` are command lines without the program's name, at most 64 characters long.

    extra_args: what follows `--` is not ours to parse.
    """
    lines = [f"  glm5-ascend {example}" for example in examples]
    app.command(
        name, cls=Command, epilog="\n\n".join(["Examples:", *lines]), context_settings={"allow_extra_args": extra_args}
    )(function)
