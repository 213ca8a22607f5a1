"""`glm5-ascend deploy heartbeat`: replicas behind a running router."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from glm5_ascend.cli.help import command
from glm5_ascend.errors import EXIT_OK, printable

Router = Annotated[str, typer.Argument(metavar="ROUTER", help="URL of the running vllm-router.")]
Canaries = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", show_default="three sums", help="Questions with known answers, as watch --learn writes."
    ),
]
Key = Annotated[str, typer.Option(metavar="KEY", envvar="OPENAI_API_KEY", help="API key, if one is wanted.")]


def register(group: typer.Typer) -> None:
    command(
        group, "heartbeat", heartbeat,
        "deploy heartbeat http://a:8080 --on-hung ./end-{host}.sh",
    )  # fmt: skip


def heartbeat(
    router: Router,
    on_hung: Annotated[
        str, typer.Option(metavar="CMD", help="Ends or restarts a hung server, so that its requests go elsewhere.")
    ] = "",
    interval: Annotated[float, typer.Option(metavar="S", min=0.1, help="Seconds from beat to beat.")] = 5.0,
    patience: Annotated[int, typer.Option(min=1, help="Beats in a row without a sign of life.")] = 3,
    timeout: Annotated[float, typer.Option(metavar="S", min=0.1, help="Seconds for a sign of life.")] = 10.0,
    beats: Annotated[int, typer.Option(min=0, show_default="without end", help="End after so many.")] = 0,
    canaries: Canaries = None,
    key: Key = "",
) -> int:
    """Take servers that hang out of a router, and let them in when they are well. A busy server is no hung one."""
    from glm5_ascend.deploy.fleet.commands import named, run_command
    from glm5_ascend.deploy.fleet.heartbeat import FleetHeartbeat
    from glm5_ascend.serve.router import connected
    from glm5_ascend.serve.watching.canaries import read_canaries

    if on_hung:
        named(on_hung, "http://a:1")
    if canaries is not None:
        read_canaries(canaries)
    end = partial(run_command, on_hung) if on_hung else None
    FleetHeartbeat(connected(router, key), patience, timeout, end, canaries, key, show).run(interval, beats)
    return EXIT_OK


def show(line: str) -> None:
    print(printable(line), flush=True)
