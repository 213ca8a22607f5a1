"""`make demo`: from nothing to a chat answer and a tool call from a W4A8 GLM-5, every step a command a user would type.

`glm5-ascend demo DIR` runs demo-model, quantize, verify and serve as real commands, talks to the server with the
official OpenAI client and stops it. GLM-5.3-Flash is not served on a CPU: it is compared with its source.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from glm5_ascend.cli.command import Output, add_command
from glm5_ascend.demo_model.resources import DemoModel
from glm5_ascend.errors import EXIT_OK, CheckFailedError, OutputError
from glm5_ascend.options import Argument, StrPath


@dataclass(frozen=True)
class DemoOptions:
    """Options of `demo`."""

    directory: Annotated[
        StrPath, Argument("[DIR]", "Directory for model and checkpoint; an earlier demo in it is replaced.")
    ] = Path("glm5-demo")
    model: Annotated[DemoModel, Argument("[MODEL]", "glm-5, or glm-5.3-flash: not served, but evaluated.")] = (
        DemoModel.GLM5
    )


def register(app: typer.Typer) -> None:
    add_command(app, "demo", run, "demo", "demo work/demo", "demo work/demo glm-5.3-flash")


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


def chat(port: int) -> None:
    """Ask a question that needs thinking, and one that needs a tool."""
    from openai import OpenAI

    from glm5_ascend.serve.smoke import WEATHER

    client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="unused")
    answer = _ask(client, "What is 47 + 38?")
    print(f"answer    {(answer.content or '').strip()}")
    if not answer.content:
        raise CheckFailedError("the model answered with nothing", "see the server's log")

    answer = _ask(client, "What is the weather in Oslo?", tools=[WEATHER])
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in answer.tool_calls or []]
    for name, arguments in calls:
        print(f"tool call {name}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})")
    if not calls:
        raise CheckFailedError(f"no tool call, the model said {answer.content!r}", "see the server's log")


def _ask(client: Any, question: str, **options: Any) -> Any:
    """One greedy chat completion; prints question and thinking, returns the message."""
    print(f"\nuser      {question}" + ("   (it may call get_weather)" if options else ""))
    message = (
        client.chat.completions.create(
            model="glm-5", messages=[{"role": "user", "content": question}], temperature=0, max_tokens=128, **options
        )
        .choices[0]
        .message
    )
    print(f"thinking  {_reasoning(message).strip()}")
    return message


def _reasoning(message: Any) -> str:
    return getattr(message, "reasoning_content", None) or getattr(message, "reasoning", None) or ""


def demo(directory: Path, name: DemoModel = DemoModel.GLM5) -> None:
    """Run all steps in `directory`, which must be empty or contain an earlier demo only."""
    flash = name is DemoModel.FLASH
    model = directory / ("flash-demo" if flash else "glm5-demo")
    quantized = directory / f"{model.name}-w4a8"
    if directory.is_dir() and {p.name for p in directory.iterdir()} - {model.name, quantized.name, "serve.log"}:
        raise OutputError(
            f"{directory}: contains files that are not the demo's",
            "name another one: glm5-ascend demo DIR, make demo DEMO=DIR",
        )
    directory.mkdir(parents=True, exist_ok=True)
    for old in (model, quantized):
        shutil.rmtree(old, ignore_errors=True)
    run_command("demo-model", str(model), *([name] if flash else []))
    run_command("quantize", str(model), str(quantized), "--recipe", "flash-w4a8" if flash else "w4a8")
    run_command("verify", str(quantized), "--against", str(model))
    if flash:
        run_command("eval", str(quantized), "--against", str(model), "--windows", "20", "--window", "128")
        print(f"\nThe W4A8 checkpoint is in {quantized}; vllm-ascend 0.30 loads it on an Atlas.")
        return
    from glm5_ascend.serve.environment import require_cpu_environment
    from glm5_ascend.serve.local_server import server

    require_cpu_environment()  # where vLLM has no wheel the demo ends here
    log = directory / "serve.log"
    print(f"\n$ glm5-ascend serve {quantized}     (log: {log})", flush=True)
    with server(quantized, log) as port:
        chat(port)
    print(f"\nThe W4A8 checkpoint is in {quantized}. Serve it: glm5-ascend serve {quantized}")
