"""Options of commands: one dataclass per command is the source of its command line, Python function and documents.

A field with an `Option` or `Argument` is on the command line. A field without is for Python only, such as a callback:

    @dataclass(frozen=True)
    class VerifyOptions:
        directory: Annotated[StrPath, Argument("DIR", "Quantized checkpoint.")]
        _: KW_ONLY
        against: Annotated[StrPath | None, Option("Source checkpoint.", "SRC")] = None

    @with_options(VerifyOptions)
    def verify(options: VerifyOptions) -> Report: ...

    verify("glm5-w4a8", against="GLM-5")
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ParamSpec, Protocol, TypeVar, cast, get_args, get_origin, get_type_hints, overload

P = ParamSpec("P")
O_contra = TypeVar("O_contra", contravariant=True)
R_co = TypeVar("R_co", covariant=True)

StrPath = str | Path


@dataclass(frozen=True)
class Option:
    """An option of a command.

    Attributes:
        help: one sentence for `--help` and the documents.
        metavar: name of the value in the help, such as FILE; None for a flag or the usual word of the type.
        min, max: bounds of a number, inclusive.
        default_text: description of the default where the default itself says nothing.
        panel: heading in the help.
        flags: spelling, if it is not the field's name: "--json", "-v".
    """

    help: str
    metavar: str | None = None
    min: float | None = None
    max: float | None = None
    default_text: str | None = None
    panel: str | None = None
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Argument:
    """A positional argument of a command."""

    metavar: str
    help: str


@dataclass(frozen=True)
class ExtraArguments:
    """Marks the field that takes what follows `--` on a command line."""


@dataclass(frozen=True)
class OptionField:
    """A field of an options dataclass that is on the command line; a required one has `inspect.Parameter.empty`."""

    name: str
    type: Any
    default: Any
    info: Option | Argument | ExtraArguments


def option_fields(options: type) -> list[OptionField]:
    """Fields of a dataclass that are options, in order, those of its base classes first."""
    hints, fields = get_type_hints(options, include_extras=True), []
    for field in dataclasses.fields(options):
        hint = hints[field.name]
        infos = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
        for info in infos:
            if isinstance(info, Option | Argument | ExtraArguments):
                default = inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
                fields.append(OptionField(field.name, get_args(hint)[0], default, info))
    return fields


class OptionsFunction(Protocol[P, O_contra, R_co]):
    """A function that takes an options dataclass, or the arguments of its constructor."""

    @overload
    def __call__(self, options: O_contra, /) -> R_co: ...
    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...


def with_options(
    options: Callable[P, O_contra],
) -> Callable[[Callable[[O_contra], R_co]], OptionsFunction[P, O_contra, R_co]]:
    """Let a function of an options dataclass be called with the dataclass's arguments, too."""

    def decorate(function: Callable[[O_contra], R_co]) -> OptionsFunction[P, O_contra, R_co]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> R_co:
            if len(args) == 1 and not kwargs and isinstance(args[0], cast(type, options)):
                return function(cast(Any, args[0]))
            return function(options(*args, **kwargs))

        parameters, hints = inspect.signature(options).parameters.values(), get_type_hints(options)
        returns = inspect.signature(function).return_annotation
        call.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [parameter.replace(annotation=hints[parameter.name]) for parameter in parameters],
            return_annotation=returns,
        )
        call.__doc__ = f"{inspect.getdoc(function)}\n\nArgs:\n{_descriptions(cast(type, options))}"
        return cast("OptionsFunction[P, O_contra, R_co]", call)

    return decorate


def _descriptions(options: type) -> str:
    fields = [field for field in option_fields(options) if isinstance(field.info, Option | Argument)]
    return "\n".join(f"    {field.name}: {field.info.help}" for field in fields)  # type: ignore[union-attr]
