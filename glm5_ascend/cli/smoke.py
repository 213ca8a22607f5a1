"""`glm5-ascend smoke URL`."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Annotated

import typer

from glm5_ascend.cli.help import command as add_command
from glm5_ascend.errors import EXIT_CHECK_FAILED, EXIT_OK, printable

LONGEST_DEFAULT = 8192


def register(app: typer.Typer) -> None:
    add_command(
        app, "smoke", smoke,
        "smoke http://127.0.0.1:8000",
        "smoke http://127.0.0.1:8000 --json",
    )  # fmt: skip


def smoke(
    url: Annotated[str, typer.Argument(metavar="URL", help="Of the server or router, http://HOST:PORT.")],
    model: Annotated[
        str, typer.Option(metavar="NAME", show_default="the first one it serves", help="Its name for the model.")
    ] = "",
    long_tokens: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=10_000_000,
            show_default="half the context, at most 8192",
            help="Length of the long prompt; 0: none.",
        ),
    ] = None,
    min_acceptance: Annotated[
        float | None, typer.Option(show_default="warn below 2.5", help="Fail below this many tokens per step with MTP.")
    ] = None,
    timeout: Annotated[
        float, typer.Option(metavar="S", min=0.1, max=86400, help="Seconds to wait for one answer.")
    ] = 300.0,
    key: Annotated[
        str, typer.Option(metavar="KEY", envvar="OPENAI_API_KEY", help="API key, if the server wants one.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Report as one JSON object on stdout.")] = False,
) -> int:
    """Ask a running server: canaries, tool call, thinking, streaming, a long prompt, MTP acceptance."""
    from glm5_ascend.serve import smoke as checks
    from glm5_ascend.serve.client import Client, server_address

    client = Client(server_address(url), model, timeout, key)
    entry = client.entry()
    if long_tokens is None:
        long_tokens = min(LONGEST_DEFAULT, (entry.get("max_model_len") or 2 * LONGEST_DEFAULT) // 2)
    lines = checks.run(replace(client, model=entry["id"]), checks.SmokeBounds(long_tokens, min_acceptance))
    code = EXIT_CHECK_FAILED if any(line.status == checks.FAILED for line in lines) else EXIT_OK
    if as_json:
        value = {"schema_version": 1, "command": "smoke", "ok": code == EXIT_OK, "exit_code": code}
        print(json.dumps(value | {"url": url, "model": entry["id"], "checks": [asdict(line) for line in lines]}))
        return code
    for line in lines:
        print(printable(f"{line.check:<15} {line.status:<8} {line.detail}"))
    print(checks.verdict(lines))
    return code
