"""`glm5-ascend deploy upgrade` and `glm5-ascend deploy heartbeat`: replicas behind a running router."""

from __future__ import annotations

import json
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
        group, "upgrade", upgrade,
        "deploy upgrade http://a:8080 --restart ./upgrade-{host}.sh",
    )  # fmt: skip
    command(
        group, "heartbeat", heartbeat,
        "deploy heartbeat http://a:8080 --on-hung ./end-{host}.sh",
    )  # fmt: skip


def upgrade(
    router: Router,
    restart: Annotated[
        str, typer.Option(metavar="CMD", help="Ends a drained server and starts its successor: {url}, {host}, {port}.")
    ],
    worker: Annotated[
        list[str] | None, typer.Option(metavar="URL", show_default="all", help="Only this server; may be given again.")
    ] = None,
    canaries: Canaries = None,
    drain: Annotated[float, typer.Option(metavar="S", min=1, help="Seconds for requests that were begun.")] = 3600.0,
    start: Annotated[float, typer.Option(metavar="S", min=1, help="Seconds until the new server answers.")] = 5400.0,
    key: Key = "",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> int:
    """Upgrade replicas one by one: drained, restarted, asked canaries, let in. No request is lost."""
    from glm5_ascend.deploy.fleet.commands import named, run_command
    from glm5_ascend.deploy.fleet.upgrade import UpgradeLimits
    from glm5_ascend.deploy.fleet.upgrade import upgrade as run
    from glm5_ascend.serve.router import connected
    from glm5_ascend.serve.watching.canaries import read_canaries

    named(restart, "http://a:1")  # said before the first server leaves
    if canaries is not None:
        read_canaries(canaries)
    done = run(
        connected(router, key), partial(run_command, restart), workers=worker or (), canaries=canaries,
        limits=UpgradeLimits(drain, start), key=key, say=quiet if as_json else show,
    )  # fmt: skip
    print(json.dumps(done.to_dict()) if as_json else f"ok: {len(done.replicas)} servers upgraded")
    return EXIT_OK


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


def quiet(line: str) -> None:
    """With --json stdout is one object."""
