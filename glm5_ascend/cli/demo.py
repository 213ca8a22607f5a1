"""`make demo`: from nothing to a chat answer and a tool call from a W4A8 GLM-5, every step a command a user would type.

`python -m glm5_ascend.cli.demo DIR` runs demo-model, quantize, verify and serve as real commands, talks to the server
with the official OpenAI client and stops it.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from glm5_ascend.errors import EXIT_INTERRUPTED, CheckFailedError, Glm5Error, OutputError
from glm5_ascend.serve.local_server import server

WEATHER_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def run(*arguments: str) -> None:
    """Run one `glm5-ascend` command, shown as a user would type it."""
    print(f"\n$ {shlex.join(['glm5-ascend', *arguments])}", flush=True)
    code = subprocess.call([sys.executable, "-m", "glm5_ascend", *arguments])
    if code:
        raise CheckFailedError(f"glm5-ascend {arguments[0]} ended with exit code {code}", "its message stands above")


def chat(port: int) -> None:
    """A question answered after thinking, and a question that needs a tool."""
    from openai import OpenAI

    client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="unused")
    answer = _ask(client, "What is 47 + 38?")
    print(f"answer    {(answer.content or '').strip()}")
    if not answer.content:
        raise CheckFailedError("the model answered with nothing", "see the server's log")

    answer = _ask(client, "What is the weather in Oslo?", tools=[WEATHER_TOOL])
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


def demo(directory: Path) -> None:
    """Run the whole path in `directory`, which holds nothing but what an earlier demo left."""
    model, quantized = directory / "glm5-demo", directory / "glm5-demo-w4a8"
    if directory.is_dir() and {p.name for p in directory.iterdir()} - {model.name, quantized.name, "serve.log"}:
        raise OutputError(
            f"{directory}: holds files that are not the demo's", "name another directory: make demo DEMO=DIR"
        )
    directory.mkdir(parents=True, exist_ok=True)
    for old in (model, quantized):
        shutil.rmtree(old, ignore_errors=True)
    run("demo-model", str(model))
    run("quantize", str(model), str(quantized), "--recipe", "w4a8")
    run("verify", str(quantized), "--against", str(model))
    log = directory / "serve.log"
    print(f"\n$ glm5-ascend serve {quantized}     (log: {log})", flush=True)
    with server(quantized, log) as port:
        chat(port)
    print(f"\nThe W4A8 checkpoint is in {quantized}. Serve it: glm5-ascend serve {quantized}")


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: python -m glm5_ascend.cli.demo DIR", file=sys.stderr)
        return 2
    try:
        demo(Path(sys.argv[1]))
    except Glm5Error as error:
        print(f"error: {error.message}\n  fix: {error.tip}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
