"""`make demo`: from nothing to a chat answer and a tool call from a W4A8 GLM-5, every step a command a user would type.

`glm5-ascend demo DIR` runs demo-model, quantize, verify and serve as real commands, talks to the server and stops it.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from glm5_ascend.cli.command import Output, command
from glm5_ascend.demo_model.resources import DemoModel
from glm5_ascend.errors import EXIT_OK, CheckFailedError, OutputError
from glm5_ascend.options import Argument, StrPath

#: The model's folder in the demo's.
FOLDERS = {DemoModel.GLM5: "glm5-demo", DemoModel.FLASH: "flash-demo", DemoModel.SMOLLM2: "smollm2-demo"}
RECIPES = {DemoModel.FLASH: "flash-w4a8"}
#: Windows of 128 tokens that are compared with the source; GLM-5's demo answers instead.
WINDOWS = {DemoModel.FLASH: "20", DemoModel.SMOLLM2: "8"}
#: What a person would ask a model that is offered no tool: the small Flash has learned these kinds, and cannot add.
QUESTIONS = {
    DemoModel.FLASH: (
        "Hello! I am Anna.",
        "The list: Felix 8254; Anna 9325; Oscar 3424. What is Anna's number?",
        "What is the time in Oslo?",
    ),
    DemoModel.SMOLLM2: ("What is the capital of France?", "Who wrote Romeo and Juliet?", "What is water made of?"),
}


@dataclass(frozen=True)
class DemoOptions:
    """Options of `demo`."""

    directory: Annotated[
        StrPath, Argument("[DIR]", "Directory for model and checkpoint; an earlier demo in it is replaced.")
    ] = Path("glm5-demo")
    model: Annotated[DemoModel, Argument("[MODEL]", "glm-5, glm-5.3-flash or smollm2.")] = DemoModel.GLM5


@command("demo", "demo", "demo work/demo", "demo work/demo glm-5.3-flash", "demo work/smollm2 smollm2")
def run(options: DemoOptions, output: Output) -> int:
    """Try everything in a minute: write a small trained model, quantize, verify and serve it, ask it two questions."""
    demo(Path(options.directory), options.model)
    return EXIT_OK


def run_command(*arguments: str) -> None:
    """Run one `glm5-ascend` command, shown as a user would type it."""
    print(f"\n$ {shlex.join(['glm5-ascend', *arguments])}", flush=True)
    code = subprocess.call([sys.executable, "-m", "glm5_ascend", *arguments])
    if code:
        raise CheckFailedError(f"glm5-ascend {arguments[0]} ended with exit code {code}", "see its message above")


def converse(port: int, question: str, *tools: dict[str, Any]) -> None:
    """Ask one question, which must be answered, or lead to a call where a tool is offered."""
    from glm5_ascend.serve.conversation import ANSWER, THINKING, TOOL_CALL, connect

    print(f"\nuser      {question}" + ("   (it may call get_weather)" if tools else ""))
    conversation = connect(f"http://127.0.0.1:{port}")
    conversation.tools = list(tools)  # greedy: its generation_config.json says so
    texts = dict.fromkeys((THINKING, ANSWER, TOOL_CALL), "")
    for piece in conversation.ask(question):
        texts[piece.channel] += piece.text
    channel = TOOL_CALL if tools else ANSWER
    if thoughts := texts[THINKING].strip():
        print(f"thinking  {thoughts}")
    if not texts[channel].strip():
        raise CheckFailedError(f"no {channel}, the model said {texts[ANSWER]!r}", "see the server's log")
    print(f"{channel:<9} {texts[channel].strip()}")


def demo(directory: Path, name: DemoModel = DemoModel.GLM5) -> None:
    """Run all steps in `directory`, which must be empty or contain an earlier demo only."""
    model = directory / FOLDERS[name]
    quantized = directory / f"{model.name}-w4a8"
    if directory.is_dir() and {p.name for p in directory.iterdir()} - {model.name, quantized.name, "serve.log"}:
        raise OutputError(
            f"{directory}: contains files that are not the demo's",
            "name another one: glm5-ascend demo DIR, make demo DEMO=DIR",
        )
    directory.mkdir(parents=True, exist_ok=True)
    for old in (model, quantized):
        shutil.rmtree(old, ignore_errors=True)
    run_command("demo-model", str(model), *([] if name is DemoModel.GLM5 else [name]))
    run_command("quantize", str(model), str(quantized), "--recipe", RECIPES.get(name, "w4a8"))
    run_command("verify", str(quantized), "--against", str(model))
    if windows := WINDOWS.get(name):
        run_command("eval", str(quantized), "--against", str(model), "--windows", windows, "--window", "128")
    from glm5_ascend.serve.asking import WEATHER
    from glm5_ascend.serve.environment import require_cpu_environment
    from glm5_ascend.serve.local_server import server

    require_cpu_environment()  # where vLLM has no wheel the demo ends here
    log = directory / "serve.log"
    print(f"\n$ glm5-ascend serve {quantized}     (log: {log})", flush=True)
    with server(quantized, log) as port:
        for question in QUESTIONS.get(name, ()):
            converse(port, question)
        if name is DemoModel.GLM5:  # a question that needs thinking, and one that needs a tool
            converse(port, "What is 47 + 38?")
            converse(port, "What is the weather in Oslo?", WEATHER)
    print(f"\nThe W4A8 checkpoint is in {quantized}. Serve it: glm5-ascend serve {quantized}")
