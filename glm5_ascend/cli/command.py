"""Commands of the command line, made of a dataclass of options and a function that takes it."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand, TyperOption

from glm5_ascend.errors import ConfigError
from glm5_ascend.options import Argument, ExtraArguments, Option, OptionField, option_fields

OUTPUT_PANEL = "Output"
app = typer.Typer(
    name="glm5-ascend",
    help="GLM-5 on Ascend: quantize, verify, serve. Every step runs on a machine without an NPU.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@dataclass(frozen=True)
class Output:
    """Form of the answer: one JSON object on stdout, or text; `quiet`: no progress."""

    json: bool = False
    quiet: bool = False

    def write(self, data: Mapping[str, object], lines: Iterable[str]) -> None:
        """Print an answer: `data` as one JSON object, or the lines."""
        for line in [json.dumps(data)] if self.json else lines:
            print(line)


Run = Callable[[Any, Output], int]


@dataclass(frozen=True)
class NoOptions:
    """Options of a command without options."""


class Command(TyperCommand):
    """A command that refuses empty words and missing values, and leaves what follows `--` to the engine."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for param in self.params:
            if getattr(param, "is_flag", False):
                param.metavar = ""  # typer would show <bool>

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse what stands before `--`. A variable of a script that is not set gives an empty word."""
        options = args[: args.index("--")] if "--" in args else args
        params = (param for param in self.get_params(ctx) if isinstance(param, TyperOption))
        flags = {name: param.is_flag for param in params for name in param.opts}
        for before, word in zip(["", *options], options, strict=False):
            if not word or (word.startswith("--") and word.endswith("=")):
                name = word.rstrip("=") or (before if before.startswith("-") else "an argument")
                raise ConfigError(f"{name}: an empty value", "give a value, or leave it out")
            if flags.get(before) is False and word in flags:
                raise ConfigError(f"{before}: no value stands before {word}", "give a value, or leave it out")
        if not (ctx.allow_extra_args and "--" in args):
            return super().parse_args(ctx, args)
        position = args.index("--")
        super().parse_args(ctx, args[:position])
        ctx.args = [*ctx.args, *args[position + 1 :]]
        return list(ctx.args)


def command(
    name: str, *examples: str, json: bool | str = False, quiet: str = "", group: typer.Typer = app
) -> Callable[[Run], Run]:
    """Register `run(options, output)` as a command; its options are the dataclass that annotates the first parameter.

    Args:
        examples: command lines without the program's name, at most 64 characters long.
        json: the command has `--json`; a text is its help. quiet: help of `--quiet`, which the command lacks without.
    """

    def register(run: Run) -> Run:
        fields = option_fields(get_type_hints(run)["options"])
        parameters = [_parameter(field) for field in fields if not isinstance(field.info, ExtraArguments)]
        if json:
            parameters.append(_flag("as_json", "One JSON object on stdout." if json is True else json, "--json"))
        if quiet:
            parameters.append(_flag("quiet", quiet, "--quiet", "-q"))
        extra = [field.name for field in fields if isinstance(field.info, ExtraArguments)]
        if extra:
            parameters.insert(0, _keyword("context", typer.Context, inspect.Parameter.empty))

        def call(**values: Any) -> int:
            if extra:
                values[extra[0]] = tuple(values.pop("context").args)
            output = Output(values.pop("as_json", False), values.pop("quiet", False))
            return run(get_type_hints(run)["options"](**values), output)

        call.__doc__ = run.__doc__
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        call.__annotations__ = {
            parameter.name: (get_args(parameter.annotation) or (parameter.annotation,))[0] for parameter in parameters
        }
        epilog = "\n\n".join(["Examples:", *(f"  glm5-ascend {example}" for example in examples)])
        settings = {"allow_extra_args": bool(extra)}
        group.command(name, cls=Command, epilog=epilog, context_settings=settings)(call)
        return run

    return register


def _parameter(field: OptionField) -> inspect.Parameter:
    info: Any
    if isinstance(field.info, Argument):
        info = typer.Argument(metavar=field.info.metavar, help=field.info.help)
    else:
        assert isinstance(field.info, Option)
        option = field.info
        bounds = {name: value for name, value in (("min", option.min), ("max", option.max)) if value is not None}
        flags = option.flags or ((f"--{field.name.replace('_', '-')}",) if field.type is bool else ())
        info = typer.Option(
            *flags,
            help=option.help,
            metavar=option.metavar,
            show_default=option.default_text if option.default_text is not None else True,
            rich_help_panel=option.panel,
            **bounds,  # type: ignore[arg-type]
        )
    return _keyword(field.name, Annotated[shell_type(field.type), info], field.default)


def shell_type(hint: Any) -> Any:
    """The type that a shell's word is read as: of `str | Path | None` it is `Path | None`, of `int | str` it is str."""
    if get_origin(hint) not in (Union, UnionType):
        return list[str] if get_origin(hint) is Sequence else hint
    alternatives = get_args(hint)
    words = [alternative for alternative in alternatives if alternative is not NoneType]
    choices = [word for word in words if isinstance(word, type) and issubclass(word, Enum)]
    single: Any
    if choices:
        single = choices[0]
    elif Path in words:
        single = Path
    elif any(get_origin(word) is Sequence for word in words) and str not in words:
        single = list[str]
    else:
        single = words[0] if len(words) == 1 else str
    return single | None if NoneType in alternatives else single


def _keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _flag(name: str, text: str, *flags: str) -> inspect.Parameter:
    info = typer.Option(*flags, help=text, rich_help_panel=OUTPUT_PANEL)
    return _keyword(name, Annotated[bool, info], False)
