"""`glm5-ascend watch URL`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from glm5_ascend.cli.help import SHOWN
from glm5_ascend.cli.help import command as add_command
from glm5_ascend.errors import EXIT_OK, printable

if TYPE_CHECKING:
    from glm5_ascend.serve.watching.judge import WatchState


def register(app: typer.Typer) -> None:
    add_command(
        app, "watch", watch,
        "watch http://127.0.0.1:8000 --learn canaries.json",
        "watch http://127.0.0.1:8000 --canaries canaries.json",
        "watch http://127.0.0.1:8000 --once",
    )  # fmt: skip


def watch(
    url: Annotated[str, typer.Argument(metavar="URL", help="Of the server or router, http://HOST:PORT.")],
    learn: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write what this healthy server answers, and end.")
    ] = None,
    canaries: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", show_default="three sums", help="Questions with known answers, as --learn writes."
        ),
    ] = None,
    polls: Annotated[int, typer.Option(min=0, show_default="without end", help="End after so many.")] = 0,
    interval: Annotated[
        float, typer.Option(metavar="S", min=0, max=86400, help="Seconds from one poll to the next.")
    ] = 10.0,
    once: Annotated[
        bool, typer.Option("--once", help="Two polls at once, for cron: exit code 0 healthy, 1 garbage, 3 unreachable.")
    ] = False,
    metrics_port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="GET /metrics for Prometheus; 0: any free port.", rich_help_panel=SHOWN),
    ] = None,
    metrics_host: Annotated[
        str, typer.Option(metavar="IP", help="Address of that port.", rich_help_panel=SHOWN)
    ] = "127.0.0.1",
    textfile: Annotated[
        Path | None, typer.Option(metavar="FILE", help="For the node exporter, after each poll.", rich_help_panel=SHOWN)
    ] = None,
    min_acceptance: Annotated[
        float | None,
        typer.Option(show_default="half the gain learnt, else 1.3", help="Least tokens per step with MTP."),
    ] = None,
    model: Annotated[
        str, typer.Option(metavar="NAME", show_default="the first one it serves", help="Its name for the model.")
    ] = "",
    timeout: Annotated[
        float, typer.Option(metavar="S", min=0.1, max=86400, help="Seconds to wait for one answer.")
    ] = 60.0,
    key: Annotated[
        str, typer.Option(metavar="KEY", envvar="OPENAI_API_KEY", help="API key, if the server wants one.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object at the end.", rich_help_panel=SHOWN)] = False,
) -> int:
    """Watch a server for garbage: known questions, log-probabilities, repeats, empty tool calls, MTP acceptance."""
    from glm5_ascend.serve.watching import api

    if learn is not None:
        found = api.learn_canaries(url, learn, canaries=canaries, model=model, timeout=timeout, key=key)
        if as_json:
            value = {"schema_version": 1, "command": "watch", "ok": True, "exit_code": 0, "learnt": str(learn)}
            print(json.dumps(value | {"canaries": len(found.canaries), "tokens_per_step": found.tokens_per_step}))
        else:
            print(
                printable(f"wrote {learn}: {len(found.canaries)} canaries; glm5-ascend watch {url} --canaries {learn}")
            )
        return EXIT_OK
    report = api.watch(
        url, canaries=canaries, polls=polls, interval=interval, once=once, metrics_port=metrics_port,
        metrics_host=metrics_host, textfile=textfile, min_acceptance=min_acceptance, model=model, timeout=timeout,
        key=key, on_poll=None if as_json else Changes().show,
    )  # fmt: skip
    print(json.dumps(report.to_dict()) if as_json else printable(report.verdict))
    return report.exit_code


class Changes:
    """A line where a poll says something else than the one before."""

    def __init__(self) -> None:
        self.before: tuple[bool, frozenset[str]] | None = None

    def show(self, number: int, state: WatchState) -> None:
        now = state.reached, frozenset(state.findings)
        if now != self.before:
            said = "; ".join(f"{name}: {words}" for name, words in state.findings.items()) or "healthy"
            print(printable(f"poll {number}: {said if state.reached else 'nothing answers'}"), flush=True)
            for line in state.said[:3] if state.findings or not state.reached else ():
                print(printable(f"  {line}"), flush=True)
        self.before = now
