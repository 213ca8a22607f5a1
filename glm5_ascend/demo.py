"""`make demo`: from nothing to a chat answer and a tool call from a W4A8 GLM-5, every step a command a user would type.

`python -m glm5_ascend.demo DIR` runs demo-model, quantize, verify and serve as real commands, then talks to the server
with the official OpenAI client and stops it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from glm5_ascend.errors import EXIT_INTERRUPTED, CheckFailedError, Glm5Error, MissingEnvironmentError, OutputError

START_TIMEOUT_S = 300
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


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def server(directory: Path, log: Path) -> Iterator[int]:
    """A running server on a free port of 127.0.0.1; ended when the block ends."""
    port = free_port()
    command = [sys.executable, "-m", "glm5_ascend", "serve", str(directory), "--port", str(port)]
    print(f"\n$ glm5-ascend serve {directory} --port {port}     (log: {log})", flush=True)
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            _wait_until_ready(process, port, log)
            yield port
        finally:
            _stop(process)


def _wait_until_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            last = (log.read_text(errors="replace").strip().splitlines() or ["no output"])[-1]
            raise MissingEnvironmentError(f"the server ended with exit code {process.returncode}: {last}", f"see {log}")
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
            return
        time.sleep(0.5)
    raise MissingEnvironmentError(f"the server did not answer within {START_TIMEOUT_S} s", f"see {log}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the server and its engine process, which share a process group of their own."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=30)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


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
    with server(quantized, directory / "serve.log") as port:
        chat(port)
    print(f"\nThe W4A8 checkpoint is in {quantized}. Serve it: glm5-ascend serve {quantized}")


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: python -m glm5_ascend.demo DIR", file=sys.stderr)
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
