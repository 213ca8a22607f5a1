"""A command and its function take the same options: names and defaults."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from typing import Any

import pytest
import typer
from typer.models import ArgumentInfo, OptionInfo

from glm5_ascend.cli import analyze as analyze_command
from glm5_ascend.cli import deploy as deploy_command
from glm5_ascend.cli import doctor as doctor_command
from glm5_ascend.cli import eval as eval_command
from glm5_ascend.cli import plan as plan_command
from glm5_ascend.cli import quantize as quantize_command
from glm5_ascend.cli import run
from glm5_ascend.cli import serve as serve_command
from glm5_ascend.cli import verify as verify_command
from glm5_ascend.cli import watch as watch_command
from glm5_ascend.deploy import doctor, render
from glm5_ascend.fidelity import analyze, evaluate
from glm5_ascend.plan import plan
from glm5_ascend.quantize import quantize
from glm5_ascend.serve import serve, watch
from glm5_ascend.verify import verify

#: What belongs to a terminal alone: how the answer is printed.
SHOWN = {"as_json", "quiet", "context"}
#: A measurement of this machine, tables and fits of the planner; what only a profile has.
ONLY_COMMAND = {
    "plan": {"measure", "out", "baselines", "calibrate", "csv", "sweep", "what_if"},
    "serve": {"log", "verbose", "profile", "role", "node", "rank", "head", "ip", "nic", "skip_verify"},
    "watch": {"learn"},
}
#: What only a caller can give: callbacks, vLLM's own flags, how deep to look before serving.
ONLY_FUNCTION = {"progress", "on_plan", "on_poll", "vllm_args", "deep"}
#: A command tells "not given" from the default, because a second spelling or a profile may give it.
NOT_GIVEN = {("serve", "host"), ("serve", "port")}
PAIRS: list[tuple[str, Callable[..., Any], Callable[..., Any]]] = [
    ("quantize", quantize_command.quantize, quantize),
    ("verify", verify_command.verify, verify),
    ("eval", eval_command.evaluate, evaluate),
    ("analyze", analyze_command.analyze, analyze),
    ("plan", plan_command.plan, plan),
    ("render", deploy_command.render, render),
    ("doctor", doctor_command.doctor, doctor),
    ("serve", serve_command.serve, serve),
    ("watch", watch_command.watch, watch),
]


def options(command: Callable[..., Any]) -> dict[str, Any]:
    """Defaults of a command's parameters by name."""
    return {name: parameter.default for name, parameter in inspect.signature(command).parameters.items()}


@pytest.mark.parametrize(("name", "command", "function"), PAIRS, ids=[name for name, *_ in PAIRS])
def test_names_and_defaults(name: str, command: Callable[..., Any], function: Callable[..., Any]) -> None:
    shell = {k: v for k, v in options(command).items() if k not in SHOWN | ONLY_COMMAND.get(name, set())}
    called = {k: v for k, v in options(function).items() if k not in ONLY_FUNCTION}
    assert set(shell) == set(called)
    for option, default in shell.items():
        if (name, option) in NOT_GIVEN or called[option] is inspect.Parameter.empty:
            continue  # a required argument of the function may stand in two places on a command line
        assert default == called[option] or str(default) == str(called[option]), option


@pytest.mark.parametrize(("name", "command", "function"), PAIRS, ids=[name for name, *_ in PAIRS])
def test_every_option_of_a_command_is_described(
    name: str, command: Callable[..., Any], function: Callable[..., Any]
) -> None:
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        if parameter.annotation is not typer.Context:
            (info,) = (m for m in parameter.annotation.__metadata__ if isinstance(m, ArgumentInfo | OptionInfo))
            assert info.help, f"{name} {parameter.name}"
    assert inspect.getdoc(function)


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


def test_ctrl_c_promises_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Some commands have written files by then."""
    import glm5_ascend.cli as cli

    def pressed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "app", pressed)
    assert run(["plan"]) == 130
    assert capsys.readouterr().err == "interrupted\n"
