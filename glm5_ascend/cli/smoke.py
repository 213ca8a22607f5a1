"""`glm5-ascend smoke URL`."""

from __future__ import annotations

import os
from dataclasses import asdict

from glm5_ascend.cli.command import Output, command
from glm5_ascend.errors import EXIT_CHECK_FAILED, EXIT_OK, json_frame, printable
from glm5_ascend.serve.options import SmokeOptions


@command("smoke", "smoke http://127.0.0.1:8000", "smoke http://127.0.0.1:8000 --json", json=True)
def run(options: SmokeOptions, output: Output) -> int:
    """Check a running server: answers, also to requests at once, tool calls, thinking, streams, long prompts, cache."""
    from glm5_ascend.serve import smoke
    from glm5_ascend.serve.client import Client, server_address

    client = Client(server_address(options.url), key=os.environ.get("OPENAI_API_KEY", ""))
    model, results = client.entry()["id"], smoke.run(client)
    code = EXIT_OK if smoke.passes(results) else EXIT_CHECK_FAILED
    lines = [printable(f"{result.check:<15} {result.status:<8} {result.detail}") for result in results]
    data = {"url": options.url, "model": model, "checks": [asdict(result) for result in results]}
    output.write(json_frame("smoke", code) | data, [*lines, smoke.verdict(results)])
    return code
