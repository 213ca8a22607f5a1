"""One dataclass per command: its fields are the options of the command line and the parameters of the function."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer

from glm5_ascend.cli import run
from glm5_ascend.cli.command import Output, command, shell_type
from glm5_ascend.options import Argument, ExtraArguments, Option, StrPath, option_fields, with_options


@dataclass(frozen=True)
class CopyOptions:
    source: Annotated[StrPath, Argument("SRC", "File to copy.")]
    rest: Annotated[Sequence[str], ExtraArguments()] = ()
    _: KW_ONLY
    times: Annotated[int, Option("Copies.", min=1, max=3)] = 1
    verbose: Annotated[bool, Option("Print names.", flags=("--verbose", "-v"))] = False
    callback: Callable[[str], None] | None = None


@with_options(CopyOptions)
def copy(options: CopyOptions) -> CopyOptions:
    """Copy a file."""
    return options


def test_a_function_takes_the_arguments_of_its_options_or_the_options() -> None:
    assert copy("a", times=2) == CopyOptions("a", times=2) == copy(CopyOptions("a", times=2))
    assert list(inspect.signature(copy).parameters) == ["source", "rest", "times", "verbose", "callback"]
    assert "Copy a file." in str(copy.__doc__) and "times: Copies." in str(copy.__doc__)


def test_a_command_has_the_options_of_its_dataclass() -> None:
    calls: list[tuple[CopyOptions, Output]] = []

    group = typer.Typer()

    @command("copy", "copy a", json="JSON.", group=group)
    def copy(options: CopyOptions, output: Output) -> int:
        calls.append((options, output))
        return 0

    program = typer.main.get_command(group)
    program(["a", "--times", "3", "-v", "--json", "--", "--x", "1"], standalone_mode=False)
    assert calls == [(CopyOptions(Path("a"), ("--x", "1"), times=3, verbose=True), Output(json=True))]
    with pytest.raises(Exception, match="less than or equal"):
        program(["a", "--times", "4"], standalone_mode=False)


@pytest.mark.parametrize(
    ("hint", "expected"),
    [(str | Path | None, Path | None), (int | str | None, str | None), (Sequence[str], list[str]), (int, int)],
)
def test_type_of_a_word_of_the_shell(hint: Any, expected: Any) -> None:
    assert shell_type(hint) == expected


def test_fields_without_a_description_are_for_python_only() -> None:
    assert [field.name for field in option_fields(CopyOptions)] == ["source", "rest", "times", "verbose"]


PLANS = [
    ("--quant", "w4a8", "--layout", "tp=16"),
    ("--quant", "w4a8", "--hardware", "a2"),
    ("--quant", "w8a8", "--nodes", "2"),
    ("--quant", "w8a8", "--layout", "tp=16,dcp=16", "--workload", "in=100000,out=1000,concurrency=1"),
]


@pytest.mark.parametrize("arguments", PLANS, ids=" ".join)
def test_every_command_that_a_plan_names_exists(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """As printed, with what stands in capitals filled in."""
    monkeypatch.chdir(tmp_path)
    assert run(["plan", *arguments, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)["command_lines"]
    ours = [line[line.index("glm5-ascend ") :].split()[1:] for line in printed if "glm5-ascend deploy" in line]
    for words in ours:
        assert run([word.replace("DIR", str(tmp_path)) for word in words]) == 0, words
    if any(line.startswith("profile: ") and "none" not in line for line in printed):
        assert ours
